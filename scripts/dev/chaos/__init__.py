"""Faults on purpose: does a run end with a word about what failed, and go on where it was killed?

    python -m scripts.dev.chaos matrix              every part of a small job struck at every stage
    python -m scripts.dev.chaos matrix --report     plays nothing, writes docs/reliability.md
    python -m scripts.dev.chaos kills --count 100   SIGKILL at random moments of a deterministic run
    python -m scripts.dev.chaos torn --count 1000   torn, flipped, deleted, swapped checkpoint files

    harness    start job ─▶ wait for `reached` ─▶ signal the part ─▶ `struck` ─▶ wait, judge
    job             `strike` stands in a method ──┘                     └─▶ goes on

What is known already is not played again: results lie in docs/chaos.
"""
