"""`Posterior`: a Gaussian over the weights of a linear last layer, which turns features into embeddings."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians import Structure
from lam.hessians.last_layer import check_features
from lam.hessians.structures.base import split_bias
from lam.posteriors.settings import LEAST_PRIOR, PRIOR_RATIO, check_settings
from lam.posteriors.spread import Spread, least_variance
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_choice
from lam.vmf.embeddings import Embeddings, Mean, mean_resultant_length

Mode = Literal["marginal", "network"]

Sampler = Callable[[Any], tuple[Tensor, Any, Tensor]]
"""Maps features (N, P) to outputs (N, D), their samples (S, N, D) or the samples' `MeanResultant`, and the total
variance (N,) of each output."""

Sampled = tuple[Float[Tensor, "S D P"], Float[Tensor, "S D"] | None]
"""Weights and biases of S layers."""

Noise = Iterable[Tensor]
"""Standard normal tensors (S, ...) for S sampled networks; may be iterated over more than once."""

Predictor = Callable[..., Embeddings]
"""Maps features (N, P) and optionally the network's output (N, D) to embeddings."""

CHUNK_ELEMENTS = 1 << 22  # greatest number of float64 coordinates of samples in memory at once
Same = TypeVar("Same", bound="Posterior")  # the type checks of test runs reject typing.Self

_SETTINGS = ("n_items", "prior_precision", "prior_ratio", "likelihood_scale", "seed")


