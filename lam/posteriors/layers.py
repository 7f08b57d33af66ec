"""`LayersPosterior`: a Gaussian over the weights of several layers of a network."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.hessians.accumulate import Accumulator
from lam.hessians.last_layer import check_feature_values, directions
from lam.hessians.structures.base import is_negative
from lam.hessians.structures.layers import LayersDiagonal, LayersKron, flat_weights, jacobian, shape_of, unflat_weights
from lam.models.head import items
from lam.models.layers import head_output, linearised, own_weights, rows_at_once, weighted_layers
from lam.models.modes import evaluating
from lam.models.weights import plain_path
from lam.pairs.pairs import targets_of
from lam.posteriors.base import Noise, Posterior, Sampler
from lam.posteriors.spread import FullSpread, least_variance
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_choice

Predictive = Literal["linearised", "sampled"]
"""`linearised`: outputs of the network, linearised in its weights; `sampled`: outputs of sampled networks."""

Same = TypeVar("Same", bound="LayersPosterior")


@dataclass(frozen=True, kw_only=True)
class LayersAccumulator(Accumulator):
    """Sums up the curvature with respect to the weights of `layers`; the layer `head` computes the outputs."""

    network: nn.Module
    head: str
    layers: Sequence[str]

    @without_autocast()
    def add(self, total: Any, inputs: Any, targets: Any, offset: int) -> Any:
        """As `Accumulator.add`; outputs that are not finite or have length zero also raise a `ValueError`."""
        curvature, where = self.empty.curvature, (self.network, self.head, self.layers)
        f = head_output(self.network, self.head, inputs)
        f = f.to(torch.promote_types(f.dtype, torch.float32))
        check_feature_values(f, offset, name="outputs")
        pairs = self.pairs(targets_of(f, targets), lambda: f)
        n, r = directions(f.to(curvature.working_dtype(f)), f.dtype, offset=offset)
        matrices = curvature.matrices(n, r, pairs)
        for rows in rows_at_once(*where, inputs, jacobians=self.empty.forms_jacobians):
            with evaluating(self.network):
                passes = linearised(*where, items(inputs, rows))[1]
                total = total + self.empty.of_passes(passes, matrices[rows])
        return replace(total, counts=tuple(map(operator.add, total.counts or (), curvature.counts(pairs))))


@dataclass(frozen=True)
class _Redrawn:
    """Noise that is drawn anew, layer by layer, in each iteration, to save memory."""

    draw: Callable[[], Iterator[Tensor]]

    def __iter__(self) -> Iterator[Tensor]:
        return self.draw()


@dataclass(frozen=True)
class LayersPosterior(Posterior):
    """`Posterior` over the weights of several layers; the curvature h is diagonal in a basis for each layer.

    `linearised` predicts with the outputs f + J (θ − θ*), as the curvature assumes: f are the trained network's outputs
    and J is their Jacobian with respect to θ. The outputs have covariance J Σ Jᵀ. `sampled` runs S networks with
    sampled weights.

    Source: Immer, Korzepa and Bauer (2021); Daxberger et al. (2021), laplace-torch.

    Attributes:
        weight, bias: parameters of the head, which computes the outputs; the head need not be one of `layers`.
        network: the network; its weights are the mean θ*.
        head: path of the head in the network.
        layers: paths of the layers.
        predictive: `linearised` or `sampled`.
    """

    structure: ClassVar[Any] = LayersDiagonal
    _alike = (*Posterior._alike, "layers", "predictive")

    network: nn.Module = field(kw_only=True)
    head: str = field(kw_only=True)
    layers: tuple[str, ...] = field(kw_only=True)
    predictive: Predictive = field(default="linearised", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("predictive", self.predictive, get_args(Predictive))

    @property
    def theta(self) -> Float[Tensor, " n"]:
        """The weights of all layers in one vector."""
        return torch.cat([flat_weights(*layer) for layer in self._modules.values()])

    @cached_property
    def variances(self) -> list[Float[Tensor, " n"]]:
        """Variances 1/(s·relu(h) + α) of each layer along its basis, in the type of the head's weight."""
        return [precision.reciprocal().to(self.weight.dtype) for precision in self._precisions(self.alpha)]

    def noise(self, n_samples: int, *, generator: torch.Generator | None = None) -> Noise:
        shapes, seed = [v.shape for v in self.variances], self.seed
        if generator is not None:  # each iteration must draw the same numbers
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        return _Redrawn(partial(replace(self, seed=seed)._normal, n_samples, shapes, None, self.weight.dtype))

    @without_autocast()
    def layers_from(self, noise: Noise) -> Any:
        """S random values of each parameter of the layers, by name."""
        sampled = {}
        deviations, bases = self._deviations(noise), self.curvature.bases
        for (path, layer), basis, deviation in zip(self._modules.items(), bases, deviations, strict=True):
            if basis is not None:
                U_B, U_A = (axes.to(deviation) for axes in basis)
                deviation = (U_B @ deviation.unflatten(1, (len(U_B), len(U_A))) @ U_A.T).flatten(1)
            for name, weights in unflat_weights(*layer, flat_weights(*layer) + deviation).items():
                sampled[f"{path}.{name}" if path else name] = weights
        return sampled

    def output_spread(self) -> Callable[[Any], FullSpread]:
        """A function from inputs to the linearised covariances J Σ Jᵀ of their outputs."""

        @without_autocast()
        def spread(inputs: Any) -> FullSpread:
            return FullSpread(torch.cat([self._linearised(part, self.variances)[1] for part, _ in self._parts(inputs)]))

        return spread

    def variance_along(self, slopes: Tensor, inputs: Tensor) -> Tensor:
        raise ValueError("the variance of a cosine needs the inputs of one layer: fit the posterior with layers='last'")

    def cosine_variance(self, queries: Any, hits: Any) -> Any:
        return self.variance_along(queries, hits)

    def log_det_precision(self, prior_precision: float) -> float:
        return sum(float(precision.log().sum()) for precision in self._precisions(prior_precision))

    @without_autocast()
    def clipped_variance_share(self, features: Any) -> float:
        """Share of the variance of the linearised outputs from negative entries of h; see `Posterior`."""
        negative = [v * is_negative(h) for v, h in zip(self.variances, self.curvature.spectra, strict=True)]

        def total(variances: list[Tensor]) -> float:
            spreads = (FullSpread(self._linearised(part, variances)[1]) for part, _ in self._parts(features))
            return sum(float(spread.total.sum()) for spread in spreads)

        return total(negative) / max(total(self.variances), 1e-300)

    @without_autocast()
    def outputs(self, features: Any) -> Float[Tensor, "N D"]:
        return head_output(self.network, self.head, features).to(self.weight.dtype)

    def joint_predictor(self, noise: Noise) -> Callable[[Any], Float[Tensor, "S N D"]]:
        draw = self._draw(noise, self._output_noise(len(next(iter(noise)))))

        @without_autocast()
        def sampled(inputs: Any) -> Tensor:
            return F.normalize(torch.cat([draw(part)[1] for part, _ in self._parts(inputs)], 1), dim=-1)

        return sampled

    def settings(self) -> dict[str, Any]:
        layers = [plain_path(self.network, path) for path in self.layers]
        return {**super().settings(), "layers": layers, "predictive": self.predictive}

    @classmethod
    def restored(
        cls: type[Same],
        tensors: Mapping[str, Tensor],
        settings: Mapping[str, Any],
        *,
        network: nn.Module | None = None,
        head: str = "",
        **further: Any,
    ) -> Same:
        """The posterior with these `tensors` and `settings`; its mean is the weights of `network`."""
        if network is None:
            raise ValueError("a posterior over layers needs its network, got None")
        own = {plain_path(network, path): path for path in weighted_layers(network)}
        layers = tuple(own[path] for path in settings["layers"])
        predictive = settings["predictive"]
        where: Any = {"network": network, "head": head, "layers": layers, "predictive": predictive}
        posterior = super().restored(tensors, settings, **where, **further)
        if posterior.curvature.shapes != (shapes := tuple(shape_of(*layer) for layer in posterior._modules.values())):
            raise ValueError(f"the curvature has layers of shapes {posterior.curvature.shapes}, the network {shapes}")
        return posterior

    @property
    def _modules(self) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        return {path: (layer := self.network.get_submodule(path), own_weights(layer)) for path in self.layers}

    def _precisions(self, prior_precision: float) -> list[Tensor]:
        return [self.scale * spectrum.double().relu() + prior_precision for spectrum in self.curvature.spectra]

    def _deviations(self, noise: Noise) -> Iterator[Float[Tensor, "S n"]]:
        """Deviations from θ* of each layer's weights, in the layer's basis."""
        return (of * v.sqrt() for of, v in zip(noise, self.variances, strict=True))

    def _sampler(self, n_samples: int, *, marginal: bool) -> Sampler:
        noise = None if marginal and self.predictive == "linearised" else self.noise(n_samples)
        return self._draw(noise, self._output_noise(n_samples))

    def _draw(self, noise: Noise | None, output_noise: Float[Tensor, "S 1 D"]) -> Sampler:
        """Samples from the networks that `noise` determines; without `noise`, marginal samples from `output_noise`."""
        if noise is not None and self.predictive == "sampled":
            return self._of_networks(self.layers_from(noise), output_noise)
        deviations = None if noise is None else list(self._deviations(noise))

        def draw(inputs: Any) -> tuple[Tensor, Any, Tensor]:
            f, covariance, along = self._linearised(inputs, self.variances, deviations)
            spread = FullSpread(covariance)
            samples = spread.samples(f, output_noise, least_variance(f)) if deviations is None else f.double() + along
            return f.to(self.weight.dtype), samples, spread.total

        return draw

    def _of_networks(self, sampled: Mapping[str, Tensor], noise: Float[Tensor, "S 1 D"]) -> Sampler:
        def draw(inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
            each = [
                head_output(self.network, self.head, inputs, {name: weights[s] for name, weights in sampled.items()})
                for s in range(len(noise))
            ]
            f, samples = self.outputs(inputs), torch.stack(each).double()
            variance = samples.var(0, correction=min(1, len(noise) - 1)).sum(1)  # of one sample, 0
            return f, samples + least_variance(f).sqrt() * noise, variance

        return draw

    def _linearised(
        self, inputs: Any, variances: list[Tensor], deviations: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D D"], Any]:
        """Outputs f, covariances J diag(v) Jᵀ for `variances` v, and J δ for `deviations` δ."""
        covariance: Any = 0
        along: Any = 0
        with evaluating(self.network):
            f, passes = linearised(self.network, self.head, self.layers, inputs)
            for number, (of, basis) in enumerate(zip(passes, self.curvature.bases, strict=True)):
                J = jacobian(of.module, of.weights, of.inputs, of.slopes, basis)
                covariance = covariance + J.spread(variances[number])
                along = along if deviations is None else along + J.along(deviations[number])
        return f, covariance, along

    def _parts(
        self, features: Any, output: Tensor | None = None, n_samples: int = 1
    ) -> Iterator[tuple[Any, Tensor | None]]:
        for rows in rows_at_once(self.network, self.head, self.layers, features):
            yield items(features, rows), None if output is None else output[rows]


@dataclass(frozen=True)
class LayersKronPosterior(LayersPosterior):
    """`LayersPosterior` whose bases are the eigenvectors of each layer's two Kronecker factors."""

    structure: ClassVar[Any] = LayersKron
