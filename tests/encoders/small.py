"""A small network, batches for it, and a fit of the two."""

from typing import Any

import torch
from torch import Tensor, nn

import lam

Batches = list[tuple[Tensor, Tensor]]

WIDE = 42
"""From this dimension on, Bessel ratios need no recursion, and the export takes a third of the time."""


def make_network(seed: int = 0, D: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, D))


def make_batches(count: int = 4, N: int = 16, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 6, generator=generator)
    batches = []
    for _ in range(count):
        labels = torch.randint(0, 4, (N,), generator=generator)
        batches.append((centres[labels] + 0.3 * torch.randn(N, 6, generator=generator), labels))
    return batches


def fit(batches: Batches | None = None, D: int = 3, *, preprocessing: Any = None, **settings) -> lam.BayesianEncoder:
    network, batches = make_network(D=D), make_batches() if batches is None else batches
    options = lam.Laplace(**{"margin": 0.7, **settings})
    return lam.fit(network, batches, options, preprocessing=preprocessing, progress=False)


def same_posterior(one: lam.BayesianEncoder, other: lam.BayesianEncoder) -> bool:
    mine, yours = one.posterior, other.posterior
    return (
        torch.equal(mine.weight, yours.weight)
        and torch.equal(mine.curvature.sums, yours.curvature.sums)
        and (mine.curvature.counts, mine.n_items, mine.scale) == (yours.curvature.counts, yours.n_items, yours.scale)
    )
