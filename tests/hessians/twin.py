"""The slow twin of the curvature: JᵀHJ of every pair by automatic differentiation, in float64."""

import torch
from torch import Tensor
from torch.func import hessian, jacrev


def pair_loss(n: Tensor) -> Tensor:
    """½ ‖n1 − n2‖² of two unit outputs."""
    return 0.5 * (n[0] - n[1]).square().sum()


def pair_loss_arccos(f: Tensor) -> Tensor:
    """1 − cosine of two outputs of any length."""
    return 1 - (f[0] @ f[1]) / (f[0].norm() * f[1].norm())


def diagonal_of_pair(first: Tensor, second: Tensor, theta: Tensor, split: str, cross: bool) -> Tensor:
    """The diagonal (D, F) of JᵀHJ for ½ d² of one pair of inputs (F,), with respect to theta."""
    inputs = torch.stack([first, second])

    def linear(theta: Tensor) -> Tensor:
        return inputs @ theta.T

    def unit(theta: Tensor) -> Tensor:
        f = linear(theta)
        return f / f.norm(dim=1, keepdim=True)

    model, loss = (unit, pair_loss) if split == "euclidean" else (linear, pair_loss_arccos)
    J = jacrev(model)(theta)
    H = hessian(loss)(model(theta))
    if not cross:
        H = H.clone()
        H[0, :, 1] = 0
        H[1, :, 0] = 0
    return torch.einsum("aijk,aibl,bljk->jk", J, H, J)


def ggn(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    split: str,
    cross: bool,
) -> Tensor:
    """Sum target × diagonal over all ordered pairs; with a bias, its entries are the last column."""
    inputs, theta = features.double(), weight.double()
    if bias is not None:
        inputs = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
        theta = torch.cat([theta, bias.double()[:, None]], 1)
    total = torch.zeros_like(theta)
    for a, b in targets.nonzero().tolist():
        total += targets[a, b] * diagonal_of_pair(inputs[a], inputs[b], theta, split, cross)
    return total
