"""The one call of the endpoint that OpenAI's API does not have: what a play has earned."""

import http.client
import json
from urllib.parse import urlsplit

from agent_system.reward_manager.scores import finite

TIMEOUT_S = 60.0


class RewardRefused(RuntimeError):
    """The endpoint did not take a reward; the message is its answer."""


def post_reward(base_url: str, api_key: str, reward: float, won: bool | None = None) -> None:
    """End the play of ``api_key`` with ``reward``, a number of any kind; ``won`` None: where the
    reward is above 0.

    Raises ``TypeError`` or ``ValueError`` for what is no finite number, ``RewardRefused``, and
    ``OSError`` where nobody listens.
    """
    reward = finite(reward, "reward")
    place = urlsplit(base_url)
    # Not through ``urllib``, which would ask a proxy for an address of this machine.
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
