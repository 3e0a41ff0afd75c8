"""``MultistepEnv``: an environment that runs whole trials, tokens included, for an agent and a list
of tasks.

    run_trial(rows) ─▶ trials ─┬─▶ agent: one batch of turns for all trials that play ─┐
                               │                                                       ▼
    results ◀── all over? ◀────┴── state, reward, done ◀── _step_episode, trial by trial

A trial is ``episodes_per_trial`` episodes of the same task in one conversation, so that an agent
can use in a later episode what it found out in an earlier one. The first ``free_shots`` episodes
explore: the return is the sum of the rewards of the others, and all turns are trained on it.
"""

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agent_system.agents import Agent, DirectOutputAgent, LanguageModel, Message
from agent_system.environments.multistep.hooks import either_form, opening_messages
from agent_system.environments.multistep.runner import EpisodeRunner, TrialRunner
from agent_system.environments.multistep.trial import (
    MASK_MODES,
    Trial,
    episode_results,
    trial_results,
)
from agent_system.tokens.conversation import Limits
from agent_system.tokens.plain import bridge_for_appending
from agent_system.tokens.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)
TRIAL_MODES = ("all_episodes", "last_episode")
# Rewards are asked for soon after a trial; without a bound a long run would keep every message.
KEPT_SESSIONS = 8192

# Columns, or rows, or texts or messages that open the conversations.
Inputs = Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Any] | Sequence[Message] | str]


