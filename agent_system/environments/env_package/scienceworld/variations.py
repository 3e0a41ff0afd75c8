"""Numbers of variations of each kind of experiment, and their splits, without Java."""

# Copied from the simulator, because tasks are listed before a JVM runs. A test compares them with
# the simulator.
VARIATIONS = {
    "boil": 30,
    "change-the-state-of-matter-of": 30,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "find-animal": 300,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "freeze": 30,
    "grow-fruit": 126,
    "grow-plant": 126,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "lifespan-longest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "lifespan-shortest-lived": 125,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "melt": 30,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "use-thermometer": 540,
}


def split_variations(name: str, part: str) -> range:
    """Return the variations of experiment ``name`` in ``part`` (``train``, ``dev`` or ``test``)."""
    count = VARIATIONS[name]
    quarter = count // 4
    # Use the simulator's consecutive ranges instead of a hash, so that results are comparable with
    # published ones. The remainder of the division by four goes to ``test``.
    bounds_by_part = {
        "train": (0, 2 * quarter),
        "dev": (2 * quarter, 3 * quarter),
        "test": (3 * quarter, count),
    }
    return range(*bounds_by_part[part])
