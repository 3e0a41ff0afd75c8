"""Mutation testing: change one expression of a module, and check that a test fails.

    python -m scripts.dev.mutants                       every module of ``targets.py``; resumes
    python -m scripts.dev.mutants rlvcr/thinking.py     one module
    python -m scripts.dev.mutants --report              only writes scripts/dev/mutants/results.md
    python -m scripts.dev.mutants --outdated            lists accepted survivors of changed code

The changes are those of mutmut, applied by its visitor. Its runner is not used, because it skips
decorated functions (all registered estimators, all properties) and constants of a module.

    main process: imports the libraries, never the packages
      |- one process per target, forked: imports the packages, collects the tests
      |    |- one child traces which test runs which line
      |    `- one child per mutant of a function: swaps its code, runs the tests that call it
      `- one child per mutant of import-time code: imports the changed source, runs the tests

A fork costs tens of milliseconds, an import of torch and the packages several seconds.
"""
