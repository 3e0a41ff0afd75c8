"""TextWorld games on disk: made once per settings, stored by content hash, compiled on first use.

- ``data_dir/<settings hash>.json``: hashes of the games of each split
- ``data_dir/games/<hash>.json``: a game
- ``data_dir/games/<hash>.z8``: its compiled form, after first use
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from verl.utils.files import atomic_write
from verl.utils.processes import available_cpus
from verl.utils.progress import Progress

logger = logging.getLogger(__name__)
STORE_VERSION = 1  # increase it when the same settings give other games
# At half a second per game, this is enough for 14,000 games on one core.
MAX_MAKE_S = 7200  # time limit in seconds for making all games of a run
PROGRESS_S = 1.0  # seconds between two updates of the progress bar
MODULE = "agent_system.environments.env_package.textworld.generate"


class DamagedStore(ValueError):
    """The content of a stored game differs from its hash. The message names what to delete."""


class GameStore:
    """Store of the games for one combination of settings.

    ``spec`` has the keys ``game``, ``game_seed`` and ``settings``. ``counts`` is the number of
    games per split.
    """

    def __init__(self, data_dir: str, spec: dict[str, Any], counts: dict[str, int]) -> None:
        self.root = Path(data_dir).expanduser().absolute()
        self.games = self.root / "games"
        self.spec = spec
        self.counts = counts

    def game_hashes(self, split: str) -> list[str]:
        """Return the hashes of the games of ``split``. If they do not exist, make both splits.

        Safe for concurrent processes.
        """
        index = self.root / f"{self._settings_hash()}.json"
        if not index.exists():
            self.games.mkdir(parents=True, exist_ok=True)
            with _file_lock(index.with_suffix(".lock")):
                if not index.exists():
                    self._make_games(index)
        return json.loads(index.read_text())[split]

    def compiled_path(self, name: str) -> Path:
        """Return the compiled file of game ``name``. Compile it if it does not exist.

        Raises ``DamagedStore``.
        """
        path = self.games / f"{name}.z8"
        if not path.exists():
            with _file_lock(self.games / f".{name}.lock"):
                if not path.exists():
                    self._compile_game(name)
        return path

    def gold_path(self, name: str) -> list[str]:
        return json.loads((self.games / f"{name}.json").read_text())["metadata"]["walkthrough"]

    def _settings_hash(self) -> str:
        # The version of the library is included, because another version may give other games.
        shape = [STORE_VERSION, metadata.version("textworld"), self.spec, self.counts]
        text = json.dumps(shape, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _make_games(self, index: Path) -> None:
        """Make the games in a new process, whose progress is the number of new files. Write their
        hashes to ``index``.

        Raises ``TimeoutExpired`` after ``MAX_MAKE_S`` seconds.
        """
        logger.info("TextWorld: making %s games of kind %s.", self.counts, self.spec["game"])
        texts = [json.dumps(self.spec), json.dumps(self.counts), str(available_cpus())]
        command = [sys.executable, "-m", MODULE, str(self.games), *texts]
        # Use a new process, because the hash seed of a running interpreter cannot be changed.
        environ = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)
        with Progress("TextWorld", sum(self.counts.values()), "games") as progress, process:
            try:
                output, errors = self._wait_for_process(process, progress)
            finally:
                process.kill()  # without effect if the process has ended
        if process.returncode != 0:
            raise RuntimeError(f"TextWorld failed to make games for {self.spec}:\n{errors[-2000:]}")
        # The library also prints on standard output, before the last line.
        with atomic_write(index) as file:
            file.write(output.splitlines()[-1])

    def _wait_for_process(
        self, process: subprocess.Popen[str], progress: Progress
    ) -> tuple[str, str]:
        games_before = self._count_games()
        deadline = time.monotonic() + MAX_MAKE_S
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=PROGRESS_S)
            progress.set_done(self._count_games() - games_before)
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(process.args, MAX_MAKE_S)

    def _count_games(self) -> int:
        return sum(1 for _ in self.games.glob("*.json"))

    def _compile_game(self, name: str) -> None:
        import textworld
        from textworld.generator import compile_game
        from textworld.generator.game import Game

        from agent_system.environments.env_package.textworld.generate import content_hash

        source = self.games / f"{name}.json"
        try:
            game = Game.deserialize(json.loads(source.read_text()))
            game = game if content_hash(game) == name else None
        except (ValueError, KeyError, OSError):
            game = None
        if game is None:
            raise DamagedStore(
                f"{source} is damaged or missing: delete {self.root}, then the games are made again"
            )
        # The temporary folder is inside the store, so that the rename stays on one file system. It
        # also removes the other files of the compiler.
        with tempfile.TemporaryDirectory(dir=self.games) as folder:
            options = textworld.GameOptions()
            options.path = f"{folder}/{name}.z8"
            options.file_ext = ".z8"
            compile_game(game, options)
            os.replace(options.path, self.games / f"{name}.z8")


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold a lock on the file ``path``. The kernel releases it when the process ends."""
    # Never delete the lock file: two processes could then lock different files of one name.
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
