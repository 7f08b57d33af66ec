"""Kronecker factors and their eigenbasis against NNGeometry, which computes GGNs from the outputs of a network.

It has no loss over pairs. But if the outputs are R_a f_a with R_aᵀ R_a = H_a, its GGN is Σ_a H_a ⊗ φ_a φ_aᵀ/N. So it
serves as a twin if all H_a are positive semi-definite. For real fits, the N decompositions for R_a would cost too much.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lam.hessians import ContrastiveCurvature, Curvature, Ekfac, Full, Kron, SupConCurvature, ggn_of_batch
from lam.hessians.last_layer import outputs
from lam.pairs import Pairs
from tests.hessians.test_last_layer import make

N, D, P = 9, 3, 4
CURVATURES: list[Any] = [
    SupConCurvature(0.3, average=False),
    ContrastiveCurvature(2.0, "euclidean", negative_weight=0.0, average=False),
]


def weighted(curvature: Curvature) -> tuple[Any, DataLoader[Any]]:
    """NNGeometry's view of the layer, and its inputs with the roots R_a."""
    backend = pytest.importorskip("nngeometry.backend")
    features, weight, bias, labels = make(N=N, D=D, P=P)
    _, n, r = outputs(features, weight, bias, torch.float64)
    matrices = curvature.matrices(n, r, Pairs.by_label(labels))
    weights = torch.tensor(list(curvature.terms.values())).double()
    values, vectors = torch.linalg.eigh(torch.einsum("t,ntde->nde", weights, matrices))
    assert values.min() > -1e-10
    roots = values.clamp(min=0).sqrt()[..., None] * vectors.mT
    layer = nn.Linear(P, D).double()
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)

    def rooted(inputs: Tensor, roots: Tensor) -> Tensor:
        return torch.einsum("nij,nj->ni", roots, layer(inputs))

    loader = DataLoader(TensorDataset(features, roots), batch_size=N)
    return backend.TorchHooksJacobianBackend(model=layer, function=rooted), loader


def ours(structure: Any, curvature: Curvature) -> Any:
    features, weight, bias, labels = make(N=N, D=D, P=P)
    empty = structure.zeros(weight, curvature, has_bias=True)
    return ggn_of_batch(empty, features, weight, bias, Pairs.by_label(labels))


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
def test_the_full_ggn_is_theirs(curvature: Curvature) -> None:
    pspace = pytest.importorskip("nngeometry.object.pspace")
    generator, loader = weighted(curvature)
    theirs = N * pspace.PMatDense(generator, examples=loader).to_torch()
    index = torch.arange(D * (P + 1)).view(D, P + 1)
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]])
    torch.testing.assert_close(ours(Full, curvature).h[order][:, order], theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
def test_the_kronecker_factors_and_the_diagonal_in_their_eigenbasis_are_theirs(curvature: Curvature) -> None:
    pspace = pytest.importorskip("nngeometry.object.pspace")
    generator, loader = weighted(curvature)
    ((A, B),) = pspace.PMatKFAC(generator, examples=loader).data.values()
    kron = ours(Kron, curvature)
    torch.testing.assert_close(torch.kron(kron.h, kron.inputs / N), N * torch.kron(B, A), rtol=1e-10, atol=1e-10)
    theirs = pspace.PMatEKFAC(generator, examples=loader)
    theirs.update_diag(loader)
    features, weight, bias, labels = make(N=N, D=D, P=P)
    ekfac = ggn_of_batch(Ekfac.in_basis_of(kron), features, weight, bias, Pairs.by_label(labels))
    (diagonal,) = theirs.data[1].values()
    torch.testing.assert_close(ekfac.h.flatten().sort()[0], N * diagonal.flatten().sort()[0], rtol=1e-9, atol=1e-9)
