"""Fault injection: check that a run names the failed part in its error, and resumes after a kill.

A part is a process of the job: engine, environment worker, collector, training rank, node, driver.

    python -m scripts.dev.chaos matrix              every part of a small job fails at every stage
    python -m scripts.dev.chaos matrix --report     run nothing, write docs/reliability.md
    python -m scripts.dev.chaos kills --count 100   SIGKILL at random moments of a deterministic run
    python -m scripts.dev.chaos torn --count 1000   cut, changed, deleted, swapped checkpoint files

    harness    start job ─▶ wait for `reached` ─▶ signal the part ─▶ `struck` ─▶ wait, check
    job             waits in a method of the stage ──┘                  └─▶ continues

``reached`` and ``struck`` (fault injected) are marker files. Results are kept in docs/chaos. Cells
of the matrix that have a result are not run again.
"""
