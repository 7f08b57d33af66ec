"""The curvature of a posterior, by the options of a Laplace method: for the training loss, or for another loss."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import lam
from lam import losses, models
from lam.datasets import TensorImages
from lam.datasets.augmented import TwoViews, Views
from lam.encoders.batches import item_hashes
from lam.hessians import ContrastiveCurvature, Curvature, InfoNCECurvature, SupConCurvature, VarConCurvature
from lam.hessians.losses import from_settings, to_settings
from lam.methods import METHODS as ALL_METHODS
from lam.methods import Aninfonce, Hib, Simclr
from lam.methods.fit import fit
from lam.methods.laplace import Laplace
from lam.methods.laplace_online import LaplaceOnline, OnlineLaplaceStep
from lam.methods.laplace_posthoc import LaplaceMethod, LaplacePosthoc
from lam.pairs import Pairs, Relation
from lam.runs.config_files import load_config
from lam.training import Training
from lam.utils.random import seeded
from tests.encoders.small import make_batches, make_network, same_posterior
from tests.methods import small_data as small
from tests.methods.test_laplace_posthoc import make_data, settings

SUPCON = {"loss": losses.build("supcon", margin=0.7, temperature=0.2)}
METHODS: list[type[LaplaceMethod]] = [LaplacePosthoc, LaplaceOnline]


def train(options: Any, network: Any = None, **changes: Any) -> Any:
    network = models.build("convnet8", dimension=3) if network is None else network
    return options.train(network, make_data(), Training(**{**settings(), **changes}))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("curvature", "expected"),
    [
        ("contrastive", ContrastiveCurvature(0.7)),
        ("supcon", SupConCurvature(0.2)),
        (
            {"name": "supcon", "split": "outputs", "fix": "projected"},
            SupConCurvature(0.2, split="outputs", fix="projected"),
        ),
        ({"name": "infonce", "temperature": 0.5, "fix": "full"}, InfoNCECurvature(0.5, fix="full")),
        (SupConCurvature(0.5), SupConCurvature(0.5)),
        (ContrastiveCurvature(None, fix="projected"), ContrastiveCurvature(0.7, fix="projected")),
    ],
)
def test_what_the_options_leave_out_is_the_losss(method: Any, curvature: Any, expected: Curvature) -> None:
    encoder = train(method(curvature=curvature), **SUPCON).encoder
    assert encoder.posterior.curvature.curvature == expected
    assert encoder.posterior.curvature.h.isfinite().all()
    assert encoder.posterior.curvature.clipped == 0 or expected == ContrastiveCurvature(0.7)
    assert encoder.embed(make_data().batch(range(8))).kappa.isfinite().all()


def test_post_hoc_it_is_a_fit_with_that_curvature_and_online_can_refit_it() -> None:
    data, network = make_data(), models.build("convnet8", dimension=3)
    encoder = train(LaplacePosthoc(curvature="supcon", batch_size=12), network, **SUPCON).encoder
    loader = DataLoader(data, batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(1))
    expected = fit(network, loader, Laplace(curvature=SupConCurvature(0.2)), seed=1, progress=False)
    assert torch.equal(encoder.posterior.curvature.h, expected.posterior.curvature.h)
    whole = train(LaplacePosthoc(curvature="supcon", pairs="dataset"), network, pretrained=True, **SUPCON).encoder
    assert whole.posterior.curvature.counts == (48,)
    plain = train(LaplacePosthoc(curvature="supcon", average=False), network, pretrained=True, **SUPCON).encoder
    assert plain.posterior.curvature.curvature == SupConCurvature(0.2, average=False)
    refitted = train(LaplaceOnline(curvature="supcon", refit=True), **SUPCON).encoder
    assert refitted.posterior.curvature.adds_up
    assert refitted.posterior.curvature.curvature == SupConCurvature(0.2)


@pytest.mark.parametrize("curvature", [SupConCurvature(0.1), InfoNCECurvature(0.2, split="outputs", fix="projected")])
def test_it_is_fitted_saved_loaded_added_and_forgotten(curvature: Any, tmp_path: Path) -> None:
    batches = make_batches(6)

    def fitted(batches: Any) -> Any:
        return lam.fit(make_network(), batches, lam.Laplace(curvature=curvature), progress=False)

    whole, first, second = fitted(batches), fitted(batches[:2]), fitted(batches[2:])
    joined = first + second
    torch.testing.assert_close(joined.posterior.curvature.h, whole.posterior.curvature.h, rtol=1e-12, atol=1e-15)
    whole.save(tmp_path)
    loaded: Any = lam.load(tmp_path, make_network())
    assert same_posterior(loaded, whole)
    assert loaded.posterior.curvature.curvature == curvature
    loaded.forget(batches[2:])
    torch.testing.assert_close(loaded.posterior.curvature.h, first.posterior.curvature.h, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_bad_options_are_refused(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for options, message in (
        ({"curvature": "triplet"}, "curvature.*contrastive, .*supcon.*'triplet'"),
        ({"curvature": {"split": "outputs"}}, "curvature.*None"),
        ({"curvature": {"name": "supcon", "tau": 1}}, "^curvature supcon.*no setting 'tau'.*split, fix, aver"),
        ({"curvature": {"name": "supcon", "temperature": -1.0}}, "temperature.*-1.0"),
        ({"curvature": {"name": "supcon", "split": "arccos"}}, "split.*logits, outputs.*'arccos'"),
        ({"curvature": {"name": "supcon", "temperature": "x"}}, "^curvature={'name': .*}: temperature.*number"),
        ({"curvature": "supcon", "fix": "full"}, "^fix.*setting.*curvature='supcon'"),
        ({"curvature": SupConCurvature(0.5), "fix": "full"}, "^fix.*setting.*curvature=SupConCurvature"),
    ):
        with pytest.raises(ValueError, match=message):
            method(**options)


@pytest.mark.parametrize("method", METHODS)
def test_a_setting_that_neither_has_is_refused_before_training(method: Any) -> None:
    network = models.build("convnet8", dimension=3)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(ValueError, match="SupConCurvature.*temperature.*Contrastive"):
        train(method(curvature="supcon"), network)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


@pytest.mark.parametrize("name", sorted(ALL_METHODS.keys() - {"hib"}))
def test_every_method_says_whose_curvature_its_networks_have(name: str) -> None:
    method = Aninfonce() if name == "aninfonce" else small.quick(name)  # one of the two members has none
    settings_of_loss = method.trained_by(losses.build("infonce", margin=0.7, temperature=0.2), 3)
    network = models.build("convnet8", dimension=3)
    options = {"pretrained": True, "trained_by": settings_of_loss}
    encoder = train(LaplacePosthoc(curvature="own"), network, **options).encoder
    curvature = encoder.posterior.curvature
    settings_of_loss.pop("views", None)
    assert to_settings(curvature.curvature).items() >= settings_of_loss.items()
    assert curvature.h.isfinite().all()
    assert (curvature.h > 0).any()


def test_the_curvature_of_a_loss_of_views_is_over_views_and_reads_no_labels() -> None:
    data, network, loss = make_data(), models.build("convnet8", dimension=3), losses.build(margin=0.7)
    method = Simclr(crop_scale=0.5, jitter=0.2)
    views = Views(crop_scale=0.5, jitter=0.2)
    own = {"pretrained": True, "trained_by": json.loads(json.dumps(method.trained_by(loss, 3)))}

    def fitted(labels: Tensor) -> Any:
        state = torch.get_rng_state()
        images = TensorImages(data.images, labels)
        encoder = LaplacePosthoc(curvature="own").train(network, images, Training(**settings(), **own)).encoder
        assert torch.equal(torch.get_rng_state(), state)
        return encoder

    one, other = fitted(data.labels), fitted(torch.arange(len(data)))
    assert torch.equal(one.posterior.curvature.h, other.posterior.curvature.h)
    assert one.trained_on == item_hashes(data.images)
    assert one.preprocessing == data.preprocessing
    generator = torch.Generator().manual_seed(settings()["seed"])
    loader = DataLoader(TwoViews(data, views), 256, shuffle=True, generator=generator)
    with seeded(settings()["seed"]):
        expected = fit(network, loader, Laplace(curvature=InfoNCECurvature(0.5)), seed=1, progress=False)
    assert torch.equal(one.posterior.curvature.h, expected.posterior.curvature.h)
    plain = LaplacePosthoc(curvature={"name": "infonce", "temperature": 0.5}).resolved(Training(**settings(), **own))
    assert plain.views is None


def test_views_of_places_leave_what_matches_as_it_was() -> None:
    options = LaplacePosthoc(curvature={"name": "infonce", "temperature": 0.5}, pairs="dataset", views=Views(flip=0.5))
    relation = Relation(positive_within=10.0)
    encoder = train(options, pretrained=True, relation=relation).encoder
    assert encoder.relation == replace(relation, scope="dataset")


@pytest.mark.parametrize("without", [Hib(), Aninfonce(n_members=2)], ids=["hib", "aninfonce"])
def test_what_has_no_curvature_has_none_of_another_loss_in_its_place(without: Any) -> None:
    options = {"pretrained": True, "trained_by": without.trained_by(losses.build("supcon", margin=0.7), 3)}
    with pytest.raises(ValueError, match="no curvature.*method.curvature.*contrastive, "):
        train(LaplacePosthoc(curvature="own"), models.build("convnet8", dimension=3), **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("contrastive", ContrastiveCurvature(0.7)),
        ("supcon", SupConCurvature(0.1)),
        ("infonce", InfoNCECurvature(0.1)),
        ("varcon", VarConCurvature(0.1, 0.02)),
    ],
)
def test_its_own_is_that_of_the_loss_that_trains(method: Any, loss: str, expected: Curvature) -> None:
    encoder = train(method(curvature="own"), loss=losses.build(loss, margin=0.7)).encoder
    actual = encoder.posterior.curvature.curvature
    if isinstance(actual, VarConCurvature):
        assert actual.epsilon != 0.02  # the loss's learned values
        actual = replace(actual, epsilon=0.02)
    assert actual == expected


def slow_diagonal(loss: Any, f: Tensor, kappa: float, a: int, pairs: Pairs) -> Tensor:
    """The diagonal of the Hessian of an anchor's own loss with respect to its output, by autograd."""
    rows = torch.arange(len(f))[:, None] == a
    positive, negative = pairs.positive & rows, pairs.negative & rows
    own = Pairs(positive, negative, int(positive.sum()), int(negative.sum()))

    def value(output: Tensor) -> Tensor:
        mean = F.normalize(torch.where(rows, output, f))
        return loss(mean, mean.new_full((len(f),), kappa), own, generator=torch.Generator().manual_seed(0))

    return torch.autograd.functional.hessian(value, f[a]).diagonal()


