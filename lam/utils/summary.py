"""`summary`: mean and standard deviation of metrics over seeds."""

import math
import statistics
from collections.abc import Mapping
from typing import Any


def summary(metrics: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """`n`, `mean` and `std` (by n − 1; empty for one seed) of every metric, and `undefined`, the seeds by metric.

    A metric that is undefined or infinite for a seed has no mean and no deviation: other seeds may be the easier ones.
    Of the metrics by seed, only numbers and None count.

    Example:
        >>> summary({0: {"ece": 0.1, "auroc": None}, 1: {"ece": 0.3, "auroc": 0.9}})
        {'n': 2, 'mean': {'ece': 0.2}, 'std': {'ece': 0.141...}, 'undefined': {'auroc': [0]}}
    """
    names = dict.fromkeys(
        name for row in metrics.values() for name, value in row.items() if isinstance(value, int | float | None)
    )
    undefined = {
        name: [seed for seed, row in metrics.items() if (value := row.get(name)) is None or not math.isfinite(value)]
        for name in names
    }
    known = {name: [row[name] for row in metrics.values()] for name in names if not undefined[name]}
    return {
        "n": len(metrics),
        "mean": {name: statistics.fmean(values) for name, values in known.items()},
        "std": {name: statistics.stdev(values) for name, values in known.items()} if len(metrics) > 1 else {},
        "undefined": {name: seeds for name, seeds in undefined.items() if seeds},
    }
