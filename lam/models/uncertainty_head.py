"""The head that predicts variances beside a frozen embedding: what PFE and HIB add to a network.

How it is trained is in `lam.methods`.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.utils.checks import check_at_least
from lam.utils.random import seeded


class UncertaintyHead(nn.Module):
    """Map features to the logarithm of a variance for every embedding dimension.

    log σ² = γ BN₂(W₂ relu(BN₁(W₁ φ + b₁)) + b₂) + β, where BN₁ has a scale and shift a dimension, as usual, and BN₂'s
    scale γ and shift β are each one number for all dimensions. The hidden layer has D units; the variance begins near
    e^β for every input: γ = 10⁻⁴, β = −7. Hidden width, γ and β are those of PFE's code; the floor of 10⁻⁶ that it puts
    under the variance is left to the loss, and batch norms keep torch's momentum and ε.

    Source: Shi and Jain (2019), "Probabilistic face embeddings"; Warburg et al. (2023), appendix G.4, who found the
    shared scale and shift to work slightly better than the standard batch norm.

    Args:
        features: P, what enters the embedding's own head.
        dimension: D of the embedding.
        shared: one γ and β for all dimensions; else one a dimension, with the same beginning.
        seed: of the random weights; the global random state is left as it was.

    Attributes:
        recipe: what rebuilds the head: JSON.

    Raises:
        ValueError: where there is no feature or no dimension.

    Example:
        >>> head = UncertaintyHead(16, 3).eval()
        >>> head(torch.zeros(1, 16)).round(decimals=2).tolist()
        [[-7.0, -7.0, -7.0]]
    """

    def __init__(self, features: int, dimension: int, *, shared: bool = True, seed: int = 0) -> None:
        super().__init__()
        check_at_least("features", features, 1)
        check_at_least("dimension", dimension, 1)
        self.recipe = {"features": features, "dimension": dimension, "shared": shared}
        with seeded(seed):
            self.layers = nn.Sequential(
                nn.Linear(features, dimension),
                nn.BatchNorm1d(dimension),
                nn.ReLU(),
                nn.Linear(dimension, dimension),
                nn.BatchNorm1d(dimension, affine=False),
            )
        shape = () if shared else (dimension,)
        self.scale = nn.Parameter(torch.full(shape, 1e-4))
        self.shift = nn.Parameter(torch.full(shape, -7.0))

    def forward(self, features: Float[Tensor, "N P"]) -> Float[Tensor, "N D"]:
        """Log variances (N, D).

        Raises:
            ValueError: where features do not have P columns, or a single item is given in training mode: batch norm
                learns from a batch.
        """
        if features.ndim != 2 or features.shape[1] != self.recipe["features"]:
            raise ValueError(f"features must be (N, {self.recipe['features']}), got {tuple(features.shape)}")
        if self.training and len(features) < 2:
            raise ValueError(f"training needs batches of at least 2 items, got {len(features)}: call eval() to predict")
        return self.scale * self.layers(features) + self.shift
