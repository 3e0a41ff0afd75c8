"""Tokens of a conversation: the append-only ledger, the chat-template bridge, the conversation that
grows by both, and the template probe.

What is trained on is tokenised here, and chat templates of such conversations are rendered here.
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
