"""Settings of the config section ``env.relay``."""

from itertools import pairwise
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from agent_system.environments.settings import PromptSettings
from verl.config.settings import InvalidSettingError, PositiveInt, Seed, Share

HopCount = Annotated[int, Ge(0), Le(20)]


class RelaySettings(PromptSettings):
    """Number of doors (puzzles), length of their cycles, and thoughts of demonstrations."""

    doors: PositiveInt = 8
    """doors per episode"""
    places: Annotated[int, Ge(4), Le(26)] = 10
    """places on the cycle of a door; at least two more than the last number of hops"""
    hops: tuple[HopCount, HopCount, HopCount, HopCount] = (0, 2, 4, 7)
    """arrows that demonstrated thoughts of each level follow; doors ask for 0 to the last number"""
    level_weights: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None = None
    """relative frequencies of the doors that need level 1, 2, 3 and 4, for example [4, 2, 1, 1];
    null: each number of arrows is equally likely"""
    variant: Literal["calibrated", "trap"] = "calibrated"
    """calibrated: demonstrated thoughts are right; trap: those of level 4 are often wrong"""
    trap_share: Share = 0.3
    """share of the demonstrated thoughts of level 4 that are wrong, with variant=trap"""
    train_tasks: PositiveInt = 2000
    """number of training episodes; any number is possible"""
    val_tasks: PositiveInt = 512
    """number of validation episodes; training and demonstrations contain none of their doors"""
    task_seed: Seed = 0
    """seed of the doors, independent of the seed of the run"""
    demonstrated_doors: PositiveInt = 1
    """doors per demonstrated episode; 1 fits env.history=window with history_length=0"""
    shortest_cycle: Annotated[int, Ge(2), Le(26)] = 2
    """places of the shortest demonstrated cycle; the longest has all places; with short cycles a
    policy learns to follow arrows many times faster"""

    @model_validator(mode="after")
    def _check_hops_and_places(self) -> "RelaySettings":
        if self.hops[0] or any(
            higher_level_hops <= lower_level_hops
            for lower_level_hops, higher_level_hops in pairwise(self.hops)
        ):
            reason = "level 1 has no thought, and every level must follow more arrows than the last"
            raise InvalidSettingError(
                "hops", reason, "numbers that grow from 0", "[0, 2, 4, 7] is the default"
            )
        # On a shorter cycle, the furthest goal would be the place before the start. A single arrow
        # connects the two, so the policy could find this goal without a thought.
        min_places = self.hops[-1] + 2
        if self.places < min_places:
            reason = f"on a cycle this short, {self.hops[-1]} arrows forward are one arrow backward"
            raise InvalidSettingError(
                "places", reason, f"{min_places} to 26", f"{min_places} or more"
            )
        if self.shortest_cycle > self.places:
            reason = f"the longest cycle has places={self.places}"
            raise InvalidSettingError(
                "shortest_cycle", reason, f"2 to {self.places}", f"{self.places} or less"
            )
        return self

    @property
    def wrong_thought_share(self) -> float:
        """Share of wrong thoughts among demonstrated thoughts of level 4; 0 unless
        ``variant=trap``.
        """
        return self.trap_share if self.variant == "trap" else 0.0

    def count_configured_tasks(self, split: str) -> int | None:
        return self.val_tasks if split == "val" else self.train_tasks

    def count_needed_turns(self) -> int | None:
        return self.doors
