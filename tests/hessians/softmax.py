"""A user's curvature of a loss that lam lacks: InfoNCE with supervised targets."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import hessian

from lam.hessians import Curvature
from lam.pairs import Pairs


@dataclass(frozen=True)
class SoftmaxCurvature(Curvature):
    """Cross-entropy of each item's partners under the softmax of cosines over a temperature, by autograd."""

    temperature: float = 0.5
    average: bool = True

    def diagonal(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs) -> Float[Tensor, "N T D"]:
        positive = pairs.positive.to(n)
        itself = torch.eye(len(n), dtype=torch.bool, device=n.device)

        def loss(f: Tensor) -> Tensor:
            unit = f / f.norm(dim=1, keepdim=True)
            logits = (unit @ unit.T / self.temperature).masked_fill(itself, -torch.inf)
            return -(positive * logits.log_softmax(1).masked_fill(itself, 0)).sum()

        return torch.einsum("ndnd->nd", hessian(loss)(n * r))[:, None]
