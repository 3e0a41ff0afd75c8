"""Successes of a policy that knows nothing: are they more than half of all tasks?"""

import math

SIDE = 2.0  # standard errors: 97.7% from one side


def is_most(successes: int, plays: int, all_tasks: bool) -> bool:
    """Tell whether more than half of all tasks are succeeded at.

    Where the plays were of some tasks only, it has to hold for the lower end of a Wilson interval:
    7 of 8, or 22 of 32.
    """
    if all_tasks or not plays:
        return 2 * successes > plays
    share = successes / plays
    centre = share + SIDE**2 / (2 * plays)
    half = SIDE * math.sqrt(share * (1 - share) / plays + SIDE**2 / (4 * plays**2))
    return (centre - half) / (1 + SIDE**2 / plays) > 0.5
