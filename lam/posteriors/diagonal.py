"""`LastLayerPosterior`: a Gaussian over the weights of the last layer, and what it predicts.

Features in, embeddings out; nothing here knows how features are made. Encoders are in `lam.encoders.bayesian`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians.batch import check_features
from lam.hessians.diagonal import Diagonal
from lam.utils.autocast import without_autocast
from lam.vmf.embeddings import Embeddings, Mean

Mode = Literal["marginal", "network"]
MODES: tuple[str, ...] = get_args(Mode)
MEANS: tuple[str, ...] = get_args(Mean)

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps features (N, P), their outputs (N, D) and variances (N, D) to sampled outputs (S, N, D)."""

Predictor = Callable[..., Embeddings]
"""Maps features (N, P) and, where it is at hand, the network's output (N, D) to embeddings."""

LEAST_VARIANCE = 1e-20
"""Noise of this variance, in units of the output's length, is far below any posterior's; an output of length zero gets
it as it is, so that its samples have random directions."""

CHUNK_ELEMENTS = 1 << 22
"""How many float64 sample coordinates are held at once."""


@dataclass(frozen=True)
class LastLayerPosterior:
    """q(θ) = N(θ*, diag(1/(s·relu(h) + α))) over weight and bias of a linear layer.

    Source: Warburg et al. (2023), equation 3, with the likelihood scale s of a per-type average of the pairs.

    Attributes:
        weight: (D, P) the trained weight, the mean.
        bias: (D,) the trained bias, or None.
        curvature: the diagonal GGN, whose h this uses.
        n_items: how many items the curvature was formed over.
        prior_precision: α > 0.
        likelihood_scale: s > 0, or None for the untuned default, n_items squared.
        seed: of the noise that every prediction shares.
    """

    weight: Float[Tensor, "D P"]
    bias: Float[Tensor, " D"] | None
    curvature: Diagonal
    n_items: int
    prior_precision: float = 1.0
    likelihood_scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prior_precision", "likelihood_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.n_items < 1:
            raise ValueError(f"n_items must be at least 1, got {self.n_items}")
        for name, h in (("weight", self.curvature.weight), ("bias", self.curvature.bias)):
            if h is not None and not h.isfinite().all():
                raise ValueError(f"the curvature of the {name} is not finite: the features are too large or damaged")

    @property
    def scale(self) -> float:
        """The likelihood scale s in force."""
        return float(self.n_items) ** 2 if self.likelihood_scale is None else self.likelihood_scale

    @cached_property
    def variance(self) -> tuple[Float[Tensor, "D P"], Float[Tensor, " D"] | None]:
        """The variances 1/(s·relu(h) + α) of weight and bias, in the type of the weight."""
        weight, bias = self.curvature.relu()
        return self._variance(weight), None if bias is None else self._variance(bias)

    def clipped_variance_share(self, features: Float[Tensor, "N P"]) -> float:
        """Give the share of the predictive variance of N items that is due to weights with a negative curvature.

        Clipped to zero, they keep the prior's variance, which no likelihood scale changes.
        """
        h, variance = self.curvature.weight, self.variance[0]
        contributions = features.to(variance.dtype).square().mean(0) * variance
        return float(contributions[h < 0].sum() / contributions.sum().clamp(min=torch.finfo(variance.dtype).tiny))

    def sample(
        self, n_samples: int, *, generator: torch.Generator | None = None
    ) -> tuple[Float[Tensor, "S D P"], Float[Tensor, "S D"] | None]:
        """Draw whole last layers.

        Args:
            n_samples: S ≥ 1.
            generator: by default one seeded with the posterior's own seed, the same on every device.

        Returns:
            (S, D, P) weights and (S, D) biases, or None.
        """
        _check_samples(n_samples, least=1)
        generator = self._generator() if generator is None else generator
        variance, bias_variance = self.variance
        weight = _draw(self.weight, variance, n_samples, generator)
        if self.bias is None or bias_variance is None:
            return weight, None
        return weight, _draw(self.bias, bias_variance, n_samples, generator)

    def predict(
        self,
        features: Float[Tensor, "N P"],
        *,
        n_samples: int = 32,
        mode: Mode = "marginal",
        mean: Mean = "network",
        return_samples: bool = False,
    ) -> Embeddings:
        """Turn features into embeddings that know how sure they are.

        Marginally f | φ ~ N(Wφ + b, diag(v)), v_i = Σ_j φ_j² σ²_ij + σ²_bi. `marginal` draws S of these directly, with
        the same noise for every input: exact for anything about one input, and the same for an item alone or in any
        batch. `network` draws S whole layers, so that samples are consistent across inputs.

        Args:
            features: (N, P) what enters the layer.
            n_samples: S ≥ 2.
            mode: `marginal` or `network`.
            mean: `network` for the trained layer's own direction, f/‖f‖, which the samples do not change; or `sampled`
                for the mean direction of the samples, as in the paper, which depends on S.
            return_samples: keep the (S, N, D) samples.

        Returns:
            Direction, κ (Sra 2012, of the unbiased mean resultant length), and variance before normalisation.

        Raises:
            ValueError: for features of another width or not finite, fewer than 2 samples, or an unknown mode or mean.
        """
        return self.predictor(n_samples=n_samples, mode=mode, mean=mean, return_samples=return_samples)(features)

    def predictor(
        self, *, n_samples: int = 32, mode: Mode = "marginal", mean: Mean = "network", return_samples: bool = False
    ) -> Predictor:
        """Give `predict` with its noise drawn once, for many batches.

        It may be given the network's output beside the features, whose directions are then retrieved to the bit, where
        the layer's own output computed anew could differ in the last.
        """
        compute = self.unchecked_predictor(n_samples=n_samples, mode=mode, mean=mean, return_samples=return_samples)
        rows = max(1, CHUNK_ELEMENTS // (n_samples * len(self.weight)))

        @without_autocast()
        def predict(features: Tensor, output: Tensor | None = None) -> Embeddings:
            check_features(features, self.weight)
            output = self._output(features) if output is None else output
            parts = zip(features.split(rows), output.split(rows), strict=True)
            return Embeddings.concatenate([compute(*part) for part in parts])

        return predict

    def unchecked_predictor(
        self, *, n_samples: int, mode: Mode = "marginal", mean: Mean = "network", return_samples: bool = False
    ) -> Predictor:
        """Give `predictor` without a look at the features, all at once: what a program can be traced from."""
        _check_samples(n_samples, least=2)
        for name, value, allowed in (("mode", mode, MODES), ("mean", mean, MEANS)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        variance, bias_variance = self.variance
        draw = self._marginal_draw(n_samples) if mode == "marginal" else self._network_draw(n_samples)

        @without_autocast()
        def compute(features: Tensor, output: Tensor | None = None) -> Embeddings:
            features = features.to(self.weight.dtype)
            f = self._output(features)
            v = F.linear(features.square(), variance, bias_variance)
            own = F.normalize((f if output is None else output).to(f)) if mean == "network" else None
            samples = F.normalize(draw(features, f, v), dim=-1)
            return Embeddings.from_samples(samples, v.sum(1), mean=own, keep=return_samples)

        return compute

    def sampled_embeddings(
        self, features: Float[Tensor, "N P"], *, n_samples: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "S N D"]:
        """Embed under S sampled networks, each the same for all inputs: (S, N, D) unit vectors."""
        return self.joint_predictor(n_samples=n_samples, generator=generator)(features)

    def joint_predictor(
        self, *, n_samples: int, generator: torch.Generator | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Give `sampled_embeddings` with its networks drawn once, for many batches."""
        weights, biases = self.sample(n_samples, generator=generator)

        @without_autocast()
        def draw(features: Tensor) -> Tensor:
            sampled = torch.einsum("np,sdp->snd", features.to(weights.dtype), weights)
            return F.normalize(sampled if biases is None else sampled + biases[:, None], dim=-1)

        return draw

    def log_marginal_likelihood(self, prior_precision: float) -> float:
        """Give the Laplace evidence as a function of α at the given s, up to a constant.

        −½ Σ log(s·relu(h) + α) + ½ n log α − ½ α ‖θ*‖². The loss at θ* does not depend on α. For the dependence on s
        the normalisers of the loss's von Mises-Fisher terms would be needed.

        Source: MacKay (1992); Daxberger et al. (2021), laplace-torch.
        """
        weight, bias = self.curvature.relu()
        h = torch.cat([part.double().flatten() for part in (weight, bias) if part is not None])
        theta = torch.cat([part.double().flatten() for part in (self.weight, self.bias) if part is not None])
        alpha = prior_precision
        fit = (self.scale * h + alpha).log().sum() - len(h) * math.log(alpha) + alpha * theta.square().sum()
        return -0.5 * float(fit)

    def with_best_prior(self) -> "LastLayerPosterior":
        """Maximise `log_marginal_likelihood` over α in [1e-8, 1e8], by Brent's method on log α."""
        from scipy.optimize import minimize_scalar

        best: Any = minimize_scalar(
            lambda log_alpha: -self.log_marginal_likelihood(10.0**log_alpha), bounds=(-8, 8), method="bounded"
        )
        return replace(self, prior_precision=float(10.0**best.x))

    def with_prior_step(self, rate: float) -> "LastLayerPosterior":
        """Move log α by `rate` in the direction in which `log_marginal_likelihood` rises: the first step of Adam."""
        weight, bias = self.curvature.relu()
        alpha, slope = self.prior_precision, 0.0
        for h, theta in ((weight, self.weight), (bias, self.bias)):
            if h is not None and theta is not None:
                shrinkage = 1 - alpha / (self.scale * h.double() + alpha)
                slope += float(shrinkage.sum() - alpha * theta.double().square().sum())
        return replace(self, prior_precision=alpha * math.exp(math.copysign(rate, slope)))

    def to(self, device: torch.device | str) -> "LastLayerPosterior":
        """Move weights and curvature to a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias, curvature=self.curvature.to(device))

    def __add__(self, other: "LastLayerPosterior") -> "LastLayerPosterior":
        return self._combined(other, 1)

    def __sub__(self, other: "LastLayerPosterior") -> "LastLayerPosterior":
        return self._combined(other, -1)

    def _combined(self, other: "LastLayerPosterior", sign: int) -> "LastLayerPosterior":
        same_bias = (self.bias is None) == (other.bias is None) and (
            self.bias is None or other.bias is None or torch.equal(self.bias, other.bias)
        )
        if not (same_bias and torch.equal(self.weight, other.weight)):
            raise ValueError("only posteriors of the same trained layer add up: their weights differ")
        settings = [(found.prior_precision, found.likelihood_scale, found.seed) for found in (self, other)]
        if settings[0] != settings[1]:
            raise ValueError(
                "only posteriors with the same prior precision, likelihood scale and seed add up, "
                f"got {settings[0]} and {settings[1]}: add first, then tune"
            )
        curvature = self.curvature + other.curvature if sign > 0 else self.curvature - other.curvature
        return replace(self, curvature=curvature, n_items=self.n_items + sign * other.n_items)

    def _output(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)

    def _marginal_draw(self, n_samples: int) -> Draw:
        shape = (n_samples, 1, len(self.weight))
        noise = torch.randn(shape, generator=self._generator(), dtype=torch.float64).to(self.weight.device)

        def draw(features: Tensor, f: Tensor, v: Tensor) -> Tensor:
            square = f.double().square().sum(1, keepdim=True)
            least = LEAST_VARIANCE * square.where(square > 0, 1)
            return f.double() + torch.maximum(v.double(), least).sqrt() * noise

        return draw

    def _network_draw(self, n_samples: int) -> Draw:
        weights, biases = self.sample(n_samples)

        def draw(features: Tensor, f: Tensor, v: Tensor) -> Tensor:
            sampled = torch.einsum("np,sdp->snd", features, weights)
            return (sampled if biases is None else sampled + biases[:, None]).double()

        return draw

    def _variance(self, h: Tensor) -> Tensor:
        return (self.scale * h.double() + self.prior_precision).reciprocal().to(self.weight.dtype)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)  # on the CPU, so that every device sees the same noise


def _draw(mean: Tensor, variance: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(n_samples, *mean.shape, generator=generator, device=generator.device, dtype=mean.dtype)
    return noise.to(mean.device).mul_(variance.sqrt()).add_(mean)


def _check_samples(n_samples: int, least: int) -> None:
    if n_samples < least:
        raise ValueError(f"n_samples must be at least {least}, got {n_samples}")
