"""Tokens of conversations: append-only token list (ledger) and tokens between turns (bridge).

All texts that are trained on are rendered by a chat template and tokenized here.
``check_template_support`` tests if a chat template keeps earlier turns unchanged.
"""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__, {"SegmentKind": "ledger", "TokenLedger": "ledger"}
)
