"""Encoders of several networks: an ensemble, or Monte-Carlo dropout. An input is uncertain if the networks disagree.

Monte-Carlo dropout has S thinned networks (with some units dropped), the same for all items.

Source: Lakshminarayanan, Pritzel and Blundell (2017); Gal and Ghahramani (2016); Warburg et al. (2023), appendix G.4.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.base import Encoder, Prediction, Predictor, directions_of
from lam.encoders.deterministic import SeededEncoder
from lam.hessians.last_layer import check_feature_values
from lam.models.head import features_and_output
from lam.models.modes import network_lock, uncompiled
from lam.models.weights import plain_names
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_choice
from lam.utils.random import derive_seed
from lam.vmf import Embeddings, mean_resultant_length

Combine = Literal["concatenate", "mean"]

ROUNDS = 10  # greatest number of rounds of an alignment; two or three usually suffice
SETTLED = 1e-6
"""An alignment ends when a round raises the mean squared resultant length by at most this."""

Dropout = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d


class EnsembleEncoder(Encoder):
    """Embed by M networks.

    A rotation of a member's embeddings does not change the loss, so directions of different members are not comparable.
    `combine="concatenate"` joins an item's M unit vectors, divided by √M, so cosines are means of the members' cosines.
    `"mean"`, as in Warburg et al., takes the mean direction of the unaligned vectors; this loses recall.

    R̄ is the mean resultant length of an item's M unit vectors, aligned by `rotations`. κ comes from R̄ corrected for
    chance, and `variance` is 1 − R̄², the spread of the vectors. Joint samples are the aligned vectors; `features` come
    from the first member.

    Args:
        members: M ≥ 2 networks that map (N, ...) inputs to (N, D); each ends in a linear layer, with or without
            normalisation.
        head: path of this last layer, the same in each member.
        rotations: (M, D, D) orthogonal matrices that align the members; see `align`. None for no alignment.
    """

    kind = "deep_ensemble"
    keeps = ("combine", "rotations")

    def __init__(
        self,
        members: Iterable[nn.Module],
        head: str,
        *,
        rotations: Float[Tensor, "M D D"] | None = None,
        combine: Combine = "concatenate",
        **common: Any,
    ) -> None:
        self.members = nn.ModuleList(members)
        check_at_least("the number of members", len(self.members), 2)
        check_choice("combine", combine, get_args(Combine))
        super().__init__(self.members, head, **common)
        first: Any = self.members[0].get_submodule(head)
        shape = (len(self.members), first.out_features, first.out_features)
        if rotations is not None and rotations.shape != shape:
            raise ValueError(f"rotations must have shape {shape}, got {tuple(rotations.shape)}")
        self.rotations, self.combine = rotations, combine
        self._member_dimension: int = first.out_features

    @property
    def dimension(self) -> int:
        """M·D for concatenated members, D for their mean."""
        return self._member_dimension * (len(self.members) if self.combine == "concatenate" else 1)

    @property
    def kappa_dimension(self) -> int:
        """D, the dimension of a member; after `learn_ambiguity`, the same as `dimension`."""
        return self._member_dimension if self.ambiguity is None else self.dimension

    def with_ambiguity(self, features: Float[Tensor, "N P"], embeddings: Embeddings) -> Embeddings:
        if self.ambiguity is None:
            return embeddings
        return self.ambiguity(features, embeddings, epistemic_dimension=self._member_dimension)

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function that predicts batches; the samples are the M members, for any `n_samples`."""

        def predict(inputs: Any, offset: int) -> Prediction:
            features, units = features_and_units(self.members, self.head, inputs)
            check_feature_values(features, offset)
            with without_autocast():
                aligned = units if self.rotations is None else F.normalize(units @ self.rotations.to(units), dim=-1)
            length = mean_resultant_length(aligned, unbiased=False)
            variance = length.one_minus_resultant * (1 + length.resultant)
            mean = concatenated(units) if self.combine == "concatenate" else F.normalize(units.mean(0))
            embeddings = Embeddings.from_samples(aligned, variance.to(units), mean=mean)
            return Prediction(features, embeddings, aligned if joint else None)

        return predict


def concatenated(units: Float[Tensor, "M N D"]) -> Float[Tensor, "N MD"]:
    """Each item's M unit vectors, concatenated and divided by √M."""
    return units.transpose(0, 1).flatten(1) / len(units) ** 0.5


def align(units: Float[Tensor, "M N D"]) -> Float[Tensor, "M D D"]:
    """Rotations (or reflections) that align M embeddings of the same items.

    Generalised Procrustes analysis: argmin Σ_m ‖X_m Q_m − X̄‖² over orthogonal Q_m, where X_m are the embeddings of
    member m and X̄ is the mean of all X_m Q_m. X̄ starts as X_1. Each round computes the best Q_m for the present X̄:
    Q_m = U Vᵀ, from the singular value decomposition X_mᵀ X̄ = U S Vᵀ.

    Source: Schönemann (1966) for one pair, Gower (1975) for the rounds.

    Returns:
        (M, D, D) matrices in the type of `units`; multiply them from the right.
    """
    members = units.double()
    mean, length = members[0], 0.0
    rotations = members.new_zeros(0)
    for _ in range(ROUNDS):
        left, _, right = torch.linalg.svd(members.mT @ mean)
        rotations = left @ right
        mean = (members @ rotations).mean(0)
        before, length = length, float(mean.square().sum(1).mean())
        if length - before <= SETTLED:
            break
    return rotations.to(units)


