"""Client call that posts the reward of an episode. OpenAI's API has no such call."""

import http.client
import json
from urllib.parse import urlsplit

from agent_system.reward_manager.scores import finite

TIMEOUT_S = 60.0


class RewardRefused(RuntimeError):
    """The endpoint refused a reward. The message is the body of its response."""


def post_reward(base_url: str, api_key: str, reward: float, won: bool | None = None) -> None:
    """End the episode of ``api_key`` with ``reward``, a finite number of any numeric type.

    If ``won`` is None, the episode is a success if the reward is above 0. Raises ``TypeError`` or
    ``ValueError`` for an invalid reward, ``RewardRefused``, and ``OSError`` if no server listens.
    """
    reward = finite(reward, "reward")
    place = urlsplit(base_url)
    # ``urllib`` would send requests to a local address through a proxy, so do not use it.
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    said = {"reward": reward} if won is None else {"reward": reward, "won": won}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", f"{place.path}/reward", json.dumps(said), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise RewardRefused(text)
