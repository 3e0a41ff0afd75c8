"""``python -m verl.utils.report RUN_DIR``, the earlier name of ``python -m verl.record.report``."""

import runpy

if __name__ == "__main__":
    # By name: utilities import nothing of the rooms above them.
    runpy.run_module("verl.record.report", run_name="__main__", alter_sys=True)
