"""Playing trials: ask the agent for a turn of every trial that plays, step the environments, until
all are over.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from agent_system.agents import Action, ask
from agent_system.environments.failure import EnvFailure
from agent_system.environments.multistep.transcript import Limits, Transcript
from agent_system.environments.multistep.trial import Episode, Trial
from verl.utils.sampling import StopReason

if TYPE_CHECKING:
    from agent_system.environments.multistep.env import MultistepEnv

logger = logging.getLogger(__name__)
_CUT = {StopReason.LENGTH: "length", StopReason.ABORT: "abort"}


class TrialRunner:
    """Plays trials in ``env`` (through its hooks) with turns of ``agent`` within ``limits``."""

    def __init__(self, env: "MultistepEnv", agent: Any, limits: Limits) -> None:
        self.env, self.agent, self.limits = env, agent, limits
        self._remembers = env.trial_mode == "all_episodes"

    def run(self, trials: Sequence[Trial]) -> Sequence[Trial]:
        """Play all ``trials`` to their ends and return them."""
        for trial in trials:
            trial.transcript = self._transcript(trial)
        self._each(self._begin_episode, trials)
        while playing := [trial for trial in trials if not trial.over]:
            conversations = [trial.transcript.conversation() for trial in playing]
            actions, states = ask(
                self.agent, conversations, [trial.agent_state for trial in playing]
            )
            for trial, state in zip(playing, states, strict=True):
                trial.agent_state = state
            self._each(self._advance, playing, actions)
        return trials

    def _transcript(self, trial: Trial) -> Transcript:
        opening, prompt = trial.opening, self.env.system_prompt
        has_system = bool(opening) and opening[0]["role"] == "system"
        system = [{"role": "system", "content": prompt}] if prompt and not has_system else []
        return Transcript(self.env.bridge, [*system, *opening], self.limits)

    def _begin_episode(self, trial: Trial) -> None:
        env, number, said = self.env, len(trial.episodes), []
        if number and self._remembers:
            said.append(env._format_outcome(trial.episode.state))
        elif number:
            trial.transcript, trial.agent_state = self._transcript(trial), None
        trial.episodes.append(Episode(number, free=number < env.free_shots))
        self._store(trial, env._initialize_episode(trial.session_id, dict(trial.task_info)))
        if self._remembers and env.episodes_per_trial > 1:
            said.append(env._format_episode(number))
        said.append(env._format_prompt(trial.episode.state, 0))
        self._tell(trial, "\n\n".join(filter(None, said)))

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
        episode.done = bool(done) or (
            isinstance(episode.state, Mapping) and bool(episode.state.get("done"))
        )
        if not episode.done and len(episode.actions) < self.env.max_steps_per_episode:
            self._tell(trial, self.env._format_prompt(episode.state, len(episode.actions)))
            return
        episode.truncated = None if episode.done else "steps"
        self._end_episode(trial)

    def _store(self, trial: Trial, state: Any) -> None:
        """Keep the state that a hook returned; one that returned None has changed ``active_states``
        itself.
        """
        if state is not None:
            self.env.active_states[trial.session_id] = state
        trial.episode.state = self.env.active_states[trial.session_id]

    def _tell(self, trial: Trial, text: str) -> None:
        if not trial.transcript.hear(text, trial.turn, trial.episode.number):
            trial.episode.truncated = "budget"
            self._end_episode(trial)

    def _end_episode(self, trial: Trial) -> None:
        episode = trial.episode
        names = ("state", "rewards", "actions", "done", "info")
        known = {name: getattr(episode, name) for name in names}
        known |= {
            "session_id": trial.session_id,
            "task_info": trial.task_info,
            "steps": len(episode.actions),
        }
        episode.reward = float(_call_with(self.env._calculate_reward, known, episode.record()))
        no_room = self._remembers and episode.truncated == "budget"
        if (
            len(trial.episodes) < self.env.episodes_per_trial
            and not no_room
            and episode.truncated != "abort"
        ):
            self._begin_episode(trial)
            return
        counted = trial.episodes[self.env.free_shots :] if self._remembers else trial.episodes[-1:]
        trial.total = float(sum(played.reward for played in counted))
        self._close(trial)

    def _close(self, trial: Trial) -> None:
        trial.over = True
        self.env.close_session(trial)

    def _each(
        self, function: Callable[..., None], trials: Sequence[Trial], *columns: Iterable[Any]
    ) -> None:
        """Call ``function`` for every trial; one whose environment fails is aborted, the others
        play on.
        """

        def guarded(trial: Trial, *values: Any) -> None:
            try:
                function(trial, *values)
            except EnvFailure as failure:
                logger.warning("session %s is aborted: %s", trial.session_id, failure)
                trial.aborted = str(failure)
                self._close(trial)

        if self.env.step_workers == 1 or len(trials) < 2:
            list(map(guarded, trials, *columns))
            return
        with ThreadPoolExecutor(min(self.env.step_workers, len(trials))) as pool:
            list(pool.map(guarded, trials, *columns))


def _call_with(function: Callable[..., Any], known: Mapping[str, Any], otherwise: Any) -> Any:
    """Call ``function`` with the ``known`` values of its parameters' names; ``otherwise`` for a
    required other one.
    """
    chosen = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            chosen |= known
        elif name in known:
            chosen[name] = known[name]
        elif (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            chosen[name] = otherwise
    return function(**chosen)
