"""Environments on the command line: their names, checks of their rewards, and a person who plays.

``names`` what can be played · ``policies`` who plays for a check · ``plays`` what was played ·
``checking`` what a check asks and what it found · ``playing`` a person's play · ``command`` the
words of the command line.
"""
