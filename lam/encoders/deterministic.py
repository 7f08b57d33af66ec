"""Encoders of one network: without uncertainty, or with κ from the output's length, a second head or training items."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.base import Encoder, Prediction, Predictor, at_least_float32, directions_of
from lam.encoders.files import SavedEncoder
from lam.hessians.last_layer import check_feature_values
from lam.models.head import features_and_output
from lam.models.kappa_head import KappaHead, UncertaintyHead
from lam.models.modes import evaluating
from lam.models.weights import check_state
from lam.posteriors.base import CHUNK_ELEMENTS
from lam.retrieval.metrics.reference import NEIGHBOUR, check_neighbours, unit_knn_distance
from lam.utils.autocast import without_autocast
from lam.utils.random import derive_seed
from lam.vmf import KAPPA_RANGE, Embeddings, VonMisesFisher
from lam.vmf.bessel import bessel_ratio_complement, check_all, kappa_from_resultant
from lam.vmf.embeddings import projected_resultant

Same = TypeVar("Same", bound="TwoHeadedEncoder")

_MOST = 80.0  # greatest log variance, so that float32 holds the sum of the variances


class DeterministicEncoder(Encoder):
    """Embed without uncertainty: for every input, κ is the upper end of `KAPPA_RANGE`, and the variance is 0.

    The network maps inputs (N, ...) to (N, D) and ends in the linear layer `head`, with or without normalisation.
    """

    kind = "deterministic"
    has_kappa = False
    network: nn.Module

    @property
    def dimension(self) -> int:
        layer: Any = self.network.get_submodule(self.head)
        return layer.out_features

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        def predict(inputs: Any, offset: int) -> Prediction:
            features, output = features_and_output(self.network, self.head, inputs)
            mean = directions_of(output)
            one = mean.new_ones(len(mean))
            return Prediction(features, Embeddings(mean, one * KAPPA_RANGE[1], one, 0 * one))

        return predict


class SeededEncoder(DeterministicEncoder):
    """An encoder that draws samples from its own seed, not from torch's global generator."""

    has_kappa = True
    keeps = ("seed",)

    def __init__(self, network: nn.Module, head: str, *, seed: int = 0, **common: Any) -> None:
        super().__init__(network, head, **common)
        self.seed = seed

    @without_autocast()
    def unnormalised(self, features: Float[Tensor, "N P"]) -> Float[Tensor, "N D"]:
        """Outputs of the head before normalisation, float32 or wider."""
        head = self.network.get_submodule(self.head)
        with evaluating(head):  # a spectral norm in training mode changes with each pass
            return at_least_float32(head(features.to(next(head.parameters()).dtype)))

    def draw_each(
        self, positions: Iterable[int], draw: Callable[[int, torch.Generator], Float[Tensor, "S D"]]
    ) -> Float[Tensor, "S N D"]:
        """Samples of N items. Each item has its own CPU generator, so batches and devices do not change the samples.

        `positions` are the items' positions in the pass, from 0; `draw` takes the index of one of the N items.
        """
        generators = (torch.Generator().manual_seed(derive_seed(self.seed, position)) for position in positions)
        return torch.stack([draw(number, generator) for number, generator in enumerate(generators)], 1)


