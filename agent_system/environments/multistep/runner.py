"""Loop that runs trials: one or more episodes of a task, with one agent.

``_step_episode`` of an environment has one of two signatures, and a caller may use either::

    (session_id, action)                 current: the state is ``active_states[session_id]``
    (session_id, state, llm_action)      earlier: the state is passed
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from agent_system.agents import Action, Agent, get_actions
from agent_system.environments.env import EnvFailure
from agent_system.environments.multistep.trial import Episode, Transcript, Trial
from agent_system.tokens.conversation import TokenLimits
from verl.utils.sampling import StopReason

if TYPE_CHECKING:
    from agent_system.environments.multistep.env import MultistepEnv

logger = logging.getLogger(__name__)
StepResult = tuple[Any, float, bool, dict[str, Any]]
_NOT_GIVEN = object()
_TRUNCATION_REASONS = {StopReason.LENGTH: "length", StopReason.ABORT: "abort"}


class TrialRunner:
    """Loop that lets ``agent`` act in the trials of ``env``, within the token ``limits``."""

    def __init__(self, env: "MultistepEnv", agent: Agent, limits: TokenLimits) -> None:
        self.env = env
        self.agent = agent
        self.limits = limits
        self._keeps_conversation = env.trial_mode == "all_episodes"

    def run(self, trials: Sequence[Trial]) -> Sequence[Trial]:
        """Run all ``trials`` to their end and return them."""
        for trial in trials:
            trial.transcript = self._create_transcript(trial)
        self._call_for_each_trial(self._begin_episode, trials)
        # Each agent call has all active trials: engines are fastest with large batches.
        while active_trials := [trial for trial in trials if not trial.is_over]:
            conversations = [trial.transcript.build_conversation() for trial in active_trials]
            agent_states = [trial.agent_state for trial in active_trials]
            actions, agent_states = get_actions(self.agent, conversations, agent_states)
            for trial, agent_state in zip(active_trials, agent_states, strict=True):
                trial.agent_state = agent_state
            self._call_for_each_trial(self._advance_trial, active_trials, actions)
        return trials

    def _create_transcript(self, trial: Trial) -> Transcript:
        opening_messages = trial.opening
        has_system = bool(opening_messages) and opening_messages[0]["role"] == "system"
        if self.env.system_prompt and not has_system:
            opening_messages = [
                {"role": "system", "content": self.env.system_prompt},
                *opening_messages,
            ]
        return Transcript(self.env.bridge, opening_messages, self.limits)

    def _begin_episode(self, trial: Trial) -> None:
        env = self.env
        episode_number = len(trial.episodes)
        observation_texts: list[str] = []
        if episode_number and self._keeps_conversation:
            observation_texts.append(env._format_outcome(trial.current_episode.state))
        elif episode_number:
            trial.transcript = self._create_transcript(trial)
            # A new conversation also needs a new agent state.
            trial.agent_state = None
        trial.episodes.append(Episode(episode_number, is_free=episode_number < env.free_shots))
        self._store_state(trial, self._get_initial_state(trial))
        if self._keeps_conversation and env.episodes_per_trial > 1:
            observation_texts.append(env._format_episode(episode_number))
        observation_texts.append(env._format_prompt(trial.current_episode.state, 0))
        self._add_observation(trial, "\n\n".join(filter(None, observation_texts)))

    def _get_initial_state(self, trial: Trial) -> Any:
        # Pass a copy: the hook may change it, and the next episode has the same task.
        return self.env._initialize_episode(trial.session_id, dict(trial.task_info))

    def _advance_trial(self, trial: Trial, action: Action | str) -> None:
        episode = trial.current_episode
        text, stop_reason = trial.transcript.add_turn(action, trial.turn, episode.number)
        trial.turn += 1
        episode.actions.append(text)
        episode.stop_reasons.append(stop_reason)
        if stop_reason is not StopReason.STOP:  # do not execute an incomplete turn
            episode.truncated = _TRUNCATION_REASONS[stop_reason]
            self._end_episode(trial)
            return
        state, reward, done, info = self.env._step_episode(trial.session_id, text)
        self._store_state(trial, state)
        episode.rewards.append(float(reward))
        episode.info = info or {}
        # Older subclasses set ``done`` in their state only.
        is_done_in_state = isinstance(episode.state, Mapping) and bool(episode.state.get("done"))
        episode.done = bool(done) or is_done_in_state
        if not episode.done and len(episode.actions) < self.env.max_steps_per_episode:
            prompt = self.env._format_prompt(episode.state, len(episode.actions))
            self._add_observation(trial, prompt)
            return
        episode.truncated = None if episode.done else "steps"
        self._end_episode(trial)

    def _store_state(self, trial: Trial, state: object) -> None:
        """Store ``state``; if it is None, the environment has changed ``active_states`` itself."""
        if state is not None:
            self.env.active_states[trial.session_id] = state
        trial.current_episode.state = self.env.active_states[trial.session_id]

    def _add_observation(self, trial: Trial, text: str) -> None:
        if not trial.transcript.add_observation(text, trial.turn, trial.current_episode.number):
            # Ending the episode may begin the next one, whose prompt may not fit either. The
            # recursion depth is at most the number of episodes.
            trial.current_episode.truncated = "budget"
            self._end_episode(trial)

    def _end_episode(self, trial: Trial) -> None:
        episode = trial.current_episode
        arguments = {
            "session_id": trial.session_id,
            "task_info": trial.task_info,
            "state": episode.state,
            "rewards": episode.rewards,
            "actions": episode.actions,
            "steps": len(episode.actions),
            "done": episode.done,
            "info": episode.info,
        }
        episode.reward = float(
            _call_with_matching_arguments(
                self.env._calculate_reward, arguments, episode.to_record()
            )
        )
        if self._has_next_episode(trial):
            self._begin_episode(trial)
            return
        rewarded_episodes = trial.episodes[-1:]
        if self._keeps_conversation:
            rewarded_episodes = trial.episodes[self.env.free_shots :]
        trial.total_return = float(
            sum(episode_with_reward.reward for episode_with_reward in rewarded_episodes)
        )
        self._close_trial(trial)

    def _has_next_episode(self, trial: Trial) -> bool:
        if trial.current_episode.truncated == "abort":
            return False
        # The next episode would continue this conversation, whose token limit is reached.
        if self._keeps_conversation and trial.current_episode.truncated == "budget":
            return False
        return len(trial.episodes) < self.env.episodes_per_trial

    def _close_trial(self, trial: Trial) -> None:
        trial.is_over = True
        self.env.close_session(trial)

    def _call_for_each_trial(
        self,
        function: Callable[..., None],
        trials: Sequence[Trial],
        *argument_columns: Iterable[Any],
    ) -> None:
        """Call ``function`` for every trial. Abort a trial whose environment fails."""

        def call_or_abort(trial: Trial, *column_values: object) -> None:
            try:
                function(trial, *column_values)
            # Any other exception is a bug of the environment and ends the run.
            except EnvFailure as failure:
                logger.warning("session %s is aborted: %s", trial.session_id, failure)
                trial.aborted = str(failure)
                self._close_trial(trial)

        # Use the caller's thread by default: the environment may not be thread-safe.
        if self.env.step_workers == 1 or len(trials) < 2:
            list(map(call_or_abort, trials, *argument_columns))
            return
        with ThreadPoolExecutor(min(self.env.step_workers, len(trials))) as pool:
            list(pool.map(call_or_abort, trials, *argument_columns))


class EpisodeRunner(TrialRunner):
    """Runner of a single episode that starts from the current state of the environment."""

    def __init__(self, env: "MultistepEnv", agent: Agent, limits: TokenLimits) -> None:
        super().__init__(env, agent, limits)
        self._keeps_conversation = False

    def _get_initial_state(self, trial: Trial) -> Any:
        return self.env.active_states[trial.session_id]

    def _has_next_episode(self, trial: Trial) -> bool:
        return False

    def _close_trial(self, trial: Trial) -> None:
        super()._close_trial(trial)
        self.env.active_states[trial.session_id] = trial.current_episode.state


def _call_with_matching_arguments(
    function: Callable[..., float], values_by_name: Mapping[str, Any], default_value: object
) -> float:
    """Call ``function`` with the values of ``values_by_name`` that its parameters name.

    A required parameter with another name gets ``default_value``.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        is_required = parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= values_by_name
        elif name in values_by_name:
            arguments[name] = values_by_name[name]
        elif is_required and parameter.kind is not parameter.VAR_POSITIONAL:
            arguments[name] = default_value
    return function(**arguments)


