from pathlib import Path
from typing import Any

import lightning_fabric
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import DataLoader

import lam
from lam import datasets, models
from lam.hessians import ContrastiveCurvature, SupConCurvature, VarConCurvature
from lam.methods import LaplaceOnline, LaplacePosthoc
from lam.methods.fit import fit
from lam.methods.laplace import Laplace
from lam.pairs import Mining, Pairs, Relation
from lam.posteriors import LAYERS_POSTERIORS, POSTERIORS
from tests.helpers import contrastive_ggn


@pytest.mark.long
def test_torchvisions_resnet18_becomes_bayesian_on_an_image_folder(photographs: Path, tmp_path: Path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = torchvision.models.resnet18(num_classes=64)
    images = datasets.load("folder", root=photographs, preprocessing={"mode": "RGB", "size": [64, 64]})
    loader = DataLoader(images.train, batch_size=8, shuffle=True)
    encoder = lam.fit(network, loader, lam.Laplace(margin=0.7, prior_precision=1e6), progress=False)
    assert encoder.head == "fc"
    assert encoder.posterior.weight.shape == (64, 512)
    test = DataLoader(images.test, batch_size=4)
    embeddings = encoder.embed(test)
    assert embeddings.mean.shape == (len(images.test), 64)
    torch.testing.assert_close(embeddings.mean.norm(dim=1), torch.ones(len(images.test)))
    expected = F.normalize(network.eval()(next(iter(test))[0]).detach())
    assert ((embeddings.mean[:4] * expected).sum(1) > 0.5).all()
    assert encoder.preprocessing == images.train.preprocessing
    metrics = lam.evaluate(encoder, test, n_samples=8).metrics
    assert 0 <= metrics["recall@1"] <= 1
    encoder.save(tmp_path / "encoder")
    other = torchvision.models.resnet18(num_classes=64)
    assert torch.equal(lam.load(tmp_path / "encoder", other).embed(test).kappa, embeddings.kappa)


def test_a_residual_network_of_lam_is_rebuilt_by_name(photographs: Path, tmp_path: Path):
    images = datasets.load("folder", root=photographs, preprocessing={"mode": "RGB", "size": [64, 64]}).train
    network = models.build("resnet18", dimension=64)
    encoder = lam.fit(network, DataLoader(images, batch_size=8, shuffle=True), margin=0.7, progress=False)
    encoder.save(tmp_path / "encoder")
    image = encoder.preprocessing(photographs / "oak" / "3.jpg")[None]
    loaded = lam.load(tmp_path / "encoder")
    torch.testing.assert_close(loaded.embed(image).kappa, encoder.embed(image).kappa)


def test_a_loader_sorted_by_class_needs_pairs_over_the_data_set(photographs: Path):
    images = datasets.load("folder", root=photographs, preprocessing={"mode": "RGB", "size": [64, 64]})
    train = images.train.subset(images.train.labels.argsort())
    loader = DataLoader(train, batch_size=int(train.labels.bincount()[0]))
    network = models.build("resnet18", dimension=8)
    with pytest.raises(ValueError, match='negative pair.*pairs="dataset"'):
        lam.fit(network, loader, margin=0.7, progress=False)
    encoder = lam.fit(network, loader, lam.Laplace(margin=2.0, pairs="dataset"), progress=False)
    assert encoder.posterior.curvature.counts[1] > 0


def test_the_pairs_of_the_curvature_can_be_mined_and_are_forgotten_as_they_were_fitted():
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(16, 6, generator=generator), torch.arange(16) % 4) for _ in range(3)]
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    everything = fit(network, batches, margin=0.7, progress=False)
    weighted = ContrastiveCurvature(0.7, negative_weight=0.5)
    semihard = Relation(miner="semihard", max_pairs=7)
    options = Laplace(curvature=weighted, pairs=semihard, structure="diag")
    mined, first = (fit(network, some, options, progress=False) for some in (batches, batches[:1]))
    assert mined.posterior.curvature.counts[1] < everything.posterior.curvature.counts[1]
    layer: Any = network[2]
    expected = Mining("semihard", 7).choose(
        F.normalize(network(batches[0][0])),
        Pairs.by_label(batches[0][1]),
        batches[0][1],
        margin=0.7,
        generator=torch.Generator().manual_seed(0),
    )
    features = network[1](network[0](batches[0][0])).detach()
    twin = contrastive_ggn(
        features, layer.weight.detach(), layer.bias.detach(), expected, margin=0.7, negative_weight=0.5
    )
    torch.testing.assert_close(first.posterior.curvature.h.float(), twin.h.float())
    mined.forget(batches[1:])
    torch.testing.assert_close(mined.posterior.curvature.h.float(), first.posterior.curvature.h.float())


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior_ratio": None}, "prior_ratio.*None"),
        ({"prior_ratio": -1.0}, "prior_ratio.*-1"),
        ({"prior_precision": 0}, "prior_precision.*got 0"),
        ({"prior_precision": 1e-42}, "prior_precision.*1e-30.*1e-42"),
        ({"prior_precision": True}, "prior_precision.*True"),
        ({"likelihood_scale": -1}, "likelihood_scale.*-1"),
        ({"seed": "x"}, "seed.*'x'"),
        ({"seed": 2**64}, "seed.*-2⁶³.*2⁶⁴ - 1.*18446744073709551616"),
        ({"structure": ["diag"]}, r"structure.*diag, kron, ekfac, full, low_rank.*\['diag'\]"),
        ({"max_memory": None}, "max_memory.*bytes.*None"),
        ({"curvature": SupConCurvature()}, "SupConCurvature must.*temperature, got None"),
        ({"curvature": VarConCurvature()}, "VarConCurvature.*temperature and epsilon"),
    ],
)
def test_a_setting_outside_its_range_is_refused_before_a_batch(layers: str, settings: Any, message: str):
    taken = []

    def batches() -> Any:
        for batch in range(3):
            taken.append(batch)
            yield torch.randn(8, 4), torch.arange(8) % 4

    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    given = {"margin": 0.7, "layers": layers, **settings}
    seed = given.pop("seed", 0)
    with pytest.raises(ValueError, match=message):
        fit(network, batches(), Laplace(**given), seed=seed, progress=False)
    assert not taken


