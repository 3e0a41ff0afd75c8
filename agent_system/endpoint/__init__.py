"""OpenAI-compatible endpoint, through which agents without training code generate episodes.

    agent ──POST /v1/chat/completions──▶ server ──messages──▶ dialogues ──tokens──▶ engine
          ◀──────────── text ──────────        ◀── sampled, with log-probs, in a ledger ──
          ──POST /v1/reward─────────────▶ ends the episode and invalidates its key

The API key of a client identifies an episode (a session). The implementation of sessions is in
``agent_system.multi_turn_rollout``, and that of dialogues in ``agent_system.tokens``.
"""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__,
    {
        "EndpointServer": "server",
        "post_reward": "reward_call",
    },
)
