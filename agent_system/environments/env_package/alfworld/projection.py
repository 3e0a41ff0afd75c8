"""Projection of model text to an ALFWorld command."""

from agent_system.environments import chat_prompts

MAX_LENGTH = 120  # characters; the longest command the engine knows has about 60


def project_command(text: str) -> tuple[str, bool]:
    """Return the command inside ``<action>..</action>``, and True if the text is well formed.

    Like ``chat_prompts.project_action``, but in lower case and without a final full stop. Text that
    is not well formed still gives a command, which the engine may reject.

    >>> project_command("<action>Go to desk 1.</action>")
    ('go to desk 1', True)
    """
    action, well_formed = chat_prompts.project_action(text)
    command = action.lower().rstrip(".")
    return command[:MAX_LENGTH], well_formed and 0 < len(
        command
    ) <= MAX_LENGTH and "<" not in command
