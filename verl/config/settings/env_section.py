"""Base class of the settings of an environment, ``env.<name>``."""

from collections.abc import Mapping
from typing import ClassVar

from verl.config.settings.section import Section


class EnvSection(Section):
    """Settings of one environment, and properties of it that other sections depend on."""

    # Dotted path of a key outside of ``env`` -> key of this section to which its value is copied.
    # For environments whose tasks are the rows of ``data.train_files`` and ``data.val_files``.
    data_keys: ClassVar[Mapping[str, str]] = {}
    # True if the environment can drop tasks with too long prompts, or truncate these. Its package
    # then has a function ``task_text``.
    fits_prompts: ClassVar[bool] = False

    def known_tasks(self, split: str) -> int | None:
        """Return the number of tasks of ``split`` (``train``, ``val``), or None where only the
        package knows it.
        """
        del split
        return None

    def file_key(self, split: str) -> str | None:
        """Return the key of this section that names a file of tasks of ``split``, or None."""
        del split
        return None
