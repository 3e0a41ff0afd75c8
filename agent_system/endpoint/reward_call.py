"""Client call that posts the reward of an episode. OpenAI's API has no such call."""

import http.client
import json
from urllib.parse import urlsplit

from agent_system.reward_manager.scores import read_finite_number

TIMEOUT_S = 60.0  # seconds for each network operation of the call


class RewardRefusedError(RuntimeError):
    """The endpoint refused a reward. The message is the body of its response."""


def post_reward(base_url: str, api_key: str, reward: float, won: bool | None = None) -> None:
    """End the episode of ``api_key`` with ``reward``, a finite number of any numeric type.

    If ``won`` is None, the episode is a success if the reward is above 0. Raises ``TypeError`` or
    ``ValueError`` for an invalid reward, ``RewardRefusedError``, and ``OSError`` if no server
    listens.
    """
    reward = read_finite_number(reward, "reward")
    address = urlsplit(base_url)
    # ``urllib`` would send requests to a local address through a proxy, so do not use it.
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    body = {"reward": reward} if won is None else {"reward": reward, "won": won}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", f"{address.path}/reward", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise RewardRefusedError(text)
