"""What a machine can run: ``facts`` looks, ``smoke`` tries, ``command`` says.

The command and the facts import nothing heavy at the top: a machine on which torch is missing is
one that needs them.
"""
