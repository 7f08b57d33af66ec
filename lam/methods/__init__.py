"""One file a system: how it trains, and the encoder that it hands back. `find` gives one by its name.

Every one of them offers `train(network, dataset, *, loss, epochs, options, pretrained, seed, stage, **training)`; one
that does not take every network also `check_network(network)`, which refuses the others before any work.
"""

from importlib import import_module
from typing import Any, Literal, get_args

MethodName = Literal[
    "deterministic",
    "norm",
    "knn_distance",
    "mc_dropout",
    "deep_ensemble",
    "pfe",
    "hib",
    "laplace_posthoc",
    "laplace_online",
]


def find(name: MethodName) -> Any:
    """Import a method.

    Raises:
        ValueError: for a name that is none.

    Example:
        >>> find("deterministic").train.__name__
        'train'
    """
    if name not in get_args(MethodName):
        raise ValueError(f"method must be one of {', '.join(get_args(MethodName))}, got {name!r}")
    return import_module(f"lam.methods.{name}")
