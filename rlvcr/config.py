"""The part of a configuration that the method reads, whatever classes it is made of."""

from typing import Protocol


class ThinkingConfig(Protocol):
    """``algorithm.rlvcr``."""

    @property
    def score(self) -> str: ...

    @property
    def mode(self) -> str: ...

    @property
    def combine(self) -> str: ...

    @property
    def thinking_diversity_w(self) -> float: ...

    @property
    def cost_coef(self) -> float: ...

    @property
    def cost_max(self) -> int: ...

    @property
    def price_in(self) -> str: ...

    @property
    def spread_floor(self) -> float: ...

    @property
    def permute(self) -> bool: ...

    @property
    def credit(self) -> str: ...

    @property
    def credit_end(self) -> bool: ...

    @property
    def std_floor(self) -> float: ...

    @property
    def level_bonus_w(self) -> float: ...

    @property
    def alternatives(self) -> str: ...

    @property
    def action_blind(self) -> bool: ...

    @property
    def expand(self) -> str: ...

    @property
    def step_fraction(self) -> float: ...

    @property
    def max_alternative_tokens(self) -> int: ...


class AlgorithmConfig(Protocol):
    """``algorithm``."""

    @property
    def adv_estimator(self) -> str: ...

    @property
    def rlvcr(self) -> ThinkingConfig: ...


class SamplingConfig(Protocol):
    """``actor_rollout_ref.rollout``."""

    @property
    def temperature(self) -> float: ...

    @property
    def seed(self) -> int: ...


class PolicyConfig(Protocol):
    """``actor_rollout_ref``."""

    @property
    def rollout(self) -> SamplingConfig: ...


class MethodConfig(Protocol):
    """The whole configuration."""

    @property
    def algorithm(self) -> AlgorithmConfig: ...

    @property
    def actor_rollout_ref(self) -> PolicyConfig: ...
