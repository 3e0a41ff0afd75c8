"""Tokens of a conversation: append-only ledger, chat-template bridge, conversation and probe.

This package tokenises everything that is trained on and renders the chat templates of it.
"""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "ChatBridge": "bridge",
        "Limits": "conversation",
        "SegmentKind": "ledger",
        "TokenConversation": "conversation",
        "TemplateProbe": "probe",
        "TokenLedger": "ledger",
        "probe_template": "probe",
    },
)
