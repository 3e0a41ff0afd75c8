"""An endpoint that speaks as OpenAI's does: agents that know nothing of training play through it.

    agent ──POST /v1/chat/completions──▶ server ──messages──▶ dialogues ──tokens──▶ engine
          ◀──────────── text ──────────        ◀── sampled, with log-probs, in a ledger ──
          ──POST /v1/reward─────────────▶ the play is over, its key is void

The key of a client names a play. Who plays, and what becomes of it, is said in
``agent_system.multi_turn_rollout.agent_player``.
"""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "Dialogues": "dialogues",
        "EndpointServer": "server",
        "post_reward": "reward_call",
    },
)
