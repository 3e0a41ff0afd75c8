"""Games on disk and their task lists.

``data_dir/generated/<split>-<hash of the settings>/games.jsonl`` holds one game per line.
``index.json`` in the same folder holds the byte offset and the content hash of each line, and is
written last. Later runs with the same settings reuse both files. A task contains the index of its
game, so a worker reads only one line of the file.
"""

import contextlib
import functools
import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_package.alfworld import games
from agent_system.environments.env_package.alfworld.settings import (
    OFFICIAL_FOLDER,
    SHORT_TASK_TYPES,
    AlfworldSettings,
    find_official_folder,
)
from agent_system.environments.tasks import hash_json
from verl.utils.files import atomic_write
from verl.utils.progress import Progress


class DamagedGameError(ValueError):
    """Error: the content of a stored game does not match the hash that was stored with it."""


def list_tasks(settings: AlfworldSettings, split: str) -> list[Task]:
    """Return the tasks of ``split`` (``train`` or ``val``) in a stable order.

    The ``data_source`` of generated games is ``alfworld_generated/<task type>``, because they are
    not the official splits. Raises ``FileNotFoundError`` if official games are required and
    missing.
    """
    if settings.uses_generated_games:
        return list_generated_tasks(settings, split)
    return list_official_tasks(settings, split)


# Generated games


def list_generated_tasks(
    settings: AlfworldSettings, split: str, count: int | None = None
) -> list[Task]:
    """Return the tasks of generated games. Generate the games of the split if they do not exist.

    ``count`` replaces the number of games in the settings. All splits except ``val`` use the
    training floor plans.
    """
    index_entries = GeneratedGames(settings, split, count).read_index()
    return [
        {
            "task_id": f"alfworld_generated/{split}/{entry['kind']}/{entry['hash']}",
            "data_source": f"alfworld_generated/{entry['kind']}",
            "kind": entry["kind"],
            "source": "generated",
            "split": split,
            "count": len(index_entries),
            "index": game_index,
            "hash": entry["hash"],
        }
        for game_index, entry in enumerate(index_entries)
    ]


@dataclass(frozen=True)
class GeneratedGames:
    """Generated games of one split. ``count`` replaces the number of games in ``settings``."""

    settings: AlfworldSettings
    split: str
    count: int | None = None

    @property
    def game_count(self) -> int:
        if self.count is not None:
            return self.count
        return self.settings.val_games if self.split == "val" else self.settings.train_games

    @functools.cached_property
    def split_folder(self) -> Path:
        """Folder of the split. Its name has a hash of all settings that affect the games."""
        hashed_values = {
            "generator": games.GENERATOR_VERSION,
            "alfworld": metadata.version("alfworld"),
            "task_types": self.settings.task_types,
            "receptacles": self.settings.receptacles,
            "objects": self.settings.objects,
            "seed": self.settings.seed,
            "split": self.split,
            # Each number of games has its own folder.
            "size": self.game_count,
        }
        settings_hash = hash_json(hashed_values)
        return _get_data_dir(self.settings) / "generated" / f"{self.split}-{settings_hash}"

    def read_index(self) -> list[dict[str, Any]]:
        """Return ``{hash, kind, scene, start, length}`` for each game.

        ``kind`` is the task type, ``scene`` the number of the floor plan. ``start`` and ``length``
        give the game's line in ``games.jsonl``, in bytes. The split is generated if it does not
        exist, possibly by several processes, which write the same content.
        """
        folder = self.split_folder
        if not (folder / "index.json").exists():
            self._write_split(folder)
        return _read_index(folder)

    def _write_split(self, folder: Path) -> None:
        game_lines = []
        index_entries = []
        byte_offset = 0
        with Progress(f"ALFWorld, {self.split}", self.game_count, "games") as progress:
            for game_index in range(self.game_count):
                game = games.generate_game(self.settings, self.split, game_index)
                line = json.dumps(game) + "\n"  # ASCII only, so a character is a byte
                entry = {key: game[key] for key in ("hash", "kind", "scene")}
                index_entries.append({**entry, "start": byte_offset, "length": len(line)})
                game_lines.append(line)
                byte_offset += len(line)
                progress.add_done()
        with atomic_write(folder / "games.jsonl") as file:
            file.writelines(game_lines)
        with atomic_write(folder / "index.json") as file:
            json.dump({"games": index_entries}, file)

    def read_game(self, game_index: int) -> dict[str, Any]:
        """Return game ``game_index``. Raises ``DamagedGameError`` if it does not match its hash."""
        entry = self.read_index()[game_index]
        with open(self.split_folder / "games.jsonl", "rb") as file:
            file.seek(entry["start"])
            line = file.read(entry["length"])
        with contextlib.suppress(ValueError, KeyError):
            game = json.loads(line)
            if games.compute_content_hash(game) == entry["hash"]:
                return game
        raise DamagedGameError(
            f"game {game_index} of {self.split_folder} does not match its hash; fix: delete the "
            "folder, and the next run generates it again"
        )


