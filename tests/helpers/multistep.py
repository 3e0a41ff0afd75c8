"""Environments, models and agents for tests of ``MultistepEnv``, written as external code would
be.
"""

from types import SimpleNamespace
from typing import Any

from agent_system.agents import Action
from agent_system.environments.multistep import MultistepEnv
from verl.utils.sampling import StopReason


class CountTo(MultistepEnv):
    """Say the next number until the target is reached; a correct number gives reward 1.

    The class uses the older interface.
    """

    def _initialize_episode(self, session_id, task_info) -> Any:
        return {"at": 0, "target": task_info.get("target", 2), "done": False}

    def _format_prompt(self, state, step):
        return f"step {step}: at {state['at']} of {state['target']}"

    def _step_episode(self, session_id, action) -> Any:
        state = dict(self.active_states[session_id])
        right = action.strip() == str(state["at"] + 1)
        state["at"] += 1
        state["done"] = state["at"] >= state["target"]
        return state, float(right), state["done"], {"right": right}


class OldModel:
    """Model of older callers: results have only ``.outputs[0].token_ids``."""

    def __init__(self, token_ids=(5, 6, 7)):
        self.token_ids, self.prompts = list(token_ids), []

    def generate(self, prompts, sampling_params=None, **kw) -> Any:
        self.prompts.append(list(prompts))
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.token_ids)]) for _ in prompts
        ]


class Speaker:
    """Agent whose ``get_action`` returns a text and a state.

    It says ``words`` in turn and counts in its state.
    """

    def __init__(self, *words):
        self.words, self.seen = words, []

    def get_action(self, messages, agent_state):
        num_turns = agent_state or 0
        self.seen.append((list(messages), agent_state))
        return self.words[num_turns % len(self.words)], num_turns + 1


class TokenSpeaker:
    """Agent that returns the tokens of ``words`` as sampled tokens, with log-probs -0.1, -0.2, ...

    The last turn may be cut.
    """

    def __init__(self, tokenizer, *words, max_turn_tokens=8, cut=()):
        self.tokenizer, self.words, self.max_turn_tokens, self.cut = (
            tokenizer,
            words,
            max_turn_tokens,
            cut,
        )
        self.prompts, self.turns = [], 0

    def act_batch(self, conversations):
        actions = []
        for conversation in conversations:
            self.prompts.append(conversation.prompt_ids)
            word = self.words[self.turns % len(self.words)]
            reason = StopReason.LENGTH if self.turns in self.cut else StopReason.STOP
            ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
            logprobs = [-(1 + i) / 10 for i in range(len(ids))]
            actions.append(Action("text that nobody reads", ids, logprobs, reason, 3))
            self.turns += 1
        return actions
