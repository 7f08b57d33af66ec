"""Scales that make scores comparable: log odds of ranks, and units of the spread."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_KNOTS = 65
_BULK = 2.0  # spreads of a score from its median


@dataclass(frozen=True)
class RankOdds:
    """log(F/(1 − F)) of a score, with F the share of calibration scores below it; ties count half.

    The function is linear between knots and constant beyond them.

    Attributes:
        values: values of the score at the knots, rising.
        odds: log odds at the knots, rising.
        spread: interquartile range of the score; if 0, the standard deviation; if both are 0, 1.
    """

    values: tuple[float, ...]
    odds: tuple[float, ...]
    spread: float

    def __post_init__(self) -> None:
        check_knots("values", self.values, "odds", self.odds)

    @classmethod
    def of(cls, score: Float[Tensor, " N"]) -> "RankOdds":
        """Learn from N values, with up to 65 knots at evenly spaced log odds."""
        values, counts = score.unique(return_counts=True)
        share = (counts.cumsum(0) - counts / 2) / len(score)
        odds = share.double().logit()
        evenly = torch.linspace(float(odds[0]), float(odds[-1]), _KNOTS, dtype=torch.float64)
        kept = torch.searchsorted(odds, evenly).clamp(max=len(odds) - 1).unique()
        return cls(tuple(values[kept].tolist()), tuple(odds[kept].tolist()), _median_and_spread(score)[1])

    def __call__(self, score: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Log odds of new values, float64 on the CPU."""
        return torch.from_numpy(np.interp(score.double().numpy(), *self._knots))

    @cached_property
    def _knots(self) -> np.ndarray:
        return np.array([self.values, self.odds])


@dataclass(frozen=True)
class ExtendedOdds:
    """`RankOdds` of E scores; ± log(1 + d/spread) is added at a distance d above (+) or below (−) all knots."""

    ranks: tuple[RankOdds, ...]

    def __call__(self, scores: Sequence[Float[Tensor, " N"]]) -> Float[Tensor, "E N"]:
        """Extended log odds of new values, float64 on the CPU."""
        x = torch.stack([score.detach().cpu().double() for score in scores])
        least, greatest, spread = self._ends
        above, below = ((x - greatest) / spread).clamp(min=0), ((least - x) / spread).clamp(min=0)
        inside = torch.stack([rank(values) for rank, values in zip(self.ranks, x, strict=True)])
        return inside + above.log1p() - below.log1p()

    @cached_property
    def _ends(self) -> Float[Tensor, "3 E 1"]:
        ends = [(rank.values[0], rank.values[-1], rank.spread) for rank in self.ranks]
        return torch.tensor(ends, dtype=torch.float64).T[..., None]


@dataclass(frozen=True)
class SoftScale:
    """A score s in units of its spread: z = (s − median)/spread within ±2, and ±(2 + log(1 + |z| − 2)) beyond.

    Attributes:
        median: median of the score.
        spread: interquartile range; if 0, the standard deviation; if both are 0, 1.
    """

    median: float
    spread: float

    @classmethod
    def of(cls, score: Float[Tensor, " N"]) -> "SoftScale":
        """Learn from N values."""
        return cls(*_median_and_spread(score))

    def __call__(self, score: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Scaled new values, float64 on the CPU."""
        return soft((score.detach().cpu().double() - self.median) / self.spread)


def check_knots(name: str, knots: tuple[float, ...], other: str, levels: tuple[float, ...]) -> None:
    """Reject knots and levels that are not finite or not equal in number."""
    if len(knots) != len(levels) or not knots or not all(map(math.isfinite, (*knots, *levels))):
        raise ValueError(f"{name} and {other} must be finite and equal in number, got {knots} and {levels}")


def _median_and_spread(score: Tensor) -> tuple[float, float]:
    """Median, and spread as in `SoftScale`."""
    low, middle, high = score.double().quantile(score.new_tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return middle, (high - low) or float(score.double().std(correction=0)) or 1.0


def soft(z: Tensor) -> Tensor:
    """z within ±2, logarithmic beyond."""
    size = z.abs()
    return z.sign() * torch.where(size > _BULK, _BULK + (size - _BULK).clamp(min=0).log1p(), size)
