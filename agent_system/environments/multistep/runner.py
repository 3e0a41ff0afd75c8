"""Playing trials: ask the agent for a turn of every trial that plays, step the environments, until
all are over.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from agent_system.agents import Action, Agent, Message, ask
from agent_system.environments.multistep.transcript import Transcript
from agent_system.environments.multistep.trial import Episode, Trial
from agent_system.environments.pool.failure import EnvFailure
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import Limits
from agent_system.tokens.plain import PlainBridge
from verl.utils.sampling import StopReason

logger = logging.getLogger(__name__)
_CUT = {StopReason.LENGTH: "length", StopReason.ABORT: "abort"}


class TrialHooks(Protocol):
    """What a runner asks of a ``MultistepEnv``, whose docstrings say what each of these is."""

    bridge: ChatBridge | PlainBridge | None
    system_prompt: str
    max_steps_per_episode: int
    episodes_per_trial: int
    free_shots: int
    trial_mode: str
    step_workers: int
    active_states: dict[str, Any]

    def _initialize_episode(self, session_id: str, task_info: dict[str, Any]) -> Any: ...

    def _format_prompt(self, state: object, step: int) -> str: ...

    @property
    def _step_episode(self) -> Callable[..., tuple[Any, float, bool, dict[str, Any]]]: ...

    @property
    def _calculate_reward(self) -> Callable[..., float]: ...

    def _format_episode(self, number: int) -> str: ...

    def _format_outcome(self, state: object) -> str: ...

    def close_session(self, trial: Trial) -> None:
        """Take note of a trial that is over."""
        ...


class TrialRunner:
    """Plays trials in ``env`` (through its hooks) with turns of ``agent`` within ``limits``."""

    def __init__(self, env: TrialHooks, agent: Agent, limits: Limits) -> None:
        self.env = env
        self.agent = agent
        self.limits = limits
        self._remembers = env.trial_mode == "all_episodes"

    def run(self, trials: Sequence[Trial]) -> Sequence[Trial]:
        """Play all ``trials`` to their ends and return them."""
        for trial in trials:
            trial.transcript = self._transcript(trial)
        self._each(self._begin_episode, trials)
        # One call of the agent for a turn of every trial that is left: an engine is fastest with
        # large batches.
        while playing := [trial for trial in trials if not trial.over]:
            conversations = [trial.transcript.conversation() for trial in playing]
            states = [trial.agent_state for trial in playing]
            actions, states = ask(self.agent, conversations, states)
            for trial, state in zip(playing, states, strict=True):
                trial.agent_state = state
            self._each(self._advance, playing, actions)
        return trials

    def _transcript(self, trial: Trial) -> Transcript:
        opening = trial.opening
        prompt = self.env.system_prompt
        has_system = bool(opening) and opening[0]["role"] == "system"
        system: list[Message] = []
        if prompt and not has_system:
            system = [{"role": "system", "content": prompt}]
        return Transcript(self.env.bridge, [*system, *opening], self.limits)

    def _begin_episode(self, trial: Trial) -> None:
        env = self.env
        number = len(trial.episodes)
        said: list[str] = []
        if number and self._remembers:
            said.append(env._format_outcome(trial.episode.state))
        elif number:
            trial.transcript = self._transcript(trial)
            # A conversation of its own: the agent may not remember the last one either.
            trial.agent_state = None
        trial.episodes.append(Episode(number, free=number < env.free_shots))
        self._store(trial, self._first_state(trial))
        if self._remembers and env.episodes_per_trial > 1:
            said.append(env._format_episode(number))
        said.append(env._format_prompt(trial.episode.state, 0))
        self._tell(trial, "\n\n".join(filter(None, said)))

    def _first_state(self, trial: Trial) -> Any:
        # A copy: a hook may change it, and the next episode starts from the same task.
        return self.env._initialize_episode(trial.session_id, dict(trial.task_info))

    def _advance(self, trial: Trial, action: Action | str) -> None:
        episode = trial.episode
        text, reason = trial.transcript.say(action, trial.turn, episode.number)
        trial.turn += 1
        episode.actions.append(text)
        episode.stop_reasons.append(reason)
        if reason is not StopReason.STOP:  # what was cut is no action
            episode.truncated = _CUT[reason]
            self._end_episode(trial)
            return
        state, reward, done, info = self.env._step_episode(trial.session_id, text)
        self._store(trial, state)
        episode.rewards.append(float(reward))
        episode.info = info or {}
        # Older children tell the end in their state alone.
        told_by_state = isinstance(episode.state, Mapping) and bool(episode.state.get("done"))
        episode.done = bool(done) or told_by_state
        if not episode.done and len(episode.actions) < self.env.max_steps_per_episode:
            self._tell(trial, self.env._format_prompt(episode.state, len(episode.actions)))
            return
        episode.truncated = None if episode.done else "steps"
        self._end_episode(trial)

    def _store(self, trial: Trial, state: object) -> None:
        """Keep the state that a hook returned; one that returned None has changed ``active_states``
        itself.
        """
        if state is not None:
            self.env.active_states[trial.session_id] = state
        trial.episode.state = self.env.active_states[trial.session_id]

    def _tell(self, trial: Trial, text: str) -> None:
        if not trial.transcript.hear(text, trial.turn, trial.episode.number):
            # This may begin the next episode, whose prompt may not fit either: the recursion is no
            # deeper than there are episodes.
            trial.episode.truncated = "budget"
            self._end_episode(trial)

    def _end_episode(self, trial: Trial) -> None:
        episode = trial.episode
        known = {
            "session_id": trial.session_id,
            "task_info": trial.task_info,
            "state": episode.state,
            "rewards": episode.rewards,
            "actions": episode.actions,
            "steps": len(episode.actions),
            "done": episode.done,
            "info": episode.info,
        }
        episode.reward = float(_call_with(self.env._calculate_reward, known, episode.record()))
        if self._another_episode(trial):
            self._begin_episode(trial)
            return
        counted = trial.episodes[-1:]
        if self._remembers:
            counted = trial.episodes[self.env.free_shots :]
        trial.total = float(sum(played.reward for played in counted))
        self._close(trial)

    def _another_episode(self, trial: Trial) -> bool:
        if trial.episode.truncated == "abort":
            return False
        # A conversation that remembers only grows: where no turn fits now, none will later.
        if self._remembers and trial.episode.truncated == "budget":
            return False
        return len(trial.episodes) < self.env.episodes_per_trial

    def _close(self, trial: Trial) -> None:
        trial.over = True
        self.env.close_session(trial)

    def _each(
        self, function: Callable[..., None], trials: Sequence[Trial], *columns: Iterable[Any]
    ) -> None:
        """Call ``function`` for every trial; one whose environment fails is aborted, the others
        play on.
        """

        def guarded(trial: Trial, *values: object) -> None:
            try:
                function(trial, *values)
            # Any other exception is a mistake in the environment and ends the run.
            except EnvFailure as failure:
                logger.warning("session %s is aborted: %s", trial.session_id, failure)
                trial.aborted = str(failure)
                self._close(trial)

        # In the caller's thread by default: an environment need not be safe to call from others.
        if self.env.step_workers == 1 or len(trials) < 2:
            list(map(guarded, trials, *columns))
            return
        with ThreadPoolExecutor(min(self.env.step_workers, len(trials))) as pool:
            list(pool.map(guarded, trials, *columns))


class EpisodeRunner(TrialRunner):
    """Plays one episode of a session from the state it is in, and leaves it in the last one."""

    def __init__(self, env: TrialHooks, agent: Agent, limits: Limits) -> None:
        super().__init__(env, agent, limits)
        self._remembers = False

    def _first_state(self, trial: Trial) -> Any:
        return self.env.active_states[trial.session_id]

    def _another_episode(self, trial: Trial) -> bool:  # noqa: ARG002  never
        return False

    def _close(self, trial: Trial) -> None:
        super()._close(trial)
        self.env.active_states[trial.session_id] = trial.episode.state


def _call_with(
    function: Callable[..., float], known: Mapping[str, Any], otherwise: object
) -> float:
    """Call ``function`` with the ``known`` values of its parameters' names; ``otherwise`` for a
    required other one.
    """
    chosen: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        required = parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_KEYWORD:
            chosen |= known
        elif name in known:
            chosen[name] = known[name]
        elif required and parameter.kind is not parameter.VAR_POSITIONAL:
            chosen[name] = otherwise
    return function(**chosen)
