"""``MultistepEnv``: environment that runs whole trials of an agent and keeps their tokens.

    run_trial(rows) ─▶ trials ─┬─▶ agent: one batch of turns for all active trials ────┐
                               │                                                       ▼
    results ◀── all over? ◀────┴── state, reward, done ◀── _step_episode, trial by trial

A trial is ``episodes_per_trial`` episodes of the same task in one conversation. The agent can use
in a later episode what it learned in an earlier one. The first ``free_shots`` episodes have no
reward. The return of a trial is the sum of the rewards of the later episodes. Training uses this
return for all turns of the trial.
"""

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agent_system.agents import Agent, DirectOutputAgent, LanguageModel, Message
from agent_system.environments.multistep.runner import (
    EpisodeRunner,
    TrialRunner,
    unify_step_signature,
)
from agent_system.environments.multistep.trial import (
    MASK_MODES,
    Trial,
    build_episode_results,
    build_trial_results,
)
from agent_system.tokens.bridge import TextTokenizer
from agent_system.tokens.conversation import TokenLimits
from agent_system.tokens.template_support import make_bridge_for_append

logger = logging.getLogger(__name__)
TRIAL_MODES = ("all_episodes", "last_episode")
# Finished sessions that are kept. Trainers read rewards soon after a trial, and without a limit all
# messages of a run would stay in memory.
KEPT_SESSIONS = 8192

# One of: a dict of columns, dataset rows, or the first text or messages of each conversation.
Inputs = Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Any] | Sequence[Message] | str]


