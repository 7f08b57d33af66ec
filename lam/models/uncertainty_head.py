"""`UncertaintyHead`: variances of embeddings, as PFE and HIB learn them."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.utils.checks import check_at_least
from lam.utils.random import seeded


class UncertaintyHead(nn.Module):
    """Map features φ to log σ², the logarithm of a variance for every embedding dimension.

    log σ² = γ BN₂(W₂ relu(BN₁(W₁ φ + b₁)) + b₂) + β. The batch norm BN₁ has a scale and a shift for each dimension. The
    batch norm BN₂ has one scale γ and one shift β for all dimensions, initially 10⁻⁴ and −7. So the variance starts
    near e⁻⁷ for every input. The hidden layer has D units. Hidden width, γ and β follow PFE's code.

    Source: Shi and Jain (2019), "Probabilistic face embeddings"; Warburg et al. (2023), appendix G.4, where a shared
    scale and shift works slightly better than the standard batch norm.

    Args:
        features: number P of features, the inputs of the embedding's head.
        dimension: embedding dimensions D.
        shared: whether γ and β are shared by all dimensions; else each dimension has its own, with the same start.
        seed: seed of the random weights; torch's global random state does not change.

    Attributes:
        recipe: the arguments that rebuild the head, as JSON.
    """

    def __init__(self, features: int, dimension: int, *, shared: bool = True, seed: int = 0) -> None:
        super().__init__()
        check_at_least("features", features, 1)
        check_at_least("dimension", dimension, 1)
        self.recipe = {"features": features, "dimension": dimension, "shared": shared}
        dtype = torch.float32  # of the features, whatever torch's default type
        with seeded(seed):
            self.layers = nn.Sequential(
                nn.Linear(features, dimension, dtype=dtype),
                nn.BatchNorm1d(dimension, dtype=dtype),
                nn.ReLU(),
                nn.Linear(dimension, dimension, dtype=dtype),
                nn.BatchNorm1d(dimension, affine=False, dtype=dtype),
            )
        shape = () if shared else (dimension,)
        self.scale = nn.Parameter(torch.full(shape, 1e-4, dtype=dtype))
        self.shift = nn.Parameter(torch.full(shape, -7.0, dtype=dtype))

    def forward(self, features: Float[Tensor, "N P"]) -> Float[Tensor, "N D"]:
        """Log variances (N, D)."""
        if features.ndim != 2 or features.shape[1] != self.recipe["features"]:
            raise ValueError(f"features must be (N, {self.recipe['features']}), got {tuple(features.shape)}")
        if self.training and len(features) < 2:
            raise ValueError(f"training needs batches of at least 2 items, got {len(features)}: call eval() to predict")
        return self.scale * self.layers(features) + self.shift
