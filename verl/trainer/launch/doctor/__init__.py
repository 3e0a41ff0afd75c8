"""Checks of a machine: ``facts`` reads its properties, ``smoke`` runs small trials, ``command``
prints the results.

``command`` and ``facts`` import no heavy package at the top, so that they work without torch.
"""