class MultistepEnv:
    """Base class of environments with trials.

    A subclass defines ``_initialize_episode``, ``_format_prompt`` and ``_step_episode``. It may
    define ``_calculate_reward``, ``_format_episode``, ``_format_outcome``, ``get_rubric`` and the
    two datasets.

    Args:
        tokenizer: Hugging Face tokenizer. Its chat template, if any, must keep earlier turns. None:
            all token lists in the results are empty.
        env_id: Name of the environment; session ids begin with it.
        system_prompt: System message; empty for none.
        max_steps_per_episode: Turns after which an episode ends ``truncated``.
        episodes_per_trial: Episodes of the same task in a trial.
        free_shots: Number of episodes without reward at the beginning of a trial.
        trial_mode: ``all_episodes``: all episodes of a trial share one conversation.
            ``last_episode``: each episode is a separate conversation, and the result has tokens
            and reward of the last one.
        mask_mode: ``all``: train on all turns of the agent. ``final``: train on its last turn only.
        max_length: Maximum tokens of a trial. None: ``model_max_length`` of the tokenizer.
        step_workers: Threads that call ``_step_episode`` of sessions, for environments that wait.

    ``active_states[session_id]`` is the state of an active session. ``completed_episodes`` has the
    records of the last ``KEPT_SESSIONS`` finished sessions.

    Raises ``ValueError`` for arguments out of range, and ``UnsupportedTemplateError`` if the chat
    template rewrites earlier turns.
    """

    # Strings that end a turn. Trainers pass them to their samplers.
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
        for name, argument in (
            ("max_steps_per_episode", max_steps_per_episode),
            ("episodes_per_trial", episodes_per_trial),
        ):
            if argument < 1:
                raise ValueError(f"{name}={argument}; allowed: 1 or more")
        if not 0 <= free_shots < episodes_per_trial:
            raise ValueError(
                f"free_shots={free_shots} with episodes_per_trial={episodes_per_trial}; allowed: 0 "
                f"to {episodes_per_trial - 1}, because at least one episode needs a reward"
            )
        for name, value, allowed_values in (
            ("trial_mode", trial_mode, TRIAL_MODES),
            ("mask_mode", mask_mode, MASK_MODES),
        ):
            if value not in allowed_values:
                raise ValueError(f"{name}={value!r}; allowed: {', '.join(allowed_values)}")
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
        self.bridge = None if tokenizer is None else make_bridge_for_append(tokenizer)
        self._session_numbers = itertools.count()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_step_episode" in vars(cls):
            cls._step_episode = unify_step_signature(vars(cls)["_step_episode"])

    # ---- hooks of subclasses ----

    def _initialize_episode(self, session_id: str, task_info: dict[str, Any]) -> Any:
        """Return the state (usually a dict) at the start of an episode. Default: ``task_info``.

        ``task_info`` is a row of the dataset. The same row must give the same task.
        """
        return {**task_info, "done": False}

    def _format_prompt(self, state: Any, step: int) -> str:
        """Return the user message in ``state`` before turn ``step`` of the episode (from 0).

        Default: ``state["prompt"]`` if it is a string, else an empty text.
        """
        prompt = state.get("prompt", "") if isinstance(state, Mapping) else ""
        return prompt if isinstance(prompt, str) else ""

    @unify_step_signature
    def _step_episode(
        self, session_id: str, action: str
    ) -> tuple[Any, float, bool, dict[str, Any]]:
        """Apply ``action`` to ``active_states[session_id]``; return state, reward, done and info.

        By default the first action ends the episode with reward 0. A subclass may define the method
        with the earlier signature ``(session_id, state, llm_action)``.
        """
        return {**self.active_states[session_id], "answer": action, "done": True}, 0.0, True, {}

    def _calculate_reward(self, rewards: list[float]) -> float:
        """Return the reward of a finished episode.

        Parameters of a subclass are passed by name: ``session_id``, ``task_info``, ``state``,
        ``rewards``, ``actions``, ``steps``, ``done``, ``info``. A required parameter with another
        name gets the record of the episode, as in ``completed_episodes``.
        """
        return float(sum(rewards))

    def _format_episode(self, number: int) -> str:
        """Return the line that announces episode ``number`` (from 0) of several in a trial."""
        free_shot_remark = " It does not count." if number < self.free_shots else ""
        return f"Episode {number + 1} of {self.episodes_per_trial}.{free_shot_remark}"

    def _format_outcome(self, state: Any) -> str:
        """Return the text that reports how an episode ended, if another episode follows."""
        return ""

    def get_rubric(self) -> list[Callable[..., list[float | None]]]:
        """Return the reward functions for a trainer. They map ``session_ids`` to returns."""
        return [self.trial_reward]

    def get_train_dataset(self) -> Any:
        """Return a ``datasets.Dataset`` of training tasks for ``_initialize_episode``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no training tasks; fix: pass a dataset to the trainer"
        )

    def get_eval_dataset(self) -> Any:
        """Return a ``datasets.Dataset`` of evaluation tasks, which are not trained on."""
        raise NotImplementedError(
            f"{type(self).__name__} has no evaluation tasks; fix: pass a dataset to the trainer"
        )

    # ---- interface of callers ----

    def trial_reward(
        self,
        completions: Sequence[object] | None = None,
        session_ids: Sequence[str] | None = None,
        **columns: object,  # trainers pass every column of the dataset
    ) -> list[float | None]:
        """Return the return of each session's trial; 0.0 if it is unknown, None if aborted."""
        if session_ids is None:
            logger.warning("the rubric of %s got no session_ids: every reward is 0", self.env_id)
            return [0.0] * len(completions or ())
        return [self._get_session_return(session_id) for session_id in session_ids]

    def _get_session_return(self, session_id: str) -> float | None:
        record = self.completed_episodes.get(session_id)
        if record is None:
            logger.warning("session %r is unknown or not finished: its reward is 0", session_id)
            return 0.0
        # A failed trial gives no information about the policy. Trainers read None as not scored.
        return None if record["aborted"] else float(record["reward"])

    def generate(
        self,
        prompts: Inputs,
        llm: LanguageModel | None = None,
        sampling_params: object = None,
        **options: Any,
    ) -> dict[str, list]:
        """Call ``run_trial``, for callers that use its earlier name ``generate``."""
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
        **ignored_options: object,
    ) -> dict[str, list]:
        """Run one trial (one or more episodes) per input; return tokens, messages and rewards.

        Args:
            inputs: Dataset rows (dicts), or a dict of columns. Also allowed are texts or lists of
                messages, with which the conversations begin. The default role is ``user``.
            prompts: Name of ``inputs`` in earlier versions.
            llm, sampling_params: Model to sample from if there is no ``agent``; see
                ``DirectOutputAgent``.
            agent: ``BatchAgent`` (continues many conversations at once) or ``TextAgent`` (answers
                one conversation at a time).
            max_completion_length: Maximum number of tokens after the first prompt. A turn that
                would not fit ends the trial.

        Returns:
            Lists with one entry per input:

            - ``full_token_ids``, ``full_attention_mask`` (all 1), ``completion_only_mask`` (1 on
              the agent's tokens) and ``logprobs`` (0 on other tokens): one value per token.
            - ``prompt_lengths``: number of tokens before the first sampled one.
            - ``final_completion_messages``: list with the last assistant message.
            - ``session_ids``, ``rewards`` (returns), ``truncated``, ``aborted``.
            - ``turn_rewards``, ``stop_reasons``, ``episode_boundaries`` (token ranges): by episode.
            - ``retokenized``: True if tokens were encoded from an agent's text, not sampled.

            ``ids``, ``messages`` and ``mask`` are aliases of ``full_token_ids``,
            ``final_completion_messages`` and ``completion_only_mask``.

        Raises:
            ValueError: There is no agent and no model, or a message has no content.
            TypeError: There are no inputs and no prompts, or both.
        """
        if ignored_options:
            logger.warning(
                "run_trial of %s ignores %s", self.env_id, ", ".join(sorted(ignored_options))
            )
        non_null_inputs = [values for values in (inputs, prompts) if values is not None]
        if len(non_null_inputs) != 1:
            raise TypeError(
                f"run_trial got {len(non_null_inputs)} of the arguments inputs and prompts; "
                "allowed: one of them; fix: pass inputs"
            )
        agent = _select_agent(agent, llm, sampling_params)
        runner = TrialRunner(self, agent, self._build_token_limits(agent, max_completion_length))
        trial_inputs = _parse_trial_inputs(non_null_inputs[0])
        trials = [
            Trial(f"{self.env_id}-{next(self._session_numbers)}", *trial_input)
            for trial_input in trial_inputs
        ]
        return build_trial_results(runner.run(trials), self.mask_mode)

    def _run_complete_episode(
        self,
        session_id: str,
        llm: LanguageModel | None = None,
        sampling_params: object = None,
        agent: Agent | None = None,
    ) -> dict[str, Any]:
        """Run one episode from ``active_states[session_id]`` to its end, in a new conversation.

        Return its record with ``full_token_ids``, ``full_attention_mask``,
        ``completion_only_mask``, ``logprobs`` (one value per token) and
        ``final_completion_messages``. Raises ``KeyError`` if the session has no state.
        """
        if session_id not in self.active_states:
            raise KeyError(
                f"session {session_id!r} has no state; fix: first set "
                "active_states[session_id] = _initialize_episode(session_id, task_info)"
            )
        agent = _select_agent(agent, llm, sampling_params)
        (trial,) = EpisodeRunner(self, agent, self._build_token_limits(agent, None)).run(
            [Trial(session_id, {})]
        )
        return build_episode_results(trial, self.mask_mode)

    def close_session(self, trial: Trial) -> None:
        """Move a finished session from ``active_states`` to ``completed_episodes``."""
        self.active_states.pop(trial.session_id, None)
        self.store_records({trial.session_id: trial.to_record()})

    def store_records(self, records: Mapping[str, dict[str, Any]]) -> None:
        """Add ``records`` to ``completed_episodes``, and remove those beyond ``KEPT_SESSIONS``."""
        self.completed_episodes.update(records)
        while len(self.completed_episodes) > KEPT_SESSIONS:
            self.completed_episodes.popitem(last=False)

    def _build_token_limits(self, agent: Agent, max_completion_length: int | None) -> TokenLimits:
        max_length = self.max_length or getattr(self.tokenizer, "model_max_length", None)
        return TokenLimits(
            max_response=max_completion_length or math.inf,
            # Transformers returns 1e30 for a tokenizer without a limit, which works here.
            max_total=max_length if isinstance(max_length, int) else math.inf,
            max_turn=getattr(agent, "max_turn_tokens", None) or 0,
        )