class MultistepEnv:
    """Base class: a child says what a task is, what the agent sees, and what an action does.

    A child writes ``_initialize_episode``, ``_format_prompt`` and ``_step_episode``; it may write
    ``_calculate_reward``, ``_format_episode``, ``_format_outcome``, ``get_rubric`` and the two
    datasets. What it leaves out has a default: by these a task is a row whose ``prompt`` is said,
    one turn answers it, and nothing is earned.

    Args:
        tokenizer: A Hugging Face tokenizer whose chat template (if it has one) keeps earlier turns;
            None: no token work is done, every token list in the results is empty, and all else
            works.
        env_id: The name of the environment; session ids begin with it.
        system_prompt: The system message; none where empty.
        max_steps_per_episode: Turns after which an episode ends ``truncated``.
        episodes_per_trial: Episodes of the same task, one after the other.
        free_shots: How many of the first episodes are played without reward.
        trial_mode: ``all_episodes``, as above; ``last_episode``: every episode is a conversation of
            its own, and the last one's tokens and reward are the result.
        mask_mode: Trained are ``all`` turns of the agent, or the ``final`` one only.
        max_length: The longest token sequence of a trial; None: the tokenizer's
            ``model_max_length``.
        step_workers: Threads that play ``_step_episode`` of different sessions, for environments
            that wait for others.

    ``active_states[session_id]`` is the state of a session under way;
    ``completed_episodes[session_id]`` what came of a finished one (``reward``, ``steps``,
    ``llm_actions``, ``episodes``, ...), for the last ``KEPT_SESSIONS`` of them.

    Raises:
        ValueError: ``episodes_per_trial < 1``, ``free_shots`` not in ``[0, episodes_per_trial)``,
            or an unknown mode.
        TemplateUnsupported: The chat template rewrites earlier turns.
    """

    # Strings that end a turn; trainers hand them to their samplers.
    stop: tuple[str, ...] = ()

    def __init__(
        self,
        tokenizer: TextTokenizer | None = None,
        env_id: str = "multistep",
        system_prompt: str = "",
        max_steps_per_episode: int = 10,
        episodes_per_trial: int = 1,
        free_shots: int = 0,
        trial_mode: str = "all_episodes",
        mask_mode: str = "all",
        max_length: int | None = None,
        step_workers: int = 1,
    ) -> None:
        _check(max_steps_per_episode, episodes_per_trial, free_shots)
        for name, value, allowed in (
            ("trial_mode", trial_mode, TRIAL_MODES),
            ("mask_mode", mask_mode, MASK_MODES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
        self.tokenizer = tokenizer
        self.env_id = env_id
        self.system_prompt = system_prompt
        self.max_steps_per_episode = max_steps_per_episode
        self.episodes_per_trial = episodes_per_trial
        self.free_shots = free_shots
        self.trial_mode = trial_mode
        self.mask_mode = mask_mode
        self.max_length = max_length
        self.step_workers = step_workers
        self.active_states: dict[str, Any] = {}
        self.completed_episodes: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.bridge = None if tokenizer is None else bridge_for_appending(tokenizer)
        self._numbers = itertools.count()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_step_episode" in vars(cls):
            cls._step_episode = either_form(vars(cls)["_step_episode"])

    # ---- what a child says ----

    def _initialize_episode(
        self,
        session_id: str,  # noqa: ARG002  a child reads it
        task_info: dict[str, Any],
    ) -> Any:
        """The state (a dict, usually) at the start of an episode; by default the row itself.

        The same ``task_info`` must give the same task.
        """
        return {**task_info, "done": False}

    def _format_prompt(self, state: Any, step: int) -> str:  # noqa: ARG002  a child reads it
        """What the agent is told in ``state`` before its turn number ``step`` (from 0); by default
        the state's ``prompt``, where it has one.
        """
        said = state.get("prompt", "") if isinstance(state, Mapping) else ""
        return said if isinstance(said, str) else ""

    @either_form
    def _step_episode(
        self, session_id: str, action: str
    ) -> tuple[Any, float, bool, dict[str, Any]]:
        """Play ``action`` in ``active_states[session_id]``; return the next state, reward, done,
        info. By default the first action ends the episode and earns nothing.

        A child may write it as ``(session_id, state, llm_action)`` as well, and whatever its form,
        it may be called in both.
        """
        return {**self.active_states[session_id], "answer": action, "done": True}, 0.0, True, {}

    def _calculate_reward(self, rewards: list[float]) -> float:
        """The reward of a finished episode.

        A child's parameters are filled by their names: ``session_id``, ``task_info``, ``state``,
        ``rewards``, ``actions``, ``steps``, ``done``, ``info``; one of any other name gets the
        episode's record, as it will be in ``completed_episodes``.
        """
        return float(sum(rewards))

    def _format_episode(self, number: int) -> str:
        """The line before episode ``number`` (from 0) of several."""
        free = " It does not count." if number < self.free_shots else ""
        return f"Episode {number + 1} of {self.episodes_per_trial}.{free}"

    def _format_outcome(self, state: Any) -> str:  # noqa: ARG002  a child reads it
        """What the agent is told of the end of an episode when another one follows."""
        return ""

    def get_rubric(self) -> list[Callable[..., list[float | None]]]:
        """Reward functions for a trainer; they take ``session_ids``."""
        return [self.trial_reward]

    def get_train_dataset(self) -> Any:
        """A ``datasets.Dataset`` whose rows hold what ``_initialize_episode`` needs."""
        raise NotImplementedError(
            f"{type(self).__name__} has no training tasks of its own: pass a dataset"
        )

    def get_eval_dataset(self) -> Any:
        """The same, for tasks that are not trained on."""
        raise NotImplementedError(
            f"{type(self).__name__} has no evaluation tasks of its own: pass a dataset"
        )

    # ---- what callers use ----

    def trial_reward(
        self,
        completions: Sequence[object] | None = None,
        session_ids: Sequence[str] | None = None,
        **columns: object,  # noqa: ARG002  trainers hand over every column of the dataset
    ) -> list[float | None]:
        """The return of every session; 0.0 with a warning for an unknown one, None for one that was
        aborted.
        """
        if session_ids is None:
            logger.warning("the rubric of %s got no session_ids: every reward is 0", self.env_id)
            return [0.0] * len(completions or ())
        return [self._return_of(session_id) for session_id in session_ids]

    def _return_of(self, session_id: str) -> float | None:
        record = self.completed_episodes.get(session_id)
        if record is None:
            logger.warning("no finished session is called %r: its reward is 0", session_id)
            return 0.0
        # A broken trial says nothing about the policy: trainers take None as not scored.
        return None if record["aborted"] else float(record["reward"])

    def generate(
        self,
        prompts: Inputs,
        llm: LanguageModel | None = None,
        sampling_params: object = None,
        **options: Any,
    ) -> dict[str, list]:
        """``run_trial`` under the name that older callers know."""
        return self.run_trial(prompts, llm=llm, sampling_params=sampling_params, **options)

    def run_trial(
        self,
        inputs: Inputs | None = None,
        llm: LanguageModel | None = None,
        sampling_params: object = None,
        agent: Agent | None = None,
        *,
        prompts: Inputs | None = None,
        max_completion_length: int | None = None,
        **ignored: object,
    ) -> dict[str, list]:
        """Play one trial per input and return everything that was seen, sampled and earned.

        Args:
            inputs: Dataset rows (dicts), or a dict of columns; or texts or lists of messages, which
                then open the conversations. The user says what has no role.
            prompts: The name of ``inputs`` that older callers know.
            llm, sampling_params: A model to sample from where no ``agent`` is given (see
                ``DirectOutputAgent``).
            agent: Who plays; see ``agent_system.agents.base`` for the two kinds.
            max_completion_length: The most tokens after the first prompt; a turn that would not fit
                ends the trial.

        Returns:
            Lists with one entry per input. With one value per token: ``full_token_ids``,
            ``full_attention_mask`` (all 1), ``completion_only_mask`` (1 on the agent's tokens) and
            ``logprobs`` (of the agent's tokens, 0 elsewhere). ``prompt_lengths``: tokens before
            the first sampled one. ``final_completion_messages``: the last assistant message, in a
            list. ``session_ids``, ``rewards`` (returns), ``turn_rewards`` and ``stop_reasons`` by
            episode, ``episode_boundaries`` (token ranges), ``truncated``, ``aborted``, and
            ``retokenized``: whether tokens were made from an agent's words instead of being
            sampled. ``ids``, ``messages`` and ``mask`` are other names of ``full_token_ids``,
            ``final_completion_messages`` and ``completion_only_mask``.

        Raises:
            ValueError: Neither agent nor model, or a message without content.
            TypeError: Neither inputs nor prompts, or both.
        """
        if ignored:
            logger.warning("run_trial of %s ignores %s", self.env_id, ", ".join(sorted(ignored)))
        given = [values for values in (inputs, prompts) if values is not None]
        if len(given) != 1:
            raise TypeError("run_trial takes inputs, or prompts (their older name), and not both")
        agent = _agent_of(agent, llm, sampling_params)
        runner = TrialRunner(self, agent, self._limits_for(agent, max_completion_length))
        entries = _entries(given[0])
        trials = [Trial(f"{self.env_id}-{next(self._numbers)}", *entry) for entry in entries]
        return trial_results(runner.run(trials), self.mask_mode)

    def _run_complete_episode(
        self,
        session_id: str,
        llm: LanguageModel | None = None,
        sampling_params: object = None,
        agent: Agent | None = None,
    ) -> dict[str, Any]:
        """Play one episode from ``active_states[session_id]`` to its end, in a conversation of its
        own.

        Returns ``full_token_ids``, ``full_attention_mask``, ``completion_only_mask``, ``logprobs``
        (lists over the tokens), ``final_completion_messages``, ``session_id``, ``reward``,
        ``llm_responses`` and what else ``completed_episodes[session_id]`` holds, which has the
        episode from then on. ``active_states[session_id]`` is the state at its end.
        ``run_trial`` plays all its trials at once and does not pass through here.

        Raises:
            KeyError: No state of that session; ``_initialize_episode`` makes one.
            ValueError: Neither agent nor model.
        """
        if session_id not in self.active_states:
            raise KeyError(
                f"no state of session {session_id!r}: "
                "active_states[session_id] = _initialize_episode(session_id, task_info) comes first"
            )
        agent = _agent_of(agent, llm, sampling_params)
        (trial,) = EpisodeRunner(self, agent, self._limits_for(agent, None)).run(
            [Trial(session_id, {})]
        )
        return episode_results(trial, self.mask_mode)

    def close_session(self, trial: Trial) -> None:
        """Move a finished session from ``active_states`` to ``completed_episodes``; the oldest ones
        are forgotten.
        """
        self.active_states.pop(trial.session_id, None)
        self.completed_episodes[trial.session_id] = trial.record()
        while len(self.completed_episodes) > KEPT_SESSIONS:
            self.completed_episodes.popitem(last=False)

    def _limits_for(self, agent: Agent, completion: int | None) -> Limits:
        length = self.max_length or getattr(self.tokenizer, "model_max_length", None)
        return Limits(
            response=completion or math.inf,
            # Transformers says 1e30 for a tokenizer without a bound, which does no harm.
            total=length if isinstance(length, int) else math.inf,
            turn=getattr(agent, "max_turn_tokens", None) or 0,
        )


def _agent_of(agent: Agent | None, llm: LanguageModel | None, sampling_params: object) -> Agent:
    """``agent``, or one that says what ``llm`` samples."""
    if agent is not None:
        return agent
    if llm is None:
        raise ValueError("an agent has to play, or an llm to make one from")
    return DirectOutputAgent(llm, sampling_params)


def _check(max_steps: int, episodes: int, free_shots: int) -> None:
    if max_steps < 1:
        raise ValueError(f"max_steps_per_episode={max_steps}: at least 1")
    if episodes < 1:
        raise ValueError(f"episodes_per_trial={episodes}: at least 1")
    if not 0 <= free_shots < episodes:
        raise ValueError(
            f"free_shots={free_shots} with episodes_per_trial={episodes}: at least 0 and fewer "
            "than the episodes, because an episode must count"
        )


def _entries(inputs: Inputs) -> list[tuple[dict[str, Any], list[Message]]]:
    """(task, messages in front) of every input; see ``run_trial``."""
    if not isinstance(inputs, Mapping):
        return [_entry(entry) for entry in inputs]
    columns = {str(name): values for name, values in inputs.items()}
    rows = zip(*columns.values(), strict=True)
    return [(dict(zip(columns, row, strict=True)), []) for row in rows]


def _entry(
    entry: Mapping[str, Any] | Sequence[Message] | str,
) -> tuple[dict[str, Any], list[Message]]:
    if isinstance(entry, Mapping):
        return dict(entry), []
    opening = opening_messages(entry)
    return {"messages": opening}, list(opening)
