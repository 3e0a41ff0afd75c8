"""Research tools of the method: the audit, executed credit and fixed level rules."""
