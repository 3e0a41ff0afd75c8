"""Checks of a machine: ``facts`` reads its properties, ``smoke`` runs smoke tests."""
