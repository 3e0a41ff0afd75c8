"""TextWorld games on disk: made once per settings, kept by content hash, compiled when first
played.

``data_dir/<settings hash>.json`` holds the hashes of the games of each split,
``data_dir/games/<hash>.json`` a game, ``data_dir/games/<hash>.z8`` its compiled form, once somebody
has played it.
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

from verl.utils.progress import Progress
from verl.utils.threads import available_cpus

logger = logging.getLogger(__name__)
VERSION = 1  # raise it when the same settings would give other games
# At about half a second a game that is some 14,000 of them on one core.
MAKE_S = 7200  # seconds that making all games of a run may take
LOOK_S = 1.0  # between two looks at how many there are
MODULE = "agent_system.environments.env_package.textworld.generate"


class DamagedStore(ValueError):
    """A stored game is not what its name says; the message tells which file to delete."""


class GameStore:
    """The games of one group of settings.

    ``spec`` says how they are drawn, ``counts`` how many each split has.
    """

    def __init__(self, data_dir: str, spec: dict[str, Any], counts: dict[str, int]) -> None:
        self.root = Path(data_dir).expanduser().absolute()
        self.games = self.root / "games"
        self.spec = spec
        self.counts = counts

    def hashes(self, split: str) -> list[str]:
        """The games of ``split``; both splits are made first where they are not there.

        Safe for several processes.
        """
        index = self.root / f"{self._key()}.json"
        if not index.exists():
            self.games.mkdir(parents=True, exist_ok=True)
            with _locked(index.with_suffix(".lock")):
                if not index.exists():
                    _write(index, json.dumps(self._make()))
        return json.loads(index.read_text())[split]

    def compiled(self, name: str) -> Path:
        """The playable file of game ``name``, compiled where it is not there.

        Raises ``DamagedStore``.
        """
        path = self.games / f"{name}.z8"
        if not path.exists():
            with _locked(self.games / f".{name}.lock"):
                if not path.exists():
                    self._compile(name)
        return path

    def gold_path(self, name: str) -> list[str]:
        """Commands that win the game."""
        return json.loads((self.games / f"{name}.json").read_text())["metadata"]["walkthrough"]

    def _key(self) -> str:
        # The library's version is part of the name: another one may make other games of the same
        # seeds.
        shape = [VERSION, metadata.version("textworld"), self.spec, self.counts]
        return hashlib.blake2b(
            json.dumps(shape, sort_keys=True).encode(), digest_size=8
        ).hexdigest()

    def _make(self) -> dict[str, list[str]]:
        logger.info("textworld: making %s games of %s", self.counts, self.spec["game"])
        processes = available_cpus()
        words = [str(self.games), json.dumps(self.spec), json.dumps(self.counts), str(processes)]
        command = [sys.executable, "-m", MODULE, *words]
        # A process of its own, for the hash seed of a running interpreter cannot be changed.
        environ = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = self._run(command, environ)
        if done.returncode != 0:
            raise RuntimeError(
                f"textworld could not make games of {self.spec}:\n{done.stderr[-2000:]}"
            )
        # What the library prints while it makes games stands before the last line.
        return json.loads(done.stdout.splitlines()[-1])

    def _run(self, command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """``command`` once it has ended; how far it is, the files that it leaves tell.

        Raises ``TimeoutExpired`` after ``MAKE_S``.
        """
        before = self._made()
        deadline = time.monotonic() + MAKE_S
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)
        with Progress("TextWorld", sum(self.counts.values()), "games") as progress, process:
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        said, wrong = process.communicate(timeout=LOOK_S)
                        return subprocess.CompletedProcess(command, process.returncode, said, wrong)
                    progress.to(self._made() - before)
                    if time.monotonic() > deadline:
                        raise subprocess.TimeoutExpired(command, MAKE_S)
            finally:
                process.kill()  # after a good end nothing is left to kill

    def _made(self) -> int:
        return sum(1 for _ in self.games.glob("*.json"))

    def _compile(self, name: str) -> None:
        import textworld
        from textworld.generator import compile_game
        from textworld.generator.game import Game

        from agent_system.environments.env_package.textworld.generate import content_hash

        source = self.games / f"{name}.json"
        try:
            game = Game.deserialize(json.loads(source.read_text()))
            intact = content_hash(game) == name
        except (ValueError, KeyError, OSError):
            game = None
            intact = False
        if game is None or not intact:
            raise DamagedStore(
                f"{source} is damaged or missing: delete {self.root} and the games are made again"
            )
        # Inside the store, so that the rename stays on one file system; the compiler leaves other
        # files beside its result, which go with the folder.
        with tempfile.TemporaryDirectory(dir=self.games) as folder:
            options = textworld.GameOptions()
            options.path = f"{folder}/{name}.z8"
            options.file_ext = ".z8"
            compile_game(game, options)
            os.replace(options.path, self.games / f"{name}.z8")


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; the kernel gives it back when its holder dies."""
    # The lock file stays: whoever deletes it lets two processes hold different files of one name.
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
