"""A chat template as text, which ``verl.utils.chat_template`` renders: the names of both."""

from verl.utils.chat_template import (
    RENDER_ERRORS,
    ChatTemplate,
    Message,
    TemplateUnsupported,
    anchor,
)

__all__ = ["RENDER_ERRORS", "ChatTemplate", "Message", "TemplateUnsupported", "anchor"]
