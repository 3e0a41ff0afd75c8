"""Conversations of one episode, and the assignment of requests to them.

Each conversation becomes one row of the batch. A request contains all messages so far::

    [system user]               a new row
    [system user REPLY user]    the same row: sampled reply, template tokens (bridge), new message
    [system user OTHER user]    a fork: a new row, because OTHER is no reply of the policy

The endpoint recognises an earlier reply by its text. The row contains the tokens that were sampled
for that reply: the text is not encoded again.
"""

from collections.abc import Sequence

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import SampledReply, TokenConversation, TokenLimits
from agent_system.tokens.ledger import Segment, TokenLedger
from verl.utils.chat_template import Message

# A request with more than this many characters per allowed token is refused before tokenisation. It
# cannot fit, and encoding it would block all other trajectories of the collector.
MAX_CHARACTERS_PER_TOKEN = 64


class Dialogue:
    """One conversation of the agent, which becomes one row of the batch.

    ``ledger_index`` is the index of its token list in ``EpisodeDialogues.ledgers``.
    ``shown_messages`` contains the messages before the first turn, then one message before each
    later turn that was sampled.
    """

    def __init__(
        self, conversation: TokenConversation, ledger_index: int, messages: list[Message]
    ) -> None:
        self.conversation = conversation
        self.ledger_index = ledger_index
        self.shown_messages: list[Message] = []
        self._answered_messages = messages
        self._pending_messages: list[Message] = []  # shown to the policy and not answered yet
        # Texts with which a client may send the last turn back. Empty until it is sampled.
        self._accepted_replies: tuple[str, ...] = ()

    def is_continued_by(self, messages: Sequence[Message]) -> bool:
        """Return True if ``messages`` are this dialogue, its last reply and one new message."""
        if list(messages[:-2]) != self._answered_messages:
            return False
        reply = messages[-2]
        return reply["role"] == "assistant" and reply["content"] in self._accepted_replies

    def set_pending_messages(self, messages: list[Message], new_messages: list[Message]) -> None:
        """Store ``messages``: the whole conversation that the next turn answers.

        ``new_messages`` are those that the policy has not seen yet. Special tokens in user texts
        are already escaped.
        """
        self._answered_messages = messages
        self._pending_messages = new_messages
        self._accepted_replies = ()

    def add_reply(
        self, sampled_reply: SampledReply, step: int, accepted_replies: Sequence[str]
    ) -> Segment:
        """Add the sampled reply of turn ``step`` and return the added tokens as a segment.

        A client repeats earlier replies in its requests. The text of this reply may be any of
        ``accepted_replies``.
        """
        self._accepted_replies = tuple(accepted_replies)
        self.shown_messages += self._pending_messages
        self._pending_messages = []
        return self.conversation.add_turn(sampled_reply, step)


class EpisodeDialogues:
    """All dialogues of one episode.

    If ``continues_dialogues`` is false, each request begins a new row. Special tokens in user
    messages are escaped, so that they are encoded as plain text: user messages may contain text of
    an environment. System messages and replies are not escaped: they come from the author of the
    agent and from the policy.
    """

    def __init__(self, bridge: ChatBridge, limits: TokenLimits, continues_dialogues: bool) -> None:
        self.ledgers: list[TokenLedger] = []
        self._bridge = bridge
        self._limits = limits
        self._continues_dialogues = continues_dialogues
        self._dialogues: list[Dialogue] = []

    def __getitem__(self, number: int) -> Dialogue:
        return self._dialogues[number]

    def open_dialogue(self, messages: list[Message], step: int) -> Dialogue | None:
        """Return the conversation in which turn ``step`` answers ``messages``.

        Continue an earlier conversation if ``messages`` extend it, otherwise begin a new one.
        Return None if a turn after ``messages`` would exceed the token limits. Raises
        ``TemplateUnsupported`` if the chat template refuses the order of roles.
        """
        max_conversation_tokens = min(
            self._limits.max_total, self._limits.max_prompt + self._limits.max_response
        )
        num_characters = sum(len(message["content"]) for message in messages)
        if num_characters > MAX_CHARACTERS_PER_TOKEN * max_conversation_tokens:
            return None
        candidates = self._dialogues if self._continues_dialogues else []
        dialogue = next(
            (candidate for candidate in candidates if candidate.is_continued_by(messages)), None
        )
        if dialogue is None:
            return self._begin_dialogue(messages, step)
        escaped_message = self._escape_user_text(messages[-1])
        if not dialogue.conversation.add_observation(escaped_message["content"], step):
            return None
        dialogue.set_pending_messages(messages, [escaped_message])
        return dialogue

    def _begin_dialogue(self, messages: list[Message], step: int) -> Dialogue | None:
        escaped_messages = [self._escape_user_text(message) for message in messages]
        conversation = TokenConversation(self._bridge, self._limits, escaped_messages[:-1])
        # Check before adding the ledger, because every ledger becomes a row of the batch.
        if not conversation.add_observation(escaped_messages[-1]["content"], step):
            return None
        dialogue = Dialogue(conversation, len(self._dialogues), messages)
        dialogue.set_pending_messages(messages, escaped_messages)
        self.ledgers.append(conversation.ledger)
        self._dialogues.append(dialogue)
        return dialogue

    def _escape_user_text(self, message: Message) -> Message:
        if message["role"] != "user":
            return message
        return {**message, "content": self._bridge.escape_added_tokens(message["content"])}
