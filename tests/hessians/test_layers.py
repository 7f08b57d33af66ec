"""Curvature of every layer against the exact GGN of the whole network, and against BackPACK's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

from lam.hessians import (
    ContrastiveCurvature,
    Curvature,
    Diagonal,
    Kron,
    LayersDiagonal,
    LayersKron,
    SupConCurvature,
    ggn_of_batch,
)
from lam.hessians.last_layer import directions
from lam.hessians.structures.layers import Dense, Outer, flat_weights, is_matrix, jacobian, unflat_weights
from lam.models.layers import find_layers, linearised, own_weights
from lam.pairs import Pairs
from tests.hessians.networks import NETWORKS, D, N, images, settled

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

CURVATURES: list[Any] = [ContrastiveCurvature(2.0, negative_weight=0.4), SupConCurvature(0.3, average=False)]
LABELS = torch.arange(N) % 2


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Any:
    return settled(NETWORKS[request.param]())


def layers_of(network: nn.Module, paths: Any) -> dict[str, Any]:
    modules = {path: network.get_submodule(path) for path in paths}
    return {path: (module, own_weights(module)) for path, module in modules.items()}


def matrices_of(f: Tensor, curvature: Curvature) -> Tensor:
    return curvature.matrices(*directions(f, torch.float64), Pairs.by_label(LABELS))


def of_layers(structure: Any, network: nn.Module, paths: Any, curvature: Curvature) -> Any:
    f, passes = linearised(network, "head", paths, images())
    empty = structure.zeros(layers_of(network, paths), curvature)
    return empty.of_passes(passes, matrices_of(f, curvature))


def exact_jacobians(network: Any) -> dict[str, Tensor]:
    """Jacobians (N, D, ...) of the head's outputs with respect to every parameter, by name."""
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, inputs: Tensor) -> Tensor:
            return network.head(network.features(inputs))

    def outputs(changed: dict[str, Tensor]) -> Tensor:
        return functional_call(Outputs(), {f"network.{name}": value for name, value in changed.items()}, (images(),))

    J: Any = jacrev(outputs)(parameters)
    return J


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
def test_the_diagonal_is_that_of_the_exact_ggn(network: Any, curvature: Curvature) -> None:
    paths = find_layers(network, "head", images(), "all")
    ours, J = of_layers(LayersDiagonal, network, paths, curvature), exact_jacobians(network)
    matrices = matrices_of(network.head(network.features(images())).detach(), curvature)
    seen = 0
    for number, path in enumerate(paths):
        module, weights = layers_of(network, [path])[path]
        sums = ours.sums.split([rows * columns for rows, columns in ours.shapes], 1)[number]
        for name, values in unflat_weights(module, weights, sums).items():
            own = J[f"{path}.{name}"].reshape(N, D, -1)
            exact = torch.einsum("aip,atik,akp->tp", own, matrices, own)
            torch.testing.assert_close(
                values.reshape(exact.shape), exact, rtol=1e-9, atol=1e-9 * float(exact.abs().max())
            )
            seen += exact.shape[1]
    assert seen == sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
def test_the_last_layer_alone_is_the_last_layers_own(network: Any, curvature: Curvature) -> None:
    features, head = network.features(images()).detach(), network.head
    bias = None if head.bias is None else head.bias.detach()
    arguments = features, head.weight.detach(), bias, Pairs.by_label(LABELS)
    for own, several in ((Diagonal, LayersDiagonal), (Kron, LayersKron)):
        expected = ggn_of_batch(own.zeros(arguments[1], curvature, has_bias=bias is not None), *arguments)
        ours = of_layers(several, network, ["head"], curvature)
        for name in own.sum_fields:
            torch.testing.assert_close(getattr(ours, name), getattr(expected, name).reshape(getattr(ours, name).shape))


