"""Speed, as ratios measured side by side in one run, with their spread."""

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> dict[str, float]:
    """Smallest, median and largest, to three places."""
    return {name: round(of(values), 3) for name, of in (("min", min), ("median", statistics.median), ("max", max))}
