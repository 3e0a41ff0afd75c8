"""Alias: ``python -m verl.utils.report RUN_DIR`` runs ``python -m verl.record.report``."""

import runpy

if __name__ == "__main__":
    # Run the module by name: verl.utils must not import verl.record.
    runpy.run_module("verl.record.report", run_name="__main__", alter_sys=True)
