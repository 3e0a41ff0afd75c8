"""ALFWorld: household tasks in text, played on the installed TextWorld engine.

``settings`` the section · ``layout`` floor plans of the wheel · ``pddl`` problem text · ``games``
generated rooms · ``store`` games on disk and task lists · ``engine`` the memoised engine · ``env``
the environment · ``prompts`` and ``projection`` its two text sides · ``expert`` and
``demonstrations`` cold-start data · ``policy`` a small model. Nothing here but ``policy`` imports
torch; the engine itself is imported when the first environment is made.
"""
