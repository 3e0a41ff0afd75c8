"""Games on disk and their task lists.

``data_dir/generated/<split>-<hash of the settings>/games.jsonl`` holds one game per line.
``index.json`` in the same folder holds the byte offset and the content hash of each line. A split
is written once, into a temporary folder that is then renamed. Later runs with the same settings
reuse it. A task contains the number of its game, so a worker reads one game and not the whole file.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_package.alfworld import games
from agent_system.environments.env_package.alfworld.settings import SHORT_NAMES, AlfworldSettings
from verl.utils.progress import Progress

OFFICIAL_FOLDER = "json_2.1.1"


class DamagedAlfworldGame(ValueError):
    """Error: the content of a stored game does not match the hash that was stored with it."""


def list_tasks(settings: AlfworldSettings, split: str) -> list[Task]:
    """Return the tasks of ``split`` (``train`` or ``val``) in a stable order.

    A task is ``{task_id, data_source, kind, source, ...}``. A generated task also has ``split``,
    ``count``, ``index`` and ``hash``. An official task has the ``path`` of its game. The
    ``data_source`` of generated games is ``alfworld_generated/<kind>``, because they are not the
    official splits. Raises ``ValueError`` for another split, and ``FileNotFoundError`` if official
    games are required and missing.
    """
    if split not in ("train", "val"):
        raise ValueError(f"alfworld has no split {split!r}; allowed: train, val")
    folder = official_folder()
    if settings.source == "official" or (settings.source == "auto" and folder is not None):
        return list_official_tasks(settings, split)
    return list_generated_tasks(settings, split)


# Generated games


def list_generated_tasks(
    settings: AlfworldSettings, split: str, count: int | None = None
) -> list[Task]:
    """Return the tasks of generated games, after writing the split if it does not exist.

    ``count`` overrides the number of games in the settings. All splits except ``val`` use the
    training floor plans.
    """
    index = GeneratedGames(settings, split, count).read_index()
    return [
        {
            "task_id": f"alfworld_generated/{split}/{entry['kind']}/{entry['hash']}",
            "data_source": f"alfworld_generated/{entry['kind']}",
            "kind": entry["kind"],
            "source": "generated",
            "split": split,
            "count": len(index["games"]),
            "index": game_index,
            "hash": entry["hash"],
        }
        for game_index, entry in enumerate(index["games"])
    ]


@dataclass(frozen=True)
class GeneratedGames:
    """Generated games of one split for given settings. ``count`` overrides their number."""

    settings: AlfworldSettings
    split: str
    count: int | None = None

    @property
    def game_count(self) -> int:
        """Number of games in the split."""
        if self.count is not None:
            return self.count
        return self.settings.val_games if self.split == "val" else self.settings.train_games

    @property
    def split_folder(self) -> Path:
        """Folder of the split. Its name has a hash of all settings that affect the games."""
        key = {
            "generator": games.GENERATOR_VERSION,
            "alfworld": metadata.version("alfworld"),
            "task_types": self.settings.task_types,
            "receptacles": self.settings.receptacles,
            "objects": self.settings.objects,
            "seed": self.settings.seed,
            "split": self.split,
            # Tasks contain the size of the split, so each size has its own folder.
            "size": self.game_count,
        }
        name = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
        return _data_dir(self.settings) / "generated" / f"{self.split}-{name}"

    def read_index(self) -> dict[str, Any]:
        """Return ``{"hash", "games": [{hash, kind, scene, start, length}]}`` of the split, after
        writing it if it does not exist.
        """
        return _read_index(self.ensure_written())

    def ensure_written(self) -> Path:
        """Write the split if it does not exist, and return its folder.

        Several processes may do this at once.
        """
        folder = self.split_folder
        if (folder / "index.json").exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            self._write_split(temporary)
            os.rename(temporary, folder)
        except OSError:
            # Another process may have written the same games first.
            if not (folder / "index.json").exists():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def _write_split(self, folder: Path) -> None:
        lines = []
        entries = []
        byte_offset = 0
        with Progress(f"ALFWorld, {self.split}", self.game_count, "games") as progress:
            for game_index in range(self.game_count):
                game = games.generate(self.settings, self.split, game_index)
                line = json.dumps(game).encode() + b"\n"
                entry = {key: game[key] for key in ("hash", "kind", "scene")}
                entries.append({**entry, "start": byte_offset, "length": len(line)})
                lines.append(line)
                byte_offset += len(line)
                progress.add_done()
        digest = hashlib.blake2b(
            "".join(entry["hash"] for entry in entries).encode(), digest_size=16
        ).hexdigest()
        # Write both files to the disk before the rename makes them visible.
        _write_synced(folder / "games.jsonl", b"".join(lines))
        _write_synced(
            folder / "index.json", json.dumps({"hash": digest, "games": entries}).encode()
        )

    def read_game(self, number: int) -> dict[str, Any]:
        """Return game ``number``. Raises ``DamagedAlfworldGame`` if its content does not match its
        hash.
        """
        folder = self.ensure_written()
        entry = _read_index(folder)["games"][number]
        with open(folder / "games.jsonl", "rb") as file:
            file.seek(entry["start"])
            line = file.read(entry["length"])
        try:
            game = json.loads(line)
            is_intact = games.content_hash(game) == entry["hash"]
        except (ValueError, KeyError):
            game = None
            is_intact = False
        if game is None or not is_intact:
            raise DamagedAlfworldGame(
                f"game {number} of {folder} does not match its hash; fix: delete the folder, and "
                "the next run generates it again"
            )
        return game


# Cached: a worker reads many games of few splits.
@functools.lru_cache(maxsize=8)
def _read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def load_game(settings: AlfworldSettings, task: Task) -> dict[str, Any]:
    """Return the content of ``game.tw-pddl`` for a task.

    Raises ``DamagedAlfworldGame`` if the stored game has another hash than the task, and
    ``FileNotFoundError`` if official games are missing.
    """
    if task["source"] == "official":
        root = official_folder()
        if root is None:
            raise FileNotFoundError(
                f"official ALFWorld games: $ALFWORLD_DATA contains no folder {OFFICIAL_FOLDER} "
                "with games; fix: run alfworld-download"
            )
        return json.loads((root / task["path"]).read_text())
    store = GeneratedGames(settings, task["split"], task["count"])
    game = store.read_game(task["index"])
    if game["hash"] != task["hash"]:
        raise DamagedAlfworldGame(
            f"{task['task_id']}: the settings of env.alfworld give another game, {game['hash']}; "
            "fix: restore the settings that the task was made with"
        )
    return games.game_file(game)


def translations_folder(settings: AlfworldSettings) -> Path:
    """Return the folder of the planner's translations of all games."""
    return _data_dir(settings) / "translations"


