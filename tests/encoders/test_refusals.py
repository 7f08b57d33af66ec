"""Errors of an encoder, raised before any work; each names the wrong argument."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lam
from lam.encoders.ensemble import EnsembleEncoder
from lam.hessians import ContrastiveCurvature, InfoNCECurvature
from lam.pairs import Relation
from tests.encoders.small import fit, make_batches, make_network
from tests.helpers import unchecked


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (None, {"margin": 2.5}, r"margin.*\(0, 2\]"),
        (None, {"margin": None}, "needs a margin"),
        (None, {"curvature": "supcon"}, "SupConCurvature .*temperature, got None"),
        (None, {"curvature": "cosine"}, "curvature.*contrastive, supcon, .*'cosine'"),
        (None, {"curvature": InfoNCECurvature}, "supcon.*lam.hessians.*<class"),
        (None, {"curvature": ContrastiveCurvature(0.7, fix="full"), "pairs": "dataset"}, 'pairs.*, got "dataset"'),
        (None, {"prior_precision": 0.0}, "prior_precision.*positive"),
        ([], {}, "gave no batch"),
        ([(torch.randn(1, 6), torch.tensor([0]))], {}, "2 items.*pair, got 1"),
        ([(torch.randn(5, 6), torch.zeros(5, dtype=torch.long))], {}, "5 items.*negative pair"),
        ([(torch.randn(5, 6), torch.arange(5))], {}, "5 items.*positive pair"),
        (
            [(torch.randn(5, 6), torch.zeros(5, dtype=torch.long))],
            {"curvature": InfoNCECurvature(0.1)},
            '5 items.*curvature.*pairs="dataset"',
        ),
        ([(torch.randn(5, 6), torch.arange(5))], {"layers": "all"}, '5 items.*positive pair: [^"]*$'),
        ([(torch.randn(5, 6), torch.arange(4))], {}, "5 items.*4 labels"),
        ([torch.randn(5, 6)], {}, "loader.*inputs with targets"),
        ([(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))], {}, "first batch.*empty"),
    ],
)
def test_bad_input_to_fit_is_refused(batches, options, message, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in production
    batches = make_batches() if batches is None else batches
    with pytest.raises(ValueError, match=message):
        unchecked(fit)(batches, **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "angle"}, "split.*euclidean, arccos.*'angle'"),
        ({"fix": "half"}, "fix.*positive, fixed, full, projected.*'half'"),
        ({"negative_weight": 2.0}, r"negative_weight.*\[0, 1\].*2.0"),
    ],
)
def test_bad_settings_of_a_curvature_are_refused(settings, message, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        ContrastiveCurvature(0.7, **settings)


def test_an_unknown_scope_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="pairs.*batch, dataset.*'epoch'"):
        fit(pairs="epoch")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(8, dtype=torch.long), "8 items.*no negative pair"),
        (torch.arange(8), "8 items.*no positive pair"),
        (torch.arange(7), "8 items.*7 labels"),
    ],
)
def test_bad_labels_are_refused_before_any_work(labels, message):
    with pytest.raises(ValueError, match=message):
        lam.fit_features(torch.full((8, 4), float("nan")), labels, torch.eye(3, 4), margin=0.7)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize(
    ("network", "message"),
    [
        ([make_network()], r"a torch.nn.Module, got list: give .* torch.nn.ModuleList\(members\)"),
        (nn.Linear, "a torch.nn.Module, got type"),
        (nn.ModuleList([make_network()] * 2), "members.*different networks"),
    ],
)
def test_what_cannot_hold_the_saved_networks_is_refused(network: Any, message: str, tmp_path: Path) -> None:
    EnsembleEncoder([make_network(seed) for seed in range(2)], "2", rotations=None).save(tmp_path)
    with pytest.raises(ValueError, match=message):
        lam.load(tmp_path, network)


@pytest.mark.parametrize(
    ("name", "labels"), [("labels", torch.zeros(6, dtype=torch.long)), ("targets", [3] * 6)], ids=["own", "of others"]
)
def test_labels_of_a_data_set_are_checked_before_the_network_runs(name: str, labels: Any):
    class OneClass(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise AssertionError("an image was read")

    dataset = OneClass()
    setattr(dataset, name, labels)
    with pytest.raises(ValueError, match="6 items.*one label"):
        lam.fit(make_network(), torch.utils.data.DataLoader(dataset, batch_size=2), margin=0.7, progress=False)


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(["cat", "dog", "bird", "cow"], id="names of classes"),
        pytest.param(["cat"] * 64, id="names of items"),
        pytest.param([0, 1, 2, 3], id="classes"),
        pytest.param({0: "cat", 1: "dog"}, id="mapping"),
        pytest.param(Path("labels.csv"), id="path"),
        pytest.param(F.one_hot(torch.arange(64) % 4), id="one-hot"),
        pytest.param([[0, 1]] * 64, id="columns"),
        pytest.param([-1] + [0] * 63, id="missing, for a sampler"),
        pytest.param(torch.zeros(64), id="floats"),
    ],
)
@pytest.mark.parametrize("name", ["labels", "targets"])
def test_only_a_list_of_every_items_label_is_checked_before_the_network_runs(name: str, listed: Any) -> None:
    dataset = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*make_batches(), strict=True)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    expected = lam.fit(make_network(), loader, margin=0.7, progress=False).posterior.curvature
    setattr(dataset, name, listed)
    found = lam.fit(make_network(), loader, margin=0.7, progress=False).posterior.curvature
    assert all(torch.equal(value, expected.tensors()[key]) for key, value in found.tensors().items())


def test_features_that_are_not_finite_are_named_by_their_place_in_the_data():
    batches = make_batches()
    batches[2][0][5, 0] = float("nan")
    for options in ({}, {"pairs": "dataset"}):
        with pytest.raises(ValueError, match="features.*nan.*item 37"):
            fit(batches, **options)
    for encoder in (fit(), fit(layers="all")):
        for use in (encoder.embed, encoder.tune, encoder.forget):
            with pytest.raises(ValueError, match="nan.*item 37"):
                use(batches)
    images = [(inputs.view(-1, 1, 2, 3), labels) for inputs, labels in batches]
    known = [(inputs.nan_to_num(), labels) for inputs, labels in images]
    encoder = lam.fit(nn.Sequential(nn.Flatten(), make_network()), known, margin=0.7, progress=False)
    with pytest.raises(ValueError, match="nan.*item 37"):
        encoder.recommend(images)


def test_an_encoder_that_could_not_be_loaded_is_not_saved(tmp_path: Path):
    encoder = fit()
    encoder.n_samples = 1
    with pytest.raises(ValueError, match="n_samples.*2.*1"):
        encoder.save(tmp_path / "encoder")
    assert not (tmp_path / "encoder").exists()


def test_bad_input_to_tune_is_refused():
    encoder = fit()
    with pytest.raises(ValueError, match="by must.*calibration, marginal_likelihood.*'luck'"):
        unchecked(lam.BayesianEncoder.tune)(encoder, make_batches(), by="luck")
    with pytest.raises(ValueError, match="options of marginal_likelihood are step; got n_samples"):
        encoder.tune(make_batches(), by="marginal_likelihood", n_samples=3)
    unused = iter(make_batches())
    with pytest.raises(ValueError, match="calibration.*n_samples, .*refinements.*leest"):
        encoder.tune(unused, leest=1e-3)
    assert len(list(unused)) == 4
    with pytest.raises(ValueError, match="inputs with labels"):
        encoder.tune([make_batches()[0][0]])
    with pytest.raises(ValueError, match="2 items.*pair, got 1"):
        encoder.tune([(torch.randn(1, 6), torch.tensor([0]))])


@pytest.mark.parametrize("value", [1e20, 1e38])
def test_features_too_large_to_square_are_named_and_never_fitted(value: float):
    features, labels = torch.randn(12, 5), torch.arange(12) % 3
    features[7, 2] = value
    layer = torch.eye(3, 5)
    with pytest.raises(ValueError, match=r"4.3e\+09.*size.*item 7, feature 2"):
        lam.fit_features(features, labels, layer, margin=0.7)
    encoder = lam.fit_features(torch.randn(12, 5), labels, layer, margin=0.7)
    with pytest.raises(ValueError, match="at item 7, feature 2"):
        encoder.embed(features)
    sums = torch.full_like(encoder.posterior.curvature.sums, torch.inf)
    with pytest.raises(ValueError, match="curvature of.*finite"):
        replace(encoder.posterior, curvature=replace(encoder.posterior.curvature, sums=sums))


@pytest.mark.parametrize("labels", [torch.rand(12), torch.zeros(12, 2, dtype=torch.long)])
def test_labels_that_are_no_vector_of_integers_are_refused(labels):
    with pytest.raises(ValueError, match="labels.*integers.*shape"):
        lam.fit_features(torch.randn(12, 5), labels, torch.eye(3, 5), margin=0.7)


def test_encoders_with_other_settings_or_networks_do_not_add_up():
    batches = make_batches()
    with pytest.raises(ValueError, match="same settings.*prior_precision"):
        fit(batches) + fit(batches, prior_precision=2.0)
    other = make_network()
    with torch.no_grad():
        other[0].weight.add_(1)
    with pytest.raises(ValueError, match="of one network"):
        fit(batches) + lam.fit(other, batches, margin=0.7, progress=False)


@pytest.mark.parametrize("fix", ["fixed", "full"])  # "full" forms all pairs at once, "fixed" in blocks
@pytest.mark.parametrize(
    ("apart", "message"),
    [(0.01, "20 places.*no negative pair"), (99.0, "no positive.*among 20 items")],
)
def test_places_need_near_and_far_places(fix: Any, apart: float, message: str):
    inputs, positions = torch.randn(20, 6), apart * torch.arange(20.0)[:, None]
    options = lam.Laplace(curvature=ContrastiveCurvature(0.7, fix=fix), pairs=Relation(positive_within=10.0))
    with pytest.raises(ValueError, match=message):
        lam.fit_features(inputs, positions, torch.eye(3, 6), options=options)


@pytest.mark.parametrize("pairs", ["batch", "dataset"])
def test_a_curvature_of_zero_is_refused(pairs: Any):
    labels, network = torch.arange(40) % 6, nn.Linear(6, 6, bias=False)
    nn.init.eye_(network.weight)
    options = lam.Laplace(curvature=InfoNCECurvature(temperature=1e-3), pairs=pairs)
    with pytest.raises(ValueError, match="temperature"):
        lam.fit(network, [(torch.eye(6)[labels], labels)], options, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"least": 0.0}, "0 < least < greatest, got 0.0 and"),
        ({"least": 1e5, "greatest": 1e3}, "0 < least < greatest, got 100000.0 and 1000.0"),
        ({"refinements": -1}, "refinements.*0"),
    ],
)
def test_ranges_of_scales_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        fit().tune(make_batches(), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.relu, make_batches()), "network.*torch.nn.Module.*builtin_function_or_method"),
        (("network.pt", make_batches()), "network.*torch.nn.Module.*str"),
        ((make_batches(), make_network()), r"torch.nn.Module.*list: .*lam.fit\(network, loader"),
        ((make_network(), make_batches(), 0.7), "options.*lam.Laplace.*0.7.*margin=0.7"),
        ((make_network(), make_batches(), {"margin": 0.7}), "options.*lam.Laplace.*{'margin': 0.7}"),
        ((make_network(), make_batches(), lam.Laplace), "options.*lam.Laplace.*<class"),
    ],
)
@pytest.mark.usefixtures("as_in_production")
def test_arguments_of_another_kind_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        unchecked(lam.fit)(*arguments, progress=False)


@pytest.mark.filterwarnings("ignore:the held-out items contain")
@pytest.mark.parametrize("options", [{}, {"pairs": "dataset"}, {"layers": "all"}, {"head": "train"}])
def test_missing_labels_of_a_batch_are_refused(options):
    batches = [(inputs, labels - 1) for inputs, labels in make_batches()]
    with pytest.raises(ValueError, match="labels.*-1"):
        fit(batches, **options)
    encoder = fit()
    for use in (encoder.tune, encoder.forget, encoder.learn_ambiguity, lambda given: lam.evaluate(encoder, given)):
        with pytest.raises(ValueError, match="labels.*-1"):
            use(batches)


@pytest.mark.usefixtures("as_in_production")
def test_an_encoder_moves_to_devices_but_not_to_a_type():
    encoder, inputs = fit(), make_batches()[0][0]
    expected = encoder.embed(inputs).kappa
    with pytest.raises(ValueError, match=r"got torch.float16: encoder.network.to\(torch.float16\)"):
        unchecked(lam.BayesianEncoder.to)(encoder, torch.float16)
    assert torch.equal(encoder.embed(inputs).kappa, expected)
    encoder.network.half()
    torch.testing.assert_close(encoder.embed(inputs.half()).kappa, expected, rtol=0.02, atol=0)


@pytest.mark.usefixtures("as_in_production")
def test_what_is_no_encoder_or_reference_is_refused():
    with pytest.raises(ValueError, match="encoder.*lam.Encoder.*Sequential: lam.fit"):
        unchecked(lam.evaluate)(make_network(), make_batches())
    with pytest.raises(ValueError, match=r"reference.*\(O, P\).*got list"):
        unchecked(lam.evaluate)(fit(), make_batches(), reference=make_batches())
    with pytest.raises(TypeError, match="unsupported operand"):
        fit() + make_network()


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "encoder").write_text("mine")
    with pytest.raises(ValueError, match="encoder.*a file: "):
        fit().save(tmp_path / "encoder")
    assert (tmp_path / "encoder").read_text() == "mine"