# Cached, because a worker reads many games of the same split.
@functools.lru_cache(maxsize=8)
def _read_index(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "index.json").read_text())["games"]


def load_game(settings: AlfworldSettings, task: Task) -> dict[str, Any]:
    """Return the content of ``game.tw-pddl`` for a task.

    Raises ``DamagedGameError`` if the stored game has another hash than the task, and
    ``FileNotFoundError`` if official games are missing.
    """
    if task["source"] == "official":
        return json.loads((_require_official_folder() / task["path"]).read_text())
    generated_games = GeneratedGames(settings, task["split"], task["count"])
    game = generated_games.read_game(task["index"])
    if game["hash"] != task["hash"]:
        raise DamagedGameError(
            f"{task['task_id']}: the settings of env.alfworld give another game, {game['hash']}; "
            "fix: restore the settings that the task was made with"
        )
    return games.build_game_file_content(game)


def get_translations_folder(settings: AlfworldSettings) -> Path:
    """Return the folder in which translated PDDL problems are cached."""
    return _get_data_dir(settings) / "translations"


def _get_data_dir(settings: AlfworldSettings) -> Path:
    return Path(settings.data_dir).expanduser().absolute()


# Official games


def _require_official_folder() -> Path:
    folder = find_official_folder()
    if folder is None:
        raise FileNotFoundError(
            "env.alfworld.source=official needs the folder "
            f"$ALFWORLD_DATA/{OFFICIAL_FOLDER}/train, which does not exist; fix: run "
            "alfworld-download, or set env.alfworld.source=generated"
        )
    return folder


def list_official_tasks(settings: AlfworldSettings, split: str) -> list[Task]:
    """Return the tasks of the official games of the chosen task types.

    Validation uses the games of ``settings.official_split``. As in the official loader, games with
    movable receptacles, slicing or no known solution are excluded. Raises ``FileNotFoundError`` if
    the games are missing.
    """
    games_folder = _require_official_folder()
    folder_name = "train" if split == "train" else settings.official_split
    tasks = []
    for path in sorted((games_folder / folder_name).rglob("game.tw-pddl")):
        task_type = SHORT_TASK_TYPES.get(_read_official_task_type(path))
        # Also exclude games without the key ``solvable``: their solvability is unknown.
        if task_type in settings.task_types and json.loads(path.read_text()).get("solvable"):
            relative_path = path.relative_to(games_folder)
            tasks.append(
                {
                    "task_id": f"alfworld/{relative_path.parent.as_posix()}",
                    "data_source": f"alfworld/{task_type}",
                    "kind": task_type,
                    "source": "official",
                    "path": relative_path.as_posix(),
                }
            )
    return tasks


def _read_official_task_type(path: Path) -> str:
    record_path = path.parent / "traj_data.json"
    if "movable" in str(path) or "Sliced" in str(path) or not record_path.exists():
        return ""
    return json.loads(record_path.read_text()).get("task_type", "")
