"""ALFWorld: household tasks in text, run on the installed TextWorld engine.

- ``settings``: the config section.
- ``layout``: floor plans of the alfworld wheel. ``pddl``: PDDL problem text.
- ``games``: generated rooms. ``store``: games on disk and task lists.
- ``engine``: the memoised engine, with ``grammar``, ``translation`` and ``planner``.
- ``env``: the environment. ``prompts`` and ``projection``: its input and output texts.
- ``expert``, ``derived_thoughts`` and ``demonstrations``: cold-start data.

No module imports torch. The engine is imported when the first environment is made.
"""
