"""SwAV: each view predicts the other view's assignment to prototypes; assignments use all prototypes nearly equally."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.losses.alignment import Explicit
from lam.losses.distributions import DistributionLoss
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_at_least, check_positive


class SwAV(DistributionLoss):
    """Mean over pairs of views of −½ Σ_j [q₁ log p₂ + q₂ log p₁], with an optional explicit concentration.

    The prototypes c_j are learned unit vectors. p is the softmax of a view's μ·c_j/τ over j. q is `sinkhorn` of the
    view's μ·c_j/ε, without gradient. A pair counts once; the item with the smaller index is the first view.

    Source: Caron et al. (2020), "Unsupervised learning of visual features by contrasting cluster assignments",
    equations 2 to 5. This class leaves out multi-crop and the queue. The paper's values are τ = 0.1, ε = 0.05 and three
    iterations.

    Args:
        dimension: D.
        n_prototypes: J ≥ 2.
        temperature: τ > 0.
        smoothness: ε > 0, the divisor of the cosines in the assignments.
        n_iterations: number of iterations of `sinkhorn`, at least 1.
        explicit: the alignment and its regulariser; None for only the base loss.
        seed: seed of the prototypes; the global random state does not change.

    Raises:
        ValueError: for a setting outside its range.
    """

    def __init__(
        self,
        dimension: int,
        n_prototypes: int = 256,
        temperature: float = 0.1,
        smoothness: float = 0.05,
        n_iterations: int = 3,
        explicit: Explicit | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_at_least("dimension", dimension, 1)
        check_at_least("n_prototypes", n_prototypes, 2)
        check_at_least("n_iterations", n_iterations, 1)
        check_positive("temperature", temperature)
        check_positive("smoothness", smoothness)
        self.temperature, self.smoothness, self.n_iterations = temperature, smoothness, n_iterations
        self.dimension, self.explicit = dimension, explicit
        rows = torch.randn(n_prototypes, dimension, generator=torch.Generator().manual_seed(seed))
        self.prototypes = nn.Parameter(F.normalize(rows))

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The curvature of InfoNCE at the same temperature; other items replace the prototypes."""
        return {"name": "infonce", "temperature": self.temperature}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        first, second = pairs.positive.triu().nonzero(as_tuple=True)
        cosines = mean @ F.normalize(self.prototypes).to(mean).T
        log_p = (cosines / self.temperature).log_softmax(1)
        value = mean.new_zeros(())
        for own, other in ((first, second), (second, first)):
            q = sinkhorn(cosines[own].detach() / self.smoothness, self.n_iterations)
            value = value - (q * log_p[other]).sum(1).mean() / 2
        if self.explicit is not None:
            cosine = (mean[first] * mean[second]).sum(1)
            value = value + self.explicit(kappa[first], kappa[second], cosine, mean.shape[1]).mean()
        return value


def sinkhorn(scores: Float[Tensor, "N J"], n_iterations: int) -> Float[Tensor, "N J"]:
    """a_i b_j e^score for row i and column j: each row sums to 1, and all columns have nearly equal sums.

    Each iteration scales the columns to equal sums, then the rows to sums of 1.

    Source: Cuturi (2013), "Sinkhorn distances"; Caron et al. (2020), equation 5.

    Example:
        >>> sinkhorn(torch.zeros(2, 2), 3)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    logs = scores
    for _ in range(n_iterations):
        logs = logs.log_softmax(0).log_softmax(1)
    return logs.exp()