def test_what_is_formed_of_a_jacobian_is_formed_of_its_matrix(network: Any) -> None:
    paths = find_layers(network, "head", images(), "all")
    _, passes = linearised(network, "head", paths, images())
    J, generator = exact_jacobians(network), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for path, of in zip(paths, passes, strict=True):
        ours, n = jacobian(of.module, of.weights, of.inputs, of.slopes), len(flat_weights(of.module, of.weights))
        unit = torch.eye(n, dtype=torch.float64)
        columns = unflat_weights(of.module, of.weights, unit)
        names = {name: J[f"{path}.{name}"].reshape(N, D, -1) for name in of.weights}
        own = sum(torch.einsum("aip,np->ain", names[name], columns[name].reshape(n, -1)) for name in names)
        assert isinstance(own, Tensor)
        variances, deviations, matrices = draw(n).square(), draw(4, n), draw(N, 2, D, D)
        torch.testing.assert_close(ours.spread(variances), (own * variances) @ own.mT)
        torch.testing.assert_close(ours.along(deviations), torch.einsum("ain,sn->sai", own, deviations))
        torch.testing.assert_close(ours.quadratic(matrices), torch.einsum("ain,atij,ajn->tn", own, matrices, own))
        if is_matrix(of.module):
            rows, n_columns = (part.shape[0] for part in (columns["weight"][0], columns["weight"][0].flatten(1).T))
            basis = tuple(torch.linalg.qr(draw(size, size))[0] for size in (rows, n // rows))
            assert n // rows - n_columns in (0, 1)
            rotation = torch.kron(*basis)
            turned = jacobian(of.module, of.weights, of.inputs, of.slopes, basis)  # pyright: ignore
            torch.testing.assert_close(turned.along(deviations), ours.along(deviations @ rotation.T))
            torch.testing.assert_close(turned.spread(variances), (own @ rotation * variances) @ (own @ rotation).mT)


@pytest.mark.parametrize("cls", [Dense, Outer])
def test_in_float32_a_covariance_of_outputs_that_vary_together_has_no_negative_eigenvalues(cls: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    together = draw(50, D, 1) * draw(50, 1, 500)
    ours = Dense(together) if cls is Dense else Outer(together, draw(50, 7))
    covariance = ours.spread(draw(500 if cls is Dense else 3500).square())
    values = torch.linalg.eigvalsh(covariance)
    assert (values[:, 0] > -1e-14 * values[:, -1]).all()


def test_flat_weights_are_the_parameters(network: Any) -> None:
    for module, weights in layers_of(network, find_layers(network, "head", images(), "all")).values():
        for name, values in unflat_weights(module, weights, flat_weights(module, weights)[None]).items():
            assert torch.equal(values[0], weights[name])


def signed_factors(matrices: Tensor) -> list[tuple[float, Tensor]]:
    """The symmetric factors (D, N, D) of positive and of negative parts, with their signs."""
    values, vectors = torch.linalg.eigh(matrices)
    return [(sign, (vectors * (sign * values).clamp(min=0).sqrt()[:, None]).movedim(2, 0)) for sign in (1.0, -1.0)]


def theirs(network: Any, extension: Any, factors: Tensor) -> Any:
    """A copy of a network without branches, after a pass of BackPACK that starts from these factors."""
    backpack = pytest.importorskip("backpack")
    losses = pytest.importorskip("backpack.extensions.secondorder.diag_ggn.losses")
    kron_losses = pytest.importorskip("backpack.extensions.secondorder.hbp.losses")

    class Seed(nn.MSELoss):  # BackPACK starts only from its own kinds of losses
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return (input + target).sum()

    class Factors:
        @staticmethod
        def sqrt_hessian(module: Any, g_inp: Any, g_out: Any, subsampling: Any = None) -> Tensor:
            return factors

        @staticmethod
        def hessian_is_psd() -> bool:
            return True

    of_loss = losses.DiagGGNLoss if "Diag" in type(extension).__name__ else kron_losses.HBPLoss
    extension.set_module_extension(Seed, of_loss(derivatives=Factors()))
    copy = backpack.extend(nn.Sequential(*settled(NETWORKS["convnet"]()).features, settled(NETWORKS["convnet"]()).head))
    copy.load_state_dict(dict(zip(copy.state_dict(), network.state_dict().values(), strict=True)))
    with backpack.backpack(extension):
        output = copy(images())
        backpack.extend(Seed())(output, torch.zeros_like(output)).backward()
    return copy


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
@pytest.mark.filterwarnings("ignore:.*backward hook:UserWarning")
def test_the_diagonal_is_backpacks(curvature: Curvature) -> None:
    extensions = pytest.importorskip("backpack.extensions")
    network = settled(NETWORKS["convnet"]())
    paths = find_layers(network, "head", images(), "all")
    ours = of_layers(LayersDiagonal, network, paths, curvature)
    matrices = matrices_of(network.head(network.features(images())).detach(), curvature)
    for term in range(len(curvature.terms)):
        expected = 0
        for sign, factors in signed_factors(matrices[:, term]):
            copy = theirs(network, extensions.DiagGGNExact(), factors)
            expected = expected + sign * torch.cat([p.diag_ggn_exact.flatten() for p in copy.parameters()])
        parts = ours.sums[term].split([rows * columns for rows, columns in ours.shapes])
        own = [
            values.flatten()
            for (module, weights), part in zip(layers_of(network, paths).values(), parts, strict=True)
            for values in unflat_weights(module, weights, part[None]).values()
        ]
        torch.testing.assert_close(torch.cat(own), expected, rtol=1e-9, atol=1e-12)


def kron_of_a_convnet() -> tuple[Any, Any, Tensor]:
    """A network without branches, the factors (B, A) of each layer, and roots (D, N, D) of the output curvatures."""
    network, curvature = settled(NETWORKS["convnet"]()), SupConCurvature(0.3, average=False)
    ours = of_layers(LayersKron, network, find_layers(network, "head", images(), "all"), curvature)
    outputs = ours.sums[0].split([rows**2 for rows, _ in ours.shapes])
    inputs = (ours.inputs / ours.n_items).split([columns**2 for _, columns in ours.shapes])
    factors = [
        (B.view(rows, rows), A.view(columns, columns))
        for (rows, columns), B, A in zip(ours.shapes, outputs, inputs, strict=True)
    ]
    matrices = matrices_of(network.head(network.features(images())).detach(), curvature)[:, 0]
    return network, factors, signed_factors(matrices)[0][1]


@pytest.mark.filterwarnings("ignore:.*backward hook:UserWarning")
def test_the_factors_of_inputs_and_of_the_last_layer_are_backpacks() -> None:
    extensions = pytest.importorskip("backpack.extensions")
    network, factors, roots = kron_of_a_convnet()
    copy = theirs(network, extensions.KFLR(), roots)
    layers = [module for module in copy if hasattr(module, "weight")]
    for (B, A), module in zip(factors, layers, strict=True):
        their_B, their_A = module.weight.kflr  # of a convolution: B for the bias, A without the bias's column
        torch.testing.assert_close(A[: len(their_A), : len(their_A)], their_A, rtol=1e-9, atol=1e-12)
        if isinstance(module, nn.Linear):
            torch.testing.assert_close(B, their_B, rtol=1e-9, atol=1e-12)


def test_the_factors_of_every_layer_are_nngeometrys() -> None:
    backend, pspace = pytest.importorskip("nngeometry.backend"), pytest.importorskip("nngeometry.object.pspace")
    network, factors, roots = kron_of_a_convnet()
    model = nn.Sequential(*network.features, network.head)

    def rooted(inputs: Tensor, roots: Tensor) -> Tensor:
        return torch.einsum("nij,ni->nj", roots, model(inputs))

    loader = DataLoader(TensorDataset(images(), roots.movedim(0, 2)), batch_size=N)
    generator = backend.TorchHooksJacobianBackend(model=model, function=rooted)
    their_factors = pspace.PMatKFAC(generator, examples=loader).data.values()
    for (B, A), (their_A, their_B) in zip(factors, their_factors, strict=True):
        torch.testing.assert_close(torch.kron(B, A), N * torch.kron(their_B, their_A), rtol=1e-9, atol=1e-12)


def test_a_diagonal_in_parts_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    J, matrices = torch.randn(3, 4, 11), torch.randn(3, 2, 4, 4)
    whole = Dense(J).quadratic(matrices)
    torch.testing.assert_close(whole, torch.einsum("adp,atde,aep->tp", J, matrices, J))
    monkeypatch.setattr("lam.hessians.structures.layers._CACHED", 5)
    torch.testing.assert_close(Dense(J).quadratic(matrices), whole)
