"""Research tools of the method: the audit, executed alternatives and fixed level rules."""