@pytest.mark.parametrize(
    ("loss", "least"),
    [(losses.MCInfoNCE(20.0, 300), 0.7), (losses.ELK(1.0), 0.99), (losses.HIB(300, 4.0), 0.7)],
    ids=["mcinfonce", "elk", "hib"],
)
@pytest.mark.parametrize("noise", [0.25, 0.5])
def test_a_loss_of_distributions_names_a_curvature_near_its_own(loss: Any, least: float, noise: float) -> None:
    generator, labels, kappa = torch.Generator().manual_seed(0), torch.arange(12) % 3, 20.0
    f = 3 * (torch.eye(3)[labels] + noise * torch.randn(12, 3, generator=generator)).double()
    pairs = Pairs.by_label(labels)
    slow = torch.stack([slow_diagonal(loss.double(), f, kappa, a, pairs) for a in range(12)])

    def correlation(**changes: Any) -> Tensor:
        curvature = from_settings({**loss.curvature(3, kappa), "split": "outputs", "fix": "fixed", **changes})
        fast = curvature.diagonal(F.normalize(f), f.norm(dim=1, keepdim=True), pairs)[:, 0]
        return torch.corrcoef(torch.stack([slow.flatten(), fast.flatten()]))[0, 1]

    assert correlation() > least
    assert correlation() > correlation(temperature=0.05)


