"""Other trainers on this environment layer; each in a package of its own that imports what it
adapts.
"""
