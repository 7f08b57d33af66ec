"""The anisotropic InfoNCE loss: its distance weights each dimension by a concentration."""

from collections.abc import Sequence
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.losses.base import TrainableLoss
from lam.losses.infonce import mean_cross_entropy
from lam.pairs.pairs import Pairs
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_positive


class AnInfoNCE(TrainableLoss):
    """InfoNCE with the similarity −Σ_d Λ_d (x_d − y_d)² and a learned diagonal Λ > 0.

    If the embeddings are a rotation of the latent variables, Λ_d is the concentration of positive pairs along d. For
    unit embeddings and Λ_d = 1/(2τ), the loss is InfoNCE at temperature τ. If negatives are drawn near the anchor, with
    a concentration Λ⁻ > 0, the best Λ is Λ⁺ − Λ⁻: a learned Λ⁺, the concentration of positive pairs, and a fixed Λ⁻. An
    ensemble sums the losses of M members; each member has its own Λ and its own pairs of the same items.

    Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice", equation 3, corollaries B.1
    and B.2.

    Args:
        dimension: embedding dimensions D.
        concentration: initial Λ⁺ of all dimensions.
        n_members: number of members M.
        negatives: (D,) Λ⁻ ≥ 0, below `concentration`; by default 0, for negatives drawn evenly from all items.
        margin: as for `TrainableLoss`.

    Raises:
        ValueError: for a setting outside its range or of another length.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = AnInfoNCE(2, concentration=0.5)
        >>> loss(embeddings, Pairs.by_label(torch.tensor([0, 0, 1]))).detach()
        tensor(0.3133)
    """

    curvature = "aninfonce"

    def __init__(
        self,
        dimension: int,
        concentration: float = 5.0,
        *,
        n_members: int = 1,
        negatives: Tensor | None = None,
        margin: float | None = None,
    ) -> None:
        super().__init__(margin)
        check_at_least("dimension", dimension, 1)
        check_at_least("n_members", n_members, 1)
        if not isinstance(concentration, Real):
            raise ValueError(f"concentration must be one number, initially for all dimensions, got {concentration}")
        check_positive("concentration", concentration)
        negatives = torch.zeros(dimension) if negatives is None else negatives
        if negatives.shape != (dimension,) or not (negatives.isfinite() & (negatives >= 0)).all():
            raise ValueError(f"negatives must be {dimension} concentrations, finite and at least 0, got {negatives}")
        if (negatives >= concentration).any():
            raise ValueError(f"negatives must be below concentration, {concentration:g}, got {negatives.tolist()}")
        self.start = concentration
        self.log_concentration = nn.Parameter(torch.full((n_members, dimension), concentration).log())
        self.register_buffer("negatives", negatives.to(self.log_concentration))

    @property
    def concentration(self) -> Float[Tensor, "M D"]:
        """Λ⁺ of each member."""
        return self.log_concentration.exp()

    @classmethod
    def configured(cls, *, margin: float, temperature: float, dimension: int | None) -> "AnInfoNCE":
        """The loss that starts as InfoNCE at this temperature: Λ = 1/(2τ)."""
        if dimension is None:
            raise ValueError("aninfonce has a weight for each dimension: give dimension=D of the embeddings")
        check_positive("temperature", temperature)
        return cls(dimension, 1 / (2 * temperature), margin=margin)

    def learned(self) -> dict[str, list[float]]:
        """Λ⁺ − Λ⁻, member after member."""
        return {"concentration": (self.concentration - self.get_buffer("negatives")).flatten().tolist()}

    def extra_repr(self) -> str:
        n_members, dimension = self.log_concentration.shape
        negatives = self.get_buffer("negatives").tolist()
        return f"{dimension}, {self.start}, n_members={n_members}, negatives={negatives}, margin={self.margin}"

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        return self.of_members(embeddings, [pairs])

    def of_members(self, embeddings: Float[Tensor, "N D"], pairs: Sequence[Pairs]) -> Float[Tensor, ""]:
        """Sum of the losses of all members, each with its own pairs of the same items.

        Raises:
            ValueError: for another number of members or items, a member without a positive pair, or rows of another
                dimension.
        """
        n_members = len(self.log_concentration)
        if len(pairs) != n_members:
            raise ValueError(f"pairs must be given for each of {n_members} members, got {len(pairs)}: call of_members")
        for pairs_of_member in pairs:
            pairs_of_member.check_positives()
        terms = [self.of_member(embeddings, pairs_of_member, number) for number, pairs_of_member in enumerate(pairs)]
        return torch.stack(terms).sum()

    @without_autocast()
    def of_member(self, embeddings: Float[Tensor, "N D"], pairs: Pairs, number: int) -> Float[Tensor, ""]:
        """Loss of the member `number`, counted from 0, for pairs of these items; 0 without a positive pair."""
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        dimension = self.log_concentration.shape[1]
        if embeddings.shape[1] != dimension:
            raise ValueError(f"embeddings must have {dimension} dimensions, as Λ has, got {embeddings.shape[1]}")
        pairs.check_size(len(embeddings))
        weight = (self.concentration[number] - self.get_buffer("negatives")).to(embeddings)
        square = (embeddings.square() * weight).sum(1)
        cross = (embeddings * weight) @ embeddings.T
        return mean_cross_entropy(2 * cross - square[:, None] - square, pairs)
