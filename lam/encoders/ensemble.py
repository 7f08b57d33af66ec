"""Several networks as one encoder; an input on which they disagree is uncertain.

Source: Lakshminarayanan, Pritzel and Blundell (2017); Warburg et al. (2023), appendix G.4.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.base import Encoder, Prediction, Predictor, directions_of
from lam.models.head import features_and_output
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_choice
from lam.vmf import Embeddings, mean_resultant_length

Combine = Literal["concatenate", "mean"]

ROUNDS = 10
"""Greatest number of rounds of an alignment; two or three usually suffice."""

SETTLED = 1e-6
"""An alignment ends when a round raises the mean squared resultant length by at most this."""


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

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function that predicts batches; the samples are the M members, for any `n_samples`."""

        def predict(inputs: Any, offset: int) -> Prediction:
            features, units = features_and_units(self.members, self.head, inputs)
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
