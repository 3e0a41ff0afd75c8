"""Environment with OpenEnv's interface, and a server that speaks its protocol."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Guess(BaseModel):
    """Action of the environment."""

    model_config = ConfigDict(extra="forbid")
    message: str


class Hint(BaseModel):
    """Observation of the environment."""

    text: str
    tries: int = 0
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


class GuessWorld:
    """Guess a number from 1 to 8."""

    def __init__(self, highest: int = 8) -> None:
        self.highest = highest
        self.hidden = self.tries = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.hidden = random.Random(seed).randint(1, self.highest)
        self.tries = 0
        return Hint(text=f"1 to {self.highest}")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.tries += 1
        if action.message == "crash":
            raise RuntimeError("crashed")
        right = action.message == str(self.hidden)
        text = "right" if right else "no"
        return Hint(text=text, tries=self.tries, done=right, reward=float(right))


def _answer(world: GuessWorld, message: dict[str, Any]) -> dict[str, Any]:
    try:
        if message["type"] == "reset":
            observation = world.reset(**message["data"])
        else:
            observation = world.step(Guess.model_validate(message["data"]))
    except ValidationError as error:
        return {"type": "error", "data": {"message": str(error), "code": "VALIDATION_ERROR"}}
    except RuntimeError as error:
        return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
    fields = observation.model_dump(exclude={"done", "reward", "metadata"})
    data = {"observation": fields, "reward": observation.reward, "done": observation.done}
    return {"type": "observation", "data": data}


@contextmanager
def served() -> Iterator[str]:
    """Start a server and yield its address."""
    from websockets.sync.server import ServerConnection, serve

    def talk(connection: ServerConnection) -> None:
        world = GuessWorld()
        for line in connection:
            connection.send(json.dumps(_answer(world, json.loads(line))))

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(timeout=10)