def _select_agent(agent: Agent | None, llm: LanguageModel | None, sampling_params: object) -> Agent:
    if agent is not None:
        return agent
    if llm is None:
        raise ValueError("agent=None and llm=None; allowed: one of them; fix: pass agent or llm")
    return DirectOutputAgent(llm, sampling_params)


def _parse_trial_inputs(inputs: Inputs) -> list[tuple[dict[str, Any], list[Message]]]:
    if isinstance(inputs, Mapping):
        columns = {str(name): values for name, values in inputs.items()}
        rows_of_values = zip(*columns.values(), strict=True)
        return [(dict(zip(columns, values, strict=True)), []) for values in rows_of_values]
    trial_inputs: list[tuple[dict[str, Any], list[Message]]] = []
    for trial_input in inputs:
        if isinstance(trial_input, Mapping):
            trial_inputs.append((dict(trial_input), []))
            continue
        opening_messages = [
            _add_role(message)
            for message in ([trial_input] if isinstance(trial_input, str) else trial_input)
        ]
        trial_inputs.append(({"messages": opening_messages}, list(opening_messages)))
    return trial_inputs


def _add_role(message: Mapping[str, Any] | str) -> Message:
    """Return ``message`` as a dict with a role. The default role is ``user``."""
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message.get("content"), str):
        raise ValueError(
            f"a message has the keys {sorted(message)}; it needs content, which must be a string"
        )
    return {**message, "role": message.get("role") or "user"}