def unify_step_signature(step_function: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Return a function that calls ``step_function`` and accepts the arguments of both signatures.

    ``step_function`` is an unbound ``_step_episode`` with either signature.
    """
    # Required parameters: self, session id and action. The earlier signature also requires a state.
    positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step_function).parameters.values()
    required_parameters = [
        parameter
        for parameter in parameters
        if parameter.kind in positional_kinds and parameter.default is parameter.empty
    ]
    takes_state = len(required_parameters) > 3

    @functools.wraps(step_function)
    def step(
        env: Any,
        session_id: str,
        *arguments: Any,
        state: Any = _NOT_GIVEN,
        action: Any = _NOT_GIVEN,
        llm_action: Any = _NOT_GIVEN,
    ) -> StepResult:
        action = action if llm_action is _NOT_GIVEN else llm_action
        unread_arguments = list(arguments)
        if action is _NOT_GIVEN and unread_arguments:
            action = unread_arguments.pop()
        if state is _NOT_GIVEN and unread_arguments:
            state = unread_arguments.pop()
        if action is _NOT_GIVEN or unread_arguments:
            raise TypeError(
                "_step_episode takes (session_id, action) or (session_id, state, llm_action); "
                f"got {len(arguments)} values after session_id"
            )
        if takes_state:
            current_state = env.active_states[session_id] if state is _NOT_GIVEN else state
            return step_function(env, session_id, current_state, action)
        if state is not _NOT_GIVEN:
            env.active_states[session_id] = state
        return step_function(env, session_id, action)

    return step
