"""Tokens of a conversation: the append-only ledger, the chat-template bridge and the template probe.

What is trained on is tokenised here, and chat templates of such conversations are rendered here.
"""

__all__ = ["ChatBridge", "SegmentKind", "TemplateProbe", "TokenLedger", "probe_template"]


def __getattr__(name: str):
    if name in ("TokenLedger", "SegmentKind"):
        from agent_system.tokens import ledger

        return getattr(ledger, name)
    if name == "ChatBridge":
        from agent_system.tokens.bridge import ChatBridge

        return ChatBridge
    if name in ("TemplateProbe", "probe_template"):
        from agent_system.tokens import probe

        return getattr(probe, name)
    raise AttributeError(f"module 'agent_system.tokens' has no attribute {name!r}")
