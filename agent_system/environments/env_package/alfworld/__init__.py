"""ALFWorld: household tasks in text, run on the installed TextWorld engine.

- ``settings``: the config section.
- ``layout``: floor plans in the Python package ``alfworld``. ``games``: generated rooms. ``store``:
  games on disk and task lists.
- ``engine``: the engine, which caches the results of slow parts, with ``grammar`` and ``planner``.
  ``env``: the environment.
- ``prompts``: its input and output texts.
- ``expert`` and ``derived_thoughts``: scripted policies whose demonstrations a new policy imitates.

No module imports torch. The engine is imported when the first environment is made.
"""