def test_batches_without_a_positive_pair_are_refused() -> None:
    batches = [(torch.randn(5, 6), torch.arange(5)) for _ in range(2)]
    for curvature, missing in ((SupConCurvature(0.1), "matched item"), (InfoNCECurvature(0.1), "positive pair")):
        with pytest.raises(ValueError, match=f"10 items.*{missing}"):
            lam.fit(make_network(), batches, lam.Laplace(curvature=curvature), progress=False)


def test_by_data_set_and_in_a_structure_full_is_refused() -> None:
    full = {"name": "supcon", "fix": "full"}
    with pytest.raises(ValueError, match='pairs.*, got "dataset"'):
        LaplacePosthoc(curvature=full, pairs="dataset")
    with pytest.raises(ValueError, match="holds.*cross terms"):
        LaplacePosthoc(curvature=full, structure="kron")
    kron = train(LaplacePosthoc(curvature="supcon", structure="kron"), **SUPCON).encoder
    assert kron.posterior.curvature.clipped == 0


def test_online_training_is_resumed_with_the_same_curvature_alone() -> None:
    step = OnlineLaplaceStep("head", LaplaceOnline(curvature={"name": "supcon", "temperature": 0.1}))
    other = OnlineLaplaceStep("head", LaplaceOnline(curvature={"name": "supcon"}))
    assert step.settings != other.settings
    assert step.settings["curvature"] == {"name": "supcon", "temperature": 0.1}


def test_a_configuration_says_which() -> None:
    config = load_config(
        ["digits", "laplace_posthoc"], ["--method.curvature={name: supcon, split: outputs}", "--training.loss=supcon"]
    )
    options: Any = config.method
    assert options.loss_curvature == SupConCurvature(None, split="outputs")
    short: Any = load_config(["digits", "laplace_online"], ["--method.curvature=infonce"]).method
    assert short.loss_curvature == InfoNCECurvature(None)
    with pytest.raises(ValueError, match="method.curvature.*'nce'"):
        load_config(["digits", "laplace_online"], ["--method.curvature=nce"])