@dataclass(frozen=True)
class Posterior(ABC):
    """A Gaussian q(θ) = N(θ*, Σ) over weight and bias of a linear layer, with precision Σ⁻¹ = s relu(h) + α.

    relu sets negative entries or eigenvalues of h to zero. Each subclass takes its own structure of `lam.hessians` as
    `curvature`. Arguments `features` are the layer's inputs φ; for a `LayersPosterior`, the network's inputs.

    Attributes:
        weight: (D, P) the trained weight. Weight and bias are the mean θ*.
        bias: (D,) the trained bias, or None.
        curvature: curvature h of the loss over the data.
        n_items: number of items in the curvature.
        prior_precision: α > 0. None means `prior_ratio` times the mean eigenvalue of s relu(h); s then scales the
            covariance and does not change its shape.
        likelihood_scale: s > 0; None chooses the default, see `scale`.
        seed: seed of the noise that all predictions share.
        prior_ratio: see `prior_precision`.
    """

    structure: ClassVar[type[Structure]]
    _alike: ClassVar[tuple[str, ...]] = ("prior_precision", "prior_ratio", "seed")

    weight: Float[Tensor, "D P"] = field(repr=False)
    bias: Float[Tensor, " D"] | None = field(repr=False)
    curvature: Any = field(repr=False)
    n_items: int
    prior_precision: float | None = 1.0
    likelihood_scale: float | None = None
    seed: int = 0
    prior_ratio: float = PRIOR_RATIO

    def __post_init__(self) -> None:
        check_settings(self.prior_precision, self.likelihood_scale, prior_ratio=self.prior_ratio, seed=self.seed)
        check_at_least("n_items", self.n_items, 1)
        self.curvature.check_finite()
        object.__setattr__(self, "seed", operator.index(self.seed))  # torch rejects NumPy integers

    @cached_property
    def scale(self) -> float:
        """The likelihood scale s in use, by default `n_items`² for a curvature that averages over pairs, else 1.

        Without `prior_precision`, the default s is raised until α is at least 1 / mean square of the weights.
        If the curvature is small, the prior would otherwise spread wider than the trained weights.
        """
        if self.likelihood_scale is not None:
            return self.likelihood_scale
        untuned, level = float(self.n_items) ** 2 if self.curvature.curvature.average else 1.0, self.curvature.level
        if self.prior_precision is not None or not level:
            return untuned
        return max(untuned, self._least_alpha / (self.prior_ratio * level))

    @cached_property
    def alpha(self) -> float:
        """The prior precision α in use. Without positive curvature, the default is 1 / mean square of the weights."""
        if self.prior_precision is not None:
            return self.prior_precision
        level = self.curvature.level
        return max(self.prior_ratio * self.scale * level, LEAST_PRIOR) if level else self._least_alpha

    @property
    def _least_alpha(self) -> float:
        mean_square = float(self.theta.double().square().mean())
        return 1 / mean_square if mean_square else 1.0

    def sample(self, n_samples: int, *, generator: torch.Generator | None = None) -> Any:
        """Random last layers: weights (S, D, P), and biases (S, D) or None; arguments as in `noise`."""
        return self.layers_from(self.noise(n_samples, generator=generator))

    def noise(self, n_samples: int, *, generator: torch.Generator | None = None) -> Noise:
        """Noise for random last layers. It does not depend on likelihood scale and prior precision.

        Args:
            n_samples: S ≥ 1.
            generator: by default a generator on the CPU with the posterior's seed.
        """
        return list(self._normal(n_samples, [self.theta.shape], generator, self.weight.dtype))

    @abstractmethod
    def layers_from(self, noise: Noise) -> Sampled:
        """Random last layers from `noise`."""

    @abstractmethod
    def output_spread(self) -> Callable[[Tensor], Spread]:
        """A function from features (N, P) to the covariances of their outputs."""

    @abstractmethod
    def variance_along(self, slopes: Float[Tensor, "K N D"], inputs: Float[Tensor, "K N F"]) -> Float[Tensor, " N"]:
        """Variance of Σ_k g_kᵀ θ φ_k under the posterior, for `slopes` g_k and `inputs` φ_k of the layer, float64."""

    def log_det_precision(self, prior_precision: float) -> float:
        """log det(s relu(h) + α) for this α."""
        return float((self.scale * self.curvature.spectrum.relu() + prior_precision).log().sum())

    @abstractmethod
    def clipped_variance_share(self, features: Any) -> float:
        """Share of the predictive variance of N items from weight directions with negative curvature h.

        In these directions h is set to zero, so only the prior determines the variance.
        """

    @property
    def elements_per_item(self) -> int:
        """Number of tensor elements that `output_spread` needs for each item, besides its features."""
        return len(self.weight)

    @property
    def theta(self) -> Float[Tensor, "D F"]:
        """The weight, with the bias as its last column."""
        return self.weight if self.bias is None else torch.cat([self.weight, self.bias[:, None]], 1)

    def log_marginal_likelihood(self, prior_precision: float) -> float:
        """Log evidence of the Laplace approximation as a function of the prior precision α, up to a term without α.

        The result is −½ log det(s relu(h) + α) + ½ n log α − ½ α ‖θ*‖² for n weights.

        Source: MacKay (1992); Daxberger et al. (2021), laplace-torch.
        """
        theta, alpha = self.theta.double(), prior_precision
        prior = theta.numel() * math.log(alpha) - alpha * float(theta.square().sum())
        return 0.5 * (prior - self.log_det_precision(alpha))

    def predict(self, features: Any, **options: Any) -> Embeddings:
        """Embeddings of features (N, P) with their uncertainty; options as `predictor`."""
        return self.predictor(**options)(features)

    def predictor(
        self, *, n_samples: int = 32, mode: Mode = "marginal", mean: Mean = "network", checked: bool = True
    ) -> Predictor:
        """A function from features to embeddings; all its calls use the same noise.

        The output of an item with features φ is distributed as N(Wφ + b, C), with C from `output_spread`. `marginal`
        draws S outputs of each item from this distribution. `network` draws S layers; sample s of every item comes from
        layer s.

        As a second argument, the function takes the network's output and returns exactly its direction. Without it, the
        function computes the output again, and the direction may differ in the last bit.

        Args:
            n_samples: S ≥ 2.
            mode: `marginal` or `network`.
            mean: `network` for the direction f/‖f‖ of the trained layer's output f; or `sampled` for the mean direction
                of the S samples, as in Warburg et al. (2023).
            checked: whether the function checks features and splits batches; an exported program does neither.

        Returns:
            A function that returns `Embeddings`, with κ from the unbiased mean resultant length (Sra 2012). It raises a
            `ValueError` for features of another width, or not finite.

        Raises:
            ValueError: for fewer than 2 samples, or an unknown mode or mean.
        """
        check_at_least("n_samples", n_samples, 2)
        check_choice("mode", mode, get_args(Mode))
        check_choice("mean", mean, get_args(Mean))
        draw = self._sampler(n_samples, marginal=mode == "marginal")

        @without_autocast()
        def compute(features: Any, output: Tensor | None = None) -> Embeddings:
            f, samples, variance = draw(features)
            direction = F.normalize((f if output is None else output).to(f)) if mean == "network" else None
            if isinstance(samples, Tensor):
                samples = mean_resultant_length(F.normalize(samples, dim=-1), unbiased=True)
            return Embeddings.from_resultant(samples, variance.to(f), mean=direction, n_samples=n_samples)

        @without_autocast()
        def predict(features: Any, output: Tensor | None = None) -> Embeddings:
            return Embeddings.concatenate([compute(*part) for part in self._parts(features, output, n_samples)])

        return predict if checked else compute

    def sampled_embeddings(self, features: Any, *, n_samples: int) -> Float[Tensor, "S N D"]:
        """(S, N, D) unit vectors: the embeddings of all items by each of S sampled networks."""
        return self.joint_predictor(self.noise(n_samples))(features)

    def joint_predictor(self, noise: Noise) -> Callable[[Any], Float[Tensor, "S N D"]]:
        """A function from features to the `sampled_embeddings` of the networks that `noise` determines."""
        draw = self._network_outputs(noise)

        @without_autocast()
        def sampled(features: Tensor) -> Tensor:
            return F.normalize(draw(features), dim=-1)

        return sampled

    @without_autocast()
    def cosine_variance(
        self, queries: Float[Tensor, "N P"], hits: Float[Tensor, "_ P"]
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Cosine of each query and its hit, and the variance of this cosine under the posterior.

        The same random weights embed query and hit. Their outputs f(φ) and f(ψ) have directions n and m, with the
        cosine c = nᵀm. To first order in the weights, c has the variance uᵀ Σ u with u = g ⊗ φ + g' ⊗ ψ and the
        posterior's covariance Σ. The derivatives of c with respect to the two outputs are g = (m − c n)/‖f(φ)‖ and
        g' = (n − c m)/‖f(ψ)‖.

        Args:
            queries: (N, P) features φ.
            hits: (N, P) features ψ of one hit for each query.

        Returns:
            (N,) cosines and (N,) variances, float64.

        Raises:
            ValueError: for features of another width or number, or that are not finite.
        """
        if queries.shape != hits.shape:
            raise ValueError(
                f"each query needs the features of one hit, got shapes {tuple(queries.shape)} and {tuple(hits.shape)}"
            )
        inputs = []
        for features in (queries, hits):
            check_features(features, self.weight)
            inputs.append(self._inputs(features.to(self.weight.dtype)))
        outputs = torch.stack([self.outputs(features) for features in (queries, hits)]).double()
        lengths, units = outputs.norm(dim=2, keepdim=True), F.normalize(outputs, dim=2)
        cosines = units.prod(0).sum(1).clamp(-1, 1)
        # Squares of 1e100 are finite, so the variance for an output of length zero is large instead of NaN.
        slopes = (units.flip(0) - cosines[:, None] * units) / lengths.clamp(min=1e-100)
        return cosines, self.variance_along(slopes, torch.stack(inputs))

    @without_autocast()
    def outputs(self, features: Any) -> Float[Tensor, "N D"]:
        """Outputs Wφ + b of the trained layer."""
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)

    def with_best_prior(self: Same) -> Same:
        """The posterior with the α in [1e-8, 1e8] that maximises `log_marginal_likelihood`, by Brent's method."""
        from scipy.optimize import minimize_scalar

        best: Any = minimize_scalar(
            lambda log_alpha: -self.log_marginal_likelihood(10.0**log_alpha), bounds=(-8, 8), method="bounded"
        )
        return self._with_prior(float(10.0**best.x))

    def with_prior_step(self: Same, rate: float) -> Same:
        """The posterior after a step of size `rate` in log α towards a greater `log_marginal_likelihood`."""
        alpha, apart, evidence = self.alpha, 1e-4, self.log_marginal_likelihood
        rise = evidence(alpha * math.exp(apart)) - evidence(alpha * math.exp(-apart))
        return self._with_prior(alpha * math.exp(math.copysign(rate, rise)))

    def _with_prior(self: Same, prior_precision: float) -> Same:
        """The posterior with this α and the same s; a fixed α alone would change the default s."""
        return replace(self, prior_precision=prior_precision, likelihood_scale=self.scale)

    def to(self: Same, device: torch.device | str) -> Same:
        """The posterior with weights and curvature on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias, curvature=self.curvature.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Weight, bias and curvature, by name."""
        tensors = {"weight": self.weight, **self.curvature.tensors()}
        return tensors if self.bias is None else {**tensors, "bias": self.bias}

    def settings(self) -> dict[str, Any]:
        """All fields that are not tensors, as JSON."""
        return {**{name: getattr(self, name) for name in _SETTINGS}, "curvature": self.curvature.settings()}

    @classmethod
    def restored(cls: type[Same], tensors: Mapping[str, Tensor], settings: Mapping[str, Any], **further: Any) -> Same:
        """The posterior with these `tensors`, `settings` and further fields."""
        curvature = cls.structure.restored(tensors, settings["curvature"])
        if getattr(curvature, "has_bias", "bias" in tensors) != ("bias" in tensors):
            raise ValueError("the curvature and the weights must both have a bias, or neither")
        fields = {name: settings[name] for name in _SETTINGS}
        return cls(tensors["weight"], tensors.get("bias"), curvature, **fields, **further)

    def __add__(self: Same, other: Same) -> Same:
        return self._joined(other, operator.add)

    def __sub__(self: Same, other: Same) -> Same:
        return self._joined(other, operator.sub)

    def _joined(self: Same, other: Same, join: Callable[[Any, Any], Any]) -> Same:
        """The posterior of the joined curvature; if the likelihood scales differ, the default replaces them."""
        if not (torch.equal(self.weight, other.weight) and torch.equal(self.theta, other.theta)):
            raise ValueError("only posteriors of the same trained weights add up: these differ")
        one, another = ({name: getattr(term, name, None) for name in self._alike} for term in (self, other))
        if one != another:
            raise ValueError(
                f"only posteriors with the same settings add up, got {one} and {another}: fit both with the same "
                "options and seed, and tune their sum"
            )
        scale = self.likelihood_scale if self.likelihood_scale == other.likelihood_scale else None
        curvature, n_items = join(self.curvature, other.curvature), join(self.n_items, other.n_items)
        return replace(self, curvature=curvature, n_items=n_items, likelihood_scale=scale)

    def _parts(self, features: Any, output: Tensor | None, n_samples: int) -> Iterable[tuple[Any, Tensor | None]]:
        """Checked features and outputs, in parts that limit the memory of a prediction."""
        check_features(features, self.weight)
        rows = max(1, CHUNK_ELEMENTS // max(n_samples * len(self.weight), self.elements_per_item))
        if len(features) <= rows:
            return [(features, output)]
        output = self.outputs(features) if output is None else output  # products of parts would round differently
        return zip(features.split(rows), output.split(rows), strict=True)

    def _sampler(self, n_samples: int, *, marginal: bool) -> Sampler:
        spread, noise = self.output_spread(), self._output_noise(n_samples)
        draw = None if marginal else self._network_outputs(self.noise(n_samples))

        def sampled(features: Tensor) -> tuple[Tensor, Any, Tensor]:
            features = features.to(self.weight.dtype)
            f, around = self.outputs(features), spread(features)
            samples = draw(features).double() if draw else around.samples(f, noise, least_variance(f))
            return f, samples, around.total

        return sampled

    def _output_noise(self, n_samples: int) -> Float[Tensor, "S 1 D"]:
        """Standard normal numbers, the same for all items."""
        return next(self._normal(n_samples, [(1, len(self.weight))], None, torch.float64))

    def _network_outputs(self, noise: Noise) -> Callable[[Tensor], Tensor]:
        """A function from features to the outputs (S, N, D) of the layers that `noise` determines."""
        weights, biases = self.layers_from(noise)

        def outputs(features: Tensor) -> Tensor:
            sampled = torch.einsum("np,sdp->snd", features.to(weights.dtype), weights)
            return sampled if biases is None else sampled + biases[:, None]

        return outputs

    def _inputs(self, features: Tensor) -> Tensor:
        return features if self.bias is None else F.pad(features, (0, 1), value=1.0)

    def _layers(self, deviations: Float[Tensor, "S D F"]) -> Sampled:
        return split_bias(self.theta + deviations.to(self.theta), self.bias is not None)

    def _normal(
        self, n_samples: int, shapes: Iterable[Sequence[int]], generator: torch.Generator | None, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Standard normal tensors (S, *shape), one for each shape; by default from the posterior's seed."""
        check_at_least("n_samples", n_samples, 1)
        if generator is None:
            generator = torch.Generator().manual_seed(self.seed)  # on the CPU: every device sees the same noise
        options: Any = {"generator": generator, "device": generator.device, "dtype": dtype}
        return (torch.randn(n_samples, *shape, **options).to(self.weight.device) for shape in shapes)