@pytest.mark.usefixtures("as_in_production")
def test_labels_and_a_second_margin_are_not_options():
    network, inputs, labels = nn.Linear(4, 3), torch.randn(8, 4), torch.arange(8) % 4
    with pytest.raises(ValueError, match=r"lam\.Laplace.*tensor\(\[0, 1, 2.*\[\(inputs, labels\)\]"):
        fit(network, inputs, labels, margin=0.7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"margin.*Laplace\(margin=0\.7"):
        fit(network, [(inputs, labels)], Laplace(margin=0.5), margin=0.7)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("method", [LaplacePosthoc, LaplaceOnline])
def test_methods_refuse_a_prior_out_of_range_before_they_train(method: Any):
    for value, reason in ((1e-40, "at least 1e-30, got 1e-40"), (0, "got 0")):
        with pytest.raises(ValueError, match=f"prior_precision must be .*{reason}"):
            method(prior_precision=value)
    with pytest.raises(ValueError, match="prior_precision must be .* got None"):
        LaplaceOnline(prior_precision=None)


@pytest.mark.parametrize(
    "settings",
    [
        *({"structure": structure, "pairs": pairs} for structure in POSTERIORS for pairs in ("batch", "dataset")),
        *({"structure": structure, "layers": "all"} for structure in LAYERS_POSTERIORS),
    ],
    ids=str,
)
def test_a_curvature_that_is_not_finite_is_refused_in_words(settings: Any):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 6, generator=generator), torch.arange(16) % 4) for _ in range(2)]
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    message = r"temperature=1e-30\).*finite.*too large"
    with pytest.raises(ValueError, match=message):
        fit(network, batches, Laplace(curvature=SupConCurvature(1e-30), **settings), progress=False)


@pytest.mark.parametrize("layers", ["last", "all"])
def test_items_of_one_class_alone_are_not_told_to_be_shuffled_alone(layers: str):
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batches: Any = [(torch.randn(16, 6), torch.zeros(16, dtype=torch.int64))]
    with pytest.raises(ValueError, match="negative pair: .*no negative pair$"):
        fit(network, batches, Laplace(margin=0.7, layers=layers), progress=False)


@pytest.mark.parametrize("wrap", ["fabric", "parallel"])
def test_a_wrapped_network_is_fitted_as_it_is(wrap: str) -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    if wrap == "fabric":
        wrapped: Any = lightning_fabric.Fabric(accelerator="cpu", precision="bf16-mixed").setup(network)
    else:
        wrapped = nn.DataParallel(network)
    batches = [(torch.randn(16, 4), torch.arange(16) % 4)]
    encoder, expected = (fit(one, batches, margin=0.7, progress=False) for one in (wrapped, network))
    assert encoder.network is network
    torch.testing.assert_close(encoder.embed(batches).kappa, expected.embed(batches).kappa, rtol=0, atol=0)


def test_an_encoder_prints_as_one_line() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    encoder = fit(network, [(torch.randn(16, 4), torch.arange(16) % 4)], margin=0.7, progress=False)
    shown = repr(encoder)
    assert shown.startswith("BayesianEncoder(Sequential, dimension=3, KronPosterior(n_items=16, ")
    assert len(shown) < 200
    assert "tensor" not in shown
