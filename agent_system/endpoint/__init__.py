"""OpenAI-compatible server, from which user-provided agents sample the turns of episodes.

    agent ──POST /v1/chat/completions──▶ server ──messages──▶ dialogues ──tokens──▶ engine
          ◀──────────── text ──────────        ◀── sampled, with log-probs, in a ledger ──
          ──POST /v1/reward─────────────▶ ends the episode and invalidates its key

The API key of a request identifies the episode (a session). Sessions are implemented in
``agent_system.multi_turn_rollout``, dialogues (requests that continue each other) in
``agent_system.tokens``.
"""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__,
    {
        "EndpointServer": "server",
        "post_reward": "reward_call",
    },
)
