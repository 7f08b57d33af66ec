"""Several networks as one encoder; where they disagree, the input is uncertain.

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
from lam.vmf.embeddings import Embeddings
from lam.vmf.resultant import mean_resultant_length

Combine = Literal["concatenate", "mean"]

ROUNDS = 10
"""The most rounds of an alignment; two or three come within `SETTLED` as a rule."""

SETTLED = 1e-6
"""An alignment ends when a round brings the members closer by no more than this, in mean squared resultant length."""


class EnsembleEncoder(Encoder):
    """Embed by M networks.

    Each member has a sphere of its own: the loss does not change when one is turned, so directions of members cannot be
    compared. `concatenate` therefore joins the M unit vectors, divided by √M, so that cosines are means of the members'
    cosines; κ is that of the members' vectors in R^D, aligned by one rotation each. `mean`, as in the paper, takes the
    mean direction of the members as they are, which loses recall, and κ of their spread.

    κ comes from the mean resultant length R̄ of the M vectors, corrected for chance, and `variance` is 1 − R̄², as
    there is no distribution before normalisation. Joint samples are the aligned members; `features` are the first
    member's.

    Args:
        members: M ≥ 2 networks that map (N, ...) inputs to (N, D) by a linear layer at their end, normalised or not.
        head: path of that layer, the same in each.
        rotations: (M, D, D) orthogonal matrices that align the members; see `align`. None to take directions as they
            are.
        combine: `concatenate` or `mean`.
        common: `relation`, `preprocessing` and `ood_score` of `Encoder`.

    Raises:
        ValueError: for fewer than two members, another `combine`, or rotations of another shape.
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
        """M·D of concatenated members, D of their mean."""
        return self._member_dimension * (len(self.members) if self.combine == "concatenate" else 1)

    @property
    def kappa_dimension(self) -> int:
        """D, the members' own sphere; with ambiguity learnt, that of the embedding."""
        return self._member_dimension if self.ambiguity is None else self.dimension

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function of batches; the samples are the M members, whatever `n_samples` is."""

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
    """M unit vectors of each item joined and divided by √M: cosines of rows are means of M cosines."""
    return units.transpose(0, 1).flatten(1) / len(units) ** 0.5


def align(units: Float[Tensor, "M N D"]) -> Float[Tensor, "M D D"]:
    """The rotations, reflections included, that bring M embeddings of the same items closest together.

    argmin Σ_m ‖X_m Q_m − X̄‖², X̄ the mean of all X_m Q_m, Q_m orthogonal: generalised Procrustes analysis, which
    favours no member. Each round takes Q_m = U Vᵀ from X_mᵀ X̄ = U S Vᵀ, the closest for a given X̄, at first X_1, in
    float64. If N < D, or the embeddings lie in fewer dimensions, the rest of the rotation is arbitrary.

    Source: Schönemann (1966) for one pair, Gower (1975) for the rounds.

    Returns:
        (M, D, D), to be multiplied from the right, in the type of `units`.

    Example:
        >>> units = F.normalize(torch.randn(2, 50, 3, dtype=torch.float64), dim=-1)
        >>> units[1] = units[0].flip(-1)
        >>> aligned = units @ align(units)
        >>> torch.allclose(aligned[0], aligned[1])
        True
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
