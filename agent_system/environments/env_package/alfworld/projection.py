"""From model text to an ALFWorld command."""

from agent_system.environments import chat_prompts

MAX_LENGTH = 120  # characters; the longest command the engine knows has about 60


def project(text: str) -> tuple[str, bool]:
    """The command inside ``<action>..</action>``, and whether the text was well formed.

    As ``chat_prompts.project``, in lower case and without a full stop at the end. Where the text is
    not well formed the command is the best guess, which the engine answers on its own terms.
    """
    action, well_formed = chat_prompts.project(text)
    command = action.lower().rstrip(".")
    return command[:MAX_LENGTH], well_formed and 0 < len(
        command
    ) <= MAX_LENGTH and "<" not in command