def _data_dir(settings: AlfworldSettings) -> Path:
    return Path(settings.data_dir).expanduser().absolute()


def export_game(game: dict[str, Any], root: Path) -> Path:
    """Write a generated game in the official folder layout, for other ALFWorld tools.

    Return the path of its ``game.tw-pddl``.
    """
    goal_params = game["traj"]["pddl_params"]
    names = [
        goal_params["object_target"],
        goal_params["toggle_target"] or "None",
        goal_params["parent_target"] or "None",
    ]
    folder = (
        root
        / f"{game['traj']['task_type']}-{'-'.join(names)}-{game['scene']}"
        / f"trial_{game['hash']}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "traj_data.json").write_text(json.dumps(game["traj"]))
    (folder / "game.tw-pddl").write_text(json.dumps(games.game_file(game)))
    return folder / "game.tw-pddl"


# Official games


def official_folder() -> Path | None:
    """Return ``$ALFWORLD_DATA/json_2.1.1`` if it has the folder ``train``, else None.

    ``alfworld-download`` creates it.
    """
    root = os.environ.get("ALFWORLD_DATA")
    folder = Path(root).expanduser() / OFFICIAL_FOLDER if root else None
    return folder if folder is not None and (folder / "train").is_dir() else None


def list_official_tasks(settings: AlfworldSettings, split: str) -> list[Task]:
    """Return the tasks of the official games of the chosen task types.

    The games are those of ``train``, or of ``settings.official_split`` for validation. As in the
    official loader, games with movable receptacles, slicing or no known solution are excluded.
    Raises ``FileNotFoundError`` if the games are missing.
    """
    root = official_folder()
    if root is None:
        raise FileNotFoundError(
            "env.alfworld.source=official needs the folder "
            f"$ALFWORLD_DATA/{OFFICIAL_FOLDER}/train, which does not exist; fix: run "
            "alfworld-download, or set env.alfworld.source=generated"
        )
    name = "train" if split == "train" else settings.official_split
    official = []
    for path in sorted((root / name).rglob("game.tw-pddl")):
        task_type = SHORT_NAMES.get(_official_type(path))
        # Games without the key ``solvable`` were never solved. They are excluded too.
        if task_type in settings.task_types and json.loads(path.read_text()).get("solvable"):
            relative_path = path.relative_to(root).as_posix()
            official.append(
                {
                    "task_id": f"alfworld/{relative_path.removesuffix('/game.tw-pddl')}",
                    "data_source": f"alfworld/{task_type}",
                    "kind": task_type,
                    "source": "official",
                    "path": relative_path,
                }
            )
    return official


def _official_type(path: Path) -> str:
    record = path.parent / "traj_data.json"
    if "movable" in str(path) or "Sliced" in str(path) or not record.exists():
        return ""
    return json.loads(record.read_text()).get("task_type", "")
