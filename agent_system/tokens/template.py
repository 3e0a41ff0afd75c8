"""Re-exports of ``verl.utils.chat_template`` for this package."""

from verl.utils.chat_template import (
    RENDER_ERRORS,
    ChatTemplate,
    Message,
    TemplateUnsupported,
    make_anchor,
)

__all__ = ["RENDER_ERRORS", "ChatTemplate", "Message", "TemplateUnsupported", "make_anchor"]
