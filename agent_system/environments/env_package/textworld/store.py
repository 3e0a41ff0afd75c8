"""Storage of TextWorld games: made once per settings, named by content hash, compiled when used.

- ``data_dir/<settings hash>.json``: hashes of the games of each split
- ``data_dir/games/<hash>.json``: a game
- ``data_dir/games/<hash>.z8``: the compiled game, made at its first use
"""

import contextlib
import fcntl
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

from agent_system.environments.tasks import hash_json
from verl.utils.files import atomic_write
from verl.utils.processes import available_cpus
from verl.utils.progress import Progress

logger = logging.getLogger(__name__)
STORE_VERSION = 1  # increase it when the code makes other games from the same settings
# Enough for 14,000 games on one core, at half a second per game.
MAX_GENERATION_S = 7200  # time limit in seconds for making all games of a run
PROGRESS_INTERVAL_S = 1.0  # seconds between two updates of the progress bar
GENERATOR_MODULE = "agent_system.environments.env_package.textworld.generate"


class DamagedStoreError(ValueError):
    """Error: the content of a stored game differs from its hash. The message states the fix."""


class GameStore:
    """Store of the games for one combination of settings.

    ``spec`` has the keys ``game`` (kind of game), ``game_seed`` and ``settings`` (of this kind).
    ``counts`` maps each split to its number of games.
    """

    def __init__(self, data_dir: str, spec: dict[str, Any], counts: dict[str, int]) -> None:
        self.data_folder = Path(data_dir).expanduser().absolute()
        self.games_folder = self.data_folder / "games"
        self.spec = spec
        self.game_counts = counts

    def list_game_hashes(self, split: str) -> list[str]:
        """Return the hashes of the games of ``split``. Make the games if they do not exist.

        Several processes may call this method at once.
        """
        index_file = self.data_folder / f"{self._compute_settings_hash()}.json"
        if not index_file.exists():
            self.games_folder.mkdir(parents=True, exist_ok=True)
            with _hold_file_lock(index_file.with_suffix(".lock")):
                if not index_file.exists():
                    self._make_games(index_file)
        return json.loads(index_file.read_text())[split]

    def get_compiled_path(self, game_hash: str) -> Path:
        """Return the compiled file of a game. Compile the game if the file does not exist.

        Raises ``DamagedStoreError`` if the game does not match its hash.
        """
        path = self.games_folder / f"{game_hash}.z8"
        if not path.exists():
            with _hold_file_lock(self.games_folder / f".{game_hash}.lock"):
                if not path.exists():
                    self._compile_game(game_hash)
        return path

    def gold_path(self, game_hash: str) -> list[str]:
        return json.loads((self.games_folder / f"{game_hash}.json").read_text())["metadata"][
            "walkthrough"
        ]

    def _compute_settings_hash(self) -> str:
        # Include the version of the library, because other versions may make other games.
        return hash_json(
            [STORE_VERSION, metadata.version("textworld"), self.spec, self.game_counts]
        )

    def _make_games(self, index_file: Path) -> None:
        """Make the games in a new process and write their hashes to ``index_file``.

        Raises ``TimeoutExpired`` after ``MAX_GENERATION_S`` seconds.
        """
        logger.info("TextWorld: making %s games of kind %s.", self.game_counts, self.spec["game"])
        arguments = [json.dumps(self.spec), json.dumps(self.game_counts), str(available_cpus())]
        command = [sys.executable, "-m", GENERATOR_MODULE, str(self.games_folder), *arguments]
        # The games depend on the hash seed, which only a new process can set.
        environment_variables = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment_variables, stdout=pipe, stderr=pipe, text=True
        )
        with Progress("TextWorld", sum(self.game_counts.values()), "games") as progress, process:
            try:
                output, errors = self._wait_for_process(process, progress)
            finally:
                process.kill()  # has no effect if the process has ended
        if process.returncode != 0:
            raise RuntimeError(f"TextWorld failed to make games for {self.spec}:\n{errors[-2000:]}")
        # Read only the last line of the output: the library prints other lines before it.
        with atomic_write(index_file) as file:
            file.write(output.splitlines()[-1])

    def _wait_for_process(
        self, process: subprocess.Popen[str], progress: Progress
    ) -> tuple[str, str]:
        initial_game_count = self._count_games()
        deadline = time.monotonic() + MAX_GENERATION_S
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=PROGRESS_INTERVAL_S)
            progress.set_done(self._count_games() - initial_game_count)
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(process.args, MAX_GENERATION_S)

    def _count_games(self) -> int:
        return sum(1 for _ in self.games_folder.glob("*.json"))

    def _compile_game(self, game_hash: str) -> None:
        import textworld
        from textworld.generator import compile_game
        from textworld.generator.game import Game

        from agent_system.environments.env_package.textworld.generate import compute_content_hash

        game_file = self.games_folder / f"{game_hash}.json"
        try:
            game = Game.deserialize(json.loads(game_file.read_text()))
            game = game if compute_content_hash(game) == game_hash else None
        except (ValueError, KeyError, OSError):
            game = None
        if game is None:
            raise DamagedStoreError(
                f"{game_file} is damaged or missing: delete {self.data_folder}, "
                "then the games are made again"
            )
        # Use a temporary folder in the same file system, so that the result can be renamed. Other
        # files of the compiler are deleted with it.
        with tempfile.TemporaryDirectory(dir=self.games_folder) as temporary_folder:
            options = textworld.GameOptions()
            options.path = f"{temporary_folder}/{game_hash}.z8"
            options.file_ext = ".z8"
            compile_game(game, options)
            os.replace(options.path, self.games_folder / f"{game_hash}.z8")


@contextlib.contextmanager
def _hold_file_lock(path: Path) -> Iterator[None]:
    """Hold a lock on the file ``path``. The kernel releases it when the process ends."""
    # Never delete the lock file. Otherwise two processes could lock different files of that name.
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
