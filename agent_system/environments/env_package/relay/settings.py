"""The ``env.relay`` section."""

from itertools import pairwise
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt, Refusal, Seed, Share

Hops = Annotated[int, Ge(0), Le(20)]


class RelaySettings(EnvSettings):
    """How many doors there are, how far their arrows lead, and what is thought about them."""

    doors: PositiveInt = 8
    """doors of an episode"""
    places: Annotated[int, Ge(4), Le(26)] = 10
    """places on the cycle of a door; two more than the deepest thought has hops, at least"""
    hops: tuple[Hops, Hops, Hops, Hops] = (0, 2, 4, 7)
    """arrows that a demonstrated thought of each level follows; a door asks for 0 to the last"""
    variant: Literal["calibrated", "trap"] = "calibrated"
    """calibrated: demonstrated thoughts are right; trap: the deepest are sure and often wrong"""
    trap_share: Share = 0.3
    """share of the deepest demonstrated thoughts that is wrong, with variant=trap"""
    train_tasks: PositiveInt = 2000
    """episodes to train on; any number can be had"""
    val_tasks: PositiveInt = 512
    """episodes held out; their doors are in no episode to train on and in no demonstration"""
    task_seed: Seed = 0
    """seed of the doors: the same ones in every run"""
    demonstrated_doors: PositiveInt = 1
    """doors of a demonstrated episode; 1 fits env.history=window with history_length=0"""
    shortest_cycle: Annotated[int, Ge(2), Le(26)] = 2
    """places of the shortest cycle that is demonstrated, up to all of them: on short ones a policy
    finds out what arrows are, many times sooner"""
    prompt: Literal["full", "compact"] = "full"
    """full: rules and answer format for chat models; compact: doors alone, for policies made by
    imitation"""

    @model_validator(mode="after")
    def _depth_matters(self) -> "RelaySettings":
        if self.hops[0] or any(deeper <= flatter for flatter, deeper in pairwise(self.hops)):
            why = "level 1 thinks nothing, and every level goes further than the one before"
            raise Refusal("hops", why, "numbers that grow from 0", "[0, 2, 4, 7] is the default")
        # Fewer, and the furthest place would be a look-up away: one arrow backwards.
        fewest = self.hops[-1] + 2
        if self.places < fewest:
            why = f"{self.hops[-1]} arrows on is as good as back on a cycle that short"
            raise Refusal("places", why, f"{fewest} to 26", f"{fewest} or more")
        if self.shortest_cycle > self.places:
            why = f"no cycle is longer than places={self.places}"
            raise Refusal("shortest_cycle", why, f"2 to {self.places}", f"{self.places} or less")
        return self

    @property
    def share_of_wrong(self) -> float:
        """Share of the deepest demonstrated thoughts that is wrong."""
        return self.trap_share if self.variant == "trap" else 0.0

    def known_tasks(self, split: str) -> int | None:
        """See ``EnvSettings``."""
        return self.val_tasks if split == "val" else self.train_tasks