def features_and_units(
    members: Iterable[nn.Module], head: str, inputs: Any
) -> tuple[Float[Tensor, "N P"], Float[Tensor, "M N D"]]:
    """Inputs of the first member's head, and the M unit vectors of each item."""
    features, outputs = zip(*(features_and_output(member, head, inputs) for member in members), strict=True)
    return features[0], directions_of(torch.stack(outputs))


class DropoutEncoder(SeededEncoder):
    """Embed by S thinned networks: the mean direction of their embeddings, and κ from their spread.

    Sample s is one thinned network. Its dropout masks depend only on the seed and s, and all items share a mask. torch
    would draw a mask for each item; the papers leave this open. With shared masks, samples are comparable across items,
    and the κ of an item is the same in any batch. `variance` is the variance of the outputs before normalisation,
    summed over D. `features` come from a pass without dropout.

    Embedding takes S + 1 passes through the network, or one if the only dropout is right before the head.
    """

    kind = "mc_dropout"

    def __init__(self, network: nn.Module, head: str, **common: Any) -> None:
        check_network(network)
        super().__init__(network, head, **common)

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        def predict(inputs: Any, offset: int) -> Prediction:
            features, outputs = self._outputs(inputs, n_samples)
            check_feature_values(features, offset)
            samples = F.normalize(outputs, dim=-1)
            variance = outputs.var(0).sum(1) if len(features) else outputs.new_zeros(0)
            embeddings = Embeddings.from_samples(samples, variance)
            return Prediction(features, embeddings, samples if joint else None)

        return predict

    def _outputs(self, inputs: Any, n_samples: int) -> tuple[Tensor, Tensor]:
        """Features (N, P) without dropout and sampled outputs (S, N, D) before normalisation."""
        network, head = self.network, self.head
        dropped: list[tuple[str, Tensor]] = []
        entered: list[Tensor] = []

        def recorder(path: str) -> Callable[..., Tensor]:
            def hook(_layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
                dropped.append((path, output.clone()))  # without dropout, a layer returns its input itself
                return dropped[-1][1]

            return hook

        head_layer = network.get_submodule(head)
        with _hooks(network, recorder), head_layer.register_forward_pre_hook(lambda _, args: entered.extend(args)):
            features, _ = features_and_output(network, head, inputs)
        if len(dropped) == len(entered) == 1 and entered[0] is dropped[0][1]:  # masks on the features save S passes
            path = dropped[0][0]
            seeds, layer = (derive_seed(self.seed, s, path) for s in range(n_samples)), dropouts_of(network)[path]
            samples = (features * mask_of(layer, features, seed) for seed in seeds)
        else:
            samples = (self._thinned_features(inputs, s) for s in range(n_samples))
        return features, torch.stack([self.unnormalised(sample) for sample in samples])

    def _thinned_features(self, inputs: Any, sample: int) -> Tensor:
        with thinned(self.network, seed=self.seed, sample=sample):
            return features_and_output(self.network, self.head, inputs)[0]


@contextmanager
def thinned(network: nn.Module, *, seed: int, sample: int) -> Iterator[None]:
    """Within the context, each dropout layer of a network in evaluation mode applies one mask to all items.

    A layer that runs twice in one pass applies the same mask twice. `seed` and `sample` determine the masks.
    """

    def masked(path: str) -> Callable[..., Tensor]:
        own = derive_seed(seed, sample, path)
        return lambda layer, _inputs, output: output * mask_of(layer, output, own)

    with _hooks(network, masked):
        yield


def mask_of(module: Dropout, values: Float[Tensor, "N ..."], seed: int) -> Float[Tensor, "1 ..."]:
    """Mask of a dropout layer: 0 or 1/(1 − rate) for each value, or for each channel if the layer drops channels.

    The CPU draws the mask, so that every device has the same one.
    """
    shape = values.shape[1:] if isinstance(module, nn.Dropout) else (values.shape[1], *[1] * (values.ndim - 2))
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(1, *shape, generator=generator, dtype=torch.float32) >= module.p  # not torch's default type
    return keep.to(values) / (1 - module.p)


def dropouts_of(network: nn.Module) -> dict[str, Dropout]:
    """The dropout layers of a network with a rate in (0, 1), by path without the prefixes of wrappers."""
    layers = {
        path: module for path, module in network.named_modules() if isinstance(module, Dropout) and 0 < module.p < 1
    }
    return {plain: layers[path] for path, plain in plain_names(layers).items()}


def check_network(network: nn.Module) -> None:
    """Reject a network without dropout; the error says how to add it."""
    if not dropouts_of(network):
        raise ValueError(
            "mc_dropout needs a network with dropout layers of a rate in (0, 1), got no such layer: build it with the "
            "option dropout, such as network.options.dropout=0.05, or put nn.Dropout between its layers"
        )


@contextmanager
def _hooks(network: nn.Module, hook: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """Within the context, each dropout layer of a network runs the forward hook `hook(path)`."""
    layers = dropouts_of(network)
    with network_lock, uncompiled(network, layers.values()), ExitStack() as hooks:
        for path, module in layers.items():
            hooks.enter_context(module.register_forward_hook(hook(path)))
        yield
