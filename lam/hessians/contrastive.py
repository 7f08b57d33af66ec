"""Second derivatives of the contrastive loss of one pair, in closed form.

The loss of a pair is ½ d² = 1 − c, with c the cosine of its two outputs f = r n. Its Gauss-Newton curvature in the
outputs depends on where loss∘network is split: `euclidean` counts the normalisation n = f/r to the network, where it is
linearised; `arccos` counts it to the loss. What a diagonal over a linear layer needs are the diagonals of the blocks
H11, H22 (one output with itself) and H12 (one with the other). Sums over pairs live in `lam.hessians.batch`.

Source: Warburg et al. (2023), appendix F; the sign of the arccos cross term follows from the derivation there.
"""

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

Split = Literal["euclidean", "arccos"]
Fix = Literal["positive", "fixed", "full"]
SPLITS: tuple[str, ...] = get_args(Split)
FIXES: tuple[str, ...] = get_args(Fix)


def own_curvature(
    split: Split,
    n: Float[Tensor, "N D"],
    r: Float[Tensor, "N 1"],
    count: Float[Tensor, "N 1"],
    partners: Float[Tensor, "N D"],
) -> Float[Tensor, "N D"]:
    """Sum H11 of each item over its partners.

    euclidean: H11_i = (1 − n1_i²)/r1²; arccos: H11_i = (c + 2 n1_i n2_i − 3 c n1_i²)/r1². Both are linear in the
    partner n2, so the sum over partners b with weights T_ab needs only Σ_b T_ab and Σ_b T_ab n_b.

    Args:
        split: how loss∘network is split.
        n: (N, D) unit outputs.
        r: (N, 1) their lengths before normalisation.
        count: (N, 1) Σ_b T_ab.
        partners: (N, D) Σ_b T_ab n_b.

    Returns:
        (N, D) the summed diagonals.
    """
    if split == "euclidean":
        return count * (1 - n.square()) / r.square()
    cosines = (n * partners).sum(1, keepdim=True)
    return (cosines * (1 - 3 * n.square()) + 2 * n * partners) / r.square()


def cross_curvature(
    n1: Float[Tensor, "*pairs D"],
    r1: Float[Tensor, "*pairs 1"],
    n2: Float[Tensor, "*pairs D"],
    r2: Float[Tensor, "*pairs 1"],
) -> Float[Tensor, "*pairs D"]:
    """Give H12_i = −(1 − n1_i² − n2_i² + c n1_i n2_i)/(r1 r2) of each pair, alike for both splits.

    Args:
        n1: (*pairs, D) unit output of the first item.
        r1: (*pairs, 1) its length before normalisation.
        n2: (*pairs, D) unit output of the second item.
        r2: (*pairs, 1) its length before normalisation.

    Returns:
        (*pairs, D) the diagonals.
    """
    cosine = (n1 * n2).sum(-1, keepdim=True)
    return (n1.square() + n2.square() - 1 - cosine * n1 * n2) / (r1 * r2)
