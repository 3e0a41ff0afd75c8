"""Base class of the settings of an environment, ``env.<name>``."""

from collections.abc import Mapping
from typing import ClassVar

from verl.config.settings.section import Section


class EnvSection(Section):
    """Settings of one environment, and the facts that the whole configuration reads from them."""

    # Dotted path of a key of the whole configuration -> key of this section that it sets, for
    # environments whose tasks are the rows of ``data.train_files`` and ``data.val_files``.
    data_keys: ClassVar[Mapping[str, str]] = {}
    # True if tasks with too long prompts can be dropped or cut: the package has ``task_text``.
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