class TwoHeadedEncoder(SeededEncoder):
    """An encoder with a second head on the network's features; `save` writes the head's recipe and state.

    `own_head` is the name and the type of the attribute that holds the second head.
    """

    own_head: ClassVar[tuple[str, type[Any]]]

    def settings(self) -> dict[str, Any]:
        name, _ = self.own_head
        return {**super().settings(), name: getattr(self, name).recipe}

    def tensors(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = getattr(self, self.own_head[0]).state_dict()
        return state

    @classmethod
    def restored(cls: type[Same], saved: SavedEncoder) -> Same:
        name, kind = cls.own_head
        with torch.device("meta"):  # an untrusted recipe takes no memory before its shapes are checked
            check_state(kind(**saved.settings[name]).state_dict(), saved.tensors)
        head = kind(**saved.settings[name])
        head.load_state_dict(saved.tensors)
        return super().restored(replace(saved, settings={**saved.settings, name: head}, tensors={}))


class ConcentrationEncoder(SeededEncoder):
    """Embed by the direction of the network's output, with κ as a function of the features.

    An item's samples come from its von Mises-Fisher distribution, whose mean resultant length is A_D(κ). The samples
    depend on the seed and the item's position in the pass. `variance` is 1 − A_D(κ)², the spread of the samples.
    """

    @abstractmethod
    def concentration(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        """κ ≥ 0 in float64 from inputs of the head; the caller clamps κ to `KAPPA_RANGE`."""

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function that predicts batches; it draws `n_samples` only with `joint`."""

        def predict(inputs: Any, offset: int) -> Prediction:
            features, output = features_and_output(self.network, self.head, inputs)
            check_feature_values(features, offset)
            mean = directions_of(output)
            with without_autocast():
                kappa = self.concentration(features).clamp(*KAPPA_RANGE)
            complement = bessel_ratio_complement(self.dimension, kappa)
            resultant, variance = 1 - complement, complement * (2 - complement)
            samples = None
            if joint:
                parameters = list(zip(mean.cpu(), kappa.cpu(), strict=True))  # drawn on the CPU, for every device
                samples = self.draw_each(
                    range(offset, offset + len(mean)),
                    lambda row, generator: VonMisesFisher(*parameters[row]).sample((n_samples,), generator=generator),
                ).to(mean)
            embeddings = Embeddings(mean, kappa.to(mean), resultant.to(mean), variance.to(mean))
            return Prediction(features, embeddings, samples)

        return predict


class NormEncoder(ConcentrationEncoder):
    """Embed with κ = ‖f‖, the length of the head's output f = Wφ + b before normalisation.

    f takes the place of κμ, the natural parameter of the von Mises-Fisher density C_D(κ) exp(κ μ·x). After training by
    a loss on normalised embeddings, the scale of κ is arbitrary; only the order of κ counts.

    Source: Scott, Gallagher and Mozer (2021), "von Mises-Fisher loss"; their loss trains ‖f‖ as κ.
    """

    kind = "norm"

    def concentration(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        return self.unnormalised(features).double().norm(dim=1)


class HeadEncoder(TwoHeadedEncoder, ConcentrationEncoder):
    """Embed with the κ that a second, trained head computes from the features."""

    kind = "kappa_head"
    own_head = "kappa_head", KappaHead

    def __init__(self, network: nn.Module, head: str, kappa_head: KappaHead, **common: Any) -> None:
        super().__init__(network, head, **common)
        self.kappa_head = kappa_head.eval()

    @torch.no_grad()
    def concentration(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        return self.kappa_head(features.float()).double()


class NeighbourEncoder(ConcentrationEncoder):
    """Embed with the κ that solves A_D(κ) = max(0, c), with c the cosine to the k-th nearest reference feature.

    A_D(κ) is the mean cosine between samples of the von Mises-Fisher distribution and its mean direction. A reference
    item is its own first neighbour.

    Source: Sun, Ming, Zhu and Li (2022), for the distance; the map from distance to κ is lam's choice.

    Args:
        reference: (O, P) features of training items as unit vectors (or zeros), O ≥ k.
        k: rank of the neighbour, from 1.
    """

    kind = "knn_distance"
    keeps = ("seed", "k", "reference")

    def __init__(
        self, network: nn.Module, head: str, *, reference: Float[Tensor, "O P"], k: int = NEIGHBOUR, **common: Any
    ) -> None:
        check_neighbours(k, reference)
        length = reference.norm(dim=1)
        check_all(((length - 1).abs() < 1e-4) | (length == 0), "reference must hold unit vectors, their length", length)
        super().__init__(network, head, **common)
        self.k = k
        self.reference = reference

    def concentration(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        """κ in float64, computed from 1 − c to keep its digits for c near 1."""
        distance = unit_knn_distance(directions_of(features).to(self.reference), self.reference, k=self.k)
        cosine = (1 - distance).clamp(min=0)
        return kappa_from_resultant(
            cosine, self.dimension, one_minus_resultant=distance.clamp(max=1), max_kappa=KAPPA_RANGE[1]
        )


class GaussianEncoder(TwoHeadedEncoder):
    """Embed by N(μ, diag(σ²)), with μ from the network's head and σ² from an uncertainty head on the same features.

    Retrieval compares the directions of μ. Samples μ + σ ε are projected to the sphere, and κ follows from their
    unbiased mean resultant length (Sra 2012). All inputs share the noise ε, so κ is the same in any batch. `variance`
    is Σ_d σ_d². In joint samples, each item has its own noise, from the seed and the item's position in the pass.

    Args:
        uncertainty: maps the inputs of the network's head to log variances (N, D).
        unit_mean: whether μ is the head's output after normalisation, instead of the output itself.
    """

    kind = "gaussian"
    own_head = "uncertainty", UncertaintyHead
    keeps = ("seed", "unit_mean")

    def __init__(
        self, network: nn.Module, head: str, uncertainty: UncertaintyHead, *, unit_mean: bool, **common: Any
    ) -> None:
        super().__init__(network, head, **common)
        self.uncertainty = uncertainty.eval()
        self.unit_mean = unit_mean

    @torch.no_grad()
    @without_autocast()
    def distribution(self, features: Float[Tensor, "N P"]) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """μ and log σ² of items, from the inputs of the head; log σ² is at most 80."""
        mean, log_variance = self.unnormalised(features), self.uncertainty(features.float()).clamp(max=_MOST)
        return F.normalize(mean) if self.unit_mean else mean, log_variance

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function that predicts batches; items share the noise for κ, but not the noise for joint samples."""
        shape = (n_samples, self.dimension)
        shared = _noise(shape, torch.Generator().manual_seed(self.seed))
        rows = max(1, CHUNK_ELEMENTS // shared.numel())

        def predict(inputs: Any, offset: int) -> Prediction:
            features, output = features_and_output(self.network, self.head, inputs)
            check_feature_values(features, offset)
            embeddings: list[Embeddings] = []
            samples: list[Tensor] = []
            for chunk, direction in zip(features.split(rows), directions_of(output).split(rows), strict=True):
                mean, log_variance = self.distribution(chunk)
                variances = log_variance.double().exp()
                length = projected_resultant(mean, variances, shared.to(mean.device))
                of_chunk = variances.sum(1).to(direction)
                embeddings.append(Embeddings.from_resultant(length, of_chunk, mean=direction, n_samples=n_samples))
                if joint:
                    positions = range(offset, offset + len(chunk))
                    noise = self.draw_each(positions, lambda _, generator: _noise(shape, generator))
                    deviation = (log_variance.double() / 2).exp() * noise.to(mean.device)
                    samples.append(F.normalize(mean.double() + deviation, dim=-1).to(mean.dtype))
                offset += len(chunk)
            return Prediction(features, Embeddings.concatenate(embeddings), torch.cat(samples, 1) if joint else None)

        return predict


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
