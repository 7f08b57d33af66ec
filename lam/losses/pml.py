"""The contrastive loss of pytorch-metric-learning, computed by that library."""

import torch
from torch import Tensor

from lam.losses.base import MarginLoss
from lam.pairs.pairs import Pairs


class PytorchMetricLearning(MarginLoss):
    """Mean distance d of positive pairs, plus mean of margin − d over negative pairs inside the margin.

    Distances are not squared, and both means run over non-zero terms.

    Source: pytorch-metric-learning's `ContrastiveLoss`, with `neg_margin=margin`.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> PytorchMetricLearning(margin=1.5)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(1.5000)
    """

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        from pytorch_metric_learning.losses import ContrastiveLoss

        tuples = (*_indices(pairs.positive), *_indices(pairs.negative))
        if len(tuples[0]) == len(tuples[2]) == 0:
            return 0 * embeddings.sum()
        # The library's defaults, 0 and 1, make type checkers take its margins for integers.
        loss = ContrastiveLoss(pos_margin=0, neg_margin=self.margin)  # pyright: ignore[reportArgumentType]
        return loss(embeddings, indices_tuple=tuples)


def _indices(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the pairs, each repeated 2 w times for its weight w, a multiple of ½."""
    first, second = weights.nonzero(as_tuple=True)
    times = (2 * weights[first, second].to(torch.float64)).round().long()
    return first.repeat_interleave(times), second.repeat_interleave(times)
