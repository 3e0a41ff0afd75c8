"""Tokens of a conversation: append-only ledger, chat-template bridge, conversation and probe.

This package tokenises everything that is trained on and renders the chat templates of it.
"""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__,
    {
        "ChatBridge": "bridge",
        "TokenLimits": "conversation",
        "SegmentKind": "ledger",
        "TokenConversation": "conversation",
        "TemplateProbe": "probe",
        "TokenLedger": "ledger",
        "probe_template": "probe",
    },
)
