"""Second heads on features: `KappaHead` computes the concentration of an embedding, `UncertaintyHead` its variances."""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.utils.checks import check_at_least, check_choice, check_positive
from lam.utils.random import seeded

Form = Literal["exp", "softplus", "inverse"]
_MOST = math.log(1e8)  # the losses clip κ at 1e8
_LEAST = 1e-8  # so that 1 / softplus(r) is at most 1e8


class KappaHead(nn.Module):
    """Map features φ to a concentration κ > 0 by a network with one hidden layer, r = w₂ relu(W₁φ + b₁) + b₂.

    κ is 1 + e^r ("exp"), softplus(r) ("softplus"), or 1 / softplus(r) ("inverse"). "inverse" is for a network that
    predicts a loss, softplus(r). w₂ starts small, so κ starts near `start` for every input.

    Args:
        features: number P of features, the inputs of the embedding's head.
        hidden: units of the hidden layer.
        start: initial κ; above 1 for "exp".
        form: function from r to κ.
        seed: seed of the random weights; torch's global random state does not change.

    Attributes:
        recipe: the arguments that rebuild the head, as JSON.
    """

    def __init__(
        self, features: int, hidden: int = 128, *, start: float = 20.0, form: Form = "exp", seed: int = 0
    ) -> None:
        super().__init__()
        check_at_least("features", features, 1)
        check_at_least("hidden", hidden, 1)
        check_choice("form", form, get_args(Form))
        check_positive("start", start)
        if form == "exp" and start <= 1:
            raise ValueError(f"start must be above 1, the least κ of the form exp, got {start}")
        self.recipe = {"features": features, "hidden": hidden, "start": start, "form": form}
        self.form: Form = form
        dtype = torch.float32  # of the features, whatever torch's default type
        with seeded(seed):
            self.first, self.last = nn.Linear(features, hidden, dtype=dtype), nn.Linear(hidden, 1, dtype=dtype)
        with torch.no_grad():
            self.first.bias.zero_()
            self.last.weight.mul_(0.1)
            value = 1 / start if form == "inverse" else start
            of_softplus = value + math.log(-math.expm1(-value))  # inverse of softplus
            self.last.bias.fill_(math.log(start - 1) if form == "exp" else of_softplus)

    def forward(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        """κ (N,) of features (N, P)."""
        if features.ndim != 2 or features.shape[1] != self.recipe["features"]:
            raise ValueError(f"features must be (N, {self.recipe['features']}), got {tuple(features.shape)}")
        return kappa_of(self.last(self.first(features).relu())[:, 0], self.form)


def kappa_of(raw: Float[Tensor, " N"], form: Form) -> Float[Tensor, " N"]:
    """κ from the output r of a head."""
    if form == "exp":
        return 1 + raw.clamp(max=_MOST).exp()
    value = F.softplus(raw)
    return value if form == "softplus" else 1 / value.clamp(min=_LEAST)


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
