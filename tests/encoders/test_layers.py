"""Encoders whose posterior is over several layers."""

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lam
from lam import models
from lam.encoders.layers import LayersEncoder
from lam.hessians import ContrastiveCurvature
from lam.methods import LaplacePosthoc
from lam.pairs import Relation
from lam.posteriors import LAYERS_POSTERIORS
from tests.encoders.small import fit, make_batches, make_network, same_posterior
from tests.helpers import unchecked
from tests.methods.small_data import images, training

KINDS: list[dict[str, Any]] = [
    {"layers": "all"},
    {"layers": "all", "structure": "kron"},
    {"layers": ["0"], "predictive": "sampled"},
    {"layers": ["0", "2"], "structure": "kron", "predictive": "sampled"},
]


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"prior_precision": 10.0, **request.param}


def test_fit_puts_the_posterior_over_the_layers(kind: dict[str, Any]):
    batches = make_batches()
    encoder: Any = fit(batches, **kind)
    network: Any = encoder.network
    assert type(encoder) is LayersEncoder
    assert type(encoder.posterior) is LAYERS_POSTERIORS[kind.get("structure", "diag")]
    assert encoder.posterior.layers == (("0", "2") if kind["layers"] == "all" else tuple(kind["layers"]))
    assert encoder.posterior.predictive == kind.get("predictive", "linearised")
    assert encoder.posterior.curvature.counts == fit(batches).posterior.curvature.counts
    inputs = torch.cat([inputs for inputs, _ in batches])
    embeddings = encoder.embed(batches)
    assert torch.equal(embeddings.mean, F.normalize(network(inputs).detach()))
    assert embeddings.kappa.isfinite().all()
    assert (embeddings.variance > 0).all()
    torch.testing.assert_close(encoder.embed(inputs[:1]).kappa, embeddings.kappa[:1])
    encoder.mean = "sampled"
    assert encoder.embed(inputs).mean_samples == 32
    assert encoder.dimension == 3


def test_the_network_stays_as_it_is(kind: dict[str, Any]):
    network = make_network().train()
    network[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    encoder = lam.fit(network, make_batches(), lam.Laplace(margin=0.7, **kind), progress=False)
    encoder.embed(make_batches())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network.training
    assert [parameter.requires_grad for parameter in network.parameters()] == [False, True, True, True]
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(module._forward_hooks for module in network.modules())


def test_batches_add_up_and_are_forgotten(kind: dict[str, Any]):
    batches = make_batches()
    whole, one, other = fit(batches, **kind), fit(batches[:2], **kind), fit(batches[2:], **kind)
    both = one + other
    assert type(both) is LayersEncoder
    assert both.posterior.n_items == 64
    torch.testing.assert_close(both.posterior.curvature.sums, whole.posterior.curvature.sums, rtol=1e-9, atol=1e-9)
    whole.forget(batches[2:])
    torch.testing.assert_close(whole.posterior.curvature.sums, one.posterior.curvature.sums, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="32 items can.*got 32"):
        one.forget(batches[:2])
    with pytest.raises(ValueError, match="same trained weights"):
        _ = one + fit(batches[2:], **{**kind, "layers": ["2"]})
    predictive = "linearised" if kind.get("predictive") == "sampled" else "sampled"
    with pytest.raises(ValueError, match="same settings .* 'predictive'"):
        _ = one + fit(batches[2:], **{**kind, "predictive": predictive})


@pytest.mark.long
def test_it_is_tuned_evaluated_saved_and_loaded(kind: dict[str, Any], tmp_path: Path):
    batches = make_batches()
    encoder = fit(batches, **kind)
    encoder.tune(batches, by="marginal_likelihood")
    encoder.tune(make_batches(2, seed=1), least=1e2, greatest=1e6, refinements=1, n_samples=8)
    encoder.save(tmp_path)
    loaded = lam.load(tmp_path, make_network(seed=1))
    assert isinstance(loaded, LayersEncoder)
    assert same_posterior(loaded, encoder)
    assert loaded.tuning == encoder.tuning
    for name in ("kappa", "variance", "mean"):
        assert torch.equal(getattr(loaded.embed(batches), name), getattr(encoder.embed(batches), name))
    metrics: Any = lam.evaluate(loaded, make_batches(2, seed=1), [10 * torch.randn(20, 6)], n_samples=8).metrics
    assert 0 <= metrics["ece"] <= 1
    assert metrics["share_clipped"] == encoder.posterior.curvature.clipped
    assert "variance_clipped" not in metrics  # features alone do not say


@pytest.mark.long
def test_it_learns_its_ambiguity_and_recommends_a_score():
    padded = [(F.pad(inputs, (0, 58)).view(-1, 1, 8, 8), labels) for inputs, labels in make_batches()]
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
    encoder = lam.fit(network, padded, lam.Laplace(margin=0.7, layers="all"), progress=False)
    assert encoder.recommend(padded).metrics()
    encoder.trained_on = []
    encoder.learn_ambiguity(padded)
    assert encoder.embed(padded).p_known is not None


class Named(nn.Module):
    """Takes its inputs by name, as a model of texts does."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def forward(self, masked: bool, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.network(tokens * mask if masked else tokens)


def test_inputs_come_by_name_and_need_not_all_be_tensors():
    batches = make_batches()
    named = [
        ({"masked": True, "tokens": inputs, "mask": torch.ones_like(inputs)}, labels) for inputs, labels in batches
    ]
    encoder = lam.fit(Named(), named, lam.Laplace(margin=0.7, layers="all"), progress=False)
    plain = fit(batches, layers="all")
    torch.testing.assert_close(encoder.embed(named).kappa, plain.embed(batches).kappa)
    encoder.tune(named, least=1e2, greatest=1e4, refinements=0)


def test_what_it_costs_is_said_before(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]):
    with caplog.at_level(logging.INFO):
        fit(layers="all")
    cost = "123 weights.*2 layers.*3 backward.*1,968 bytes, 1,152 bytes.*180 bytes.*492 bytes"
    assert re.search(cost, caplog.text)
    lam.fit(make_network(), make_batches(), lam.Laplace(margin=0.7, layers="all"))
    assert re.search(cost, capsys.readouterr().err)


def test_mined_pairs_are_those_of_the_last_layers_fit():
    pairs = Relation(miner="semihard")
    several, last = fit(layers=["2"], pairs=pairs), fit(pairs=pairs, structure="diag")
    torch.testing.assert_close(
        several.posterior.curvature.sums, last.posterior.curvature.sums.flatten(1), rtol=1e-5, atol=1e-6
    )


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.last, self.never = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.again(self.again(inputs)))


def shared() -> nn.Sequential:
    network = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    network[2].weight = network[0].weight
    return network


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.last = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.memory(inputs.view(-1, 3, 2))[0][:, -1])


def with_norm(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **options), nn.ReLU(), nn.Linear(8, 3))


class AlwaysTraining(nn.Module):
    """A network whose batch norm always stays in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.norm(self.first(inputs)))


class Beside(nn.Module):
    """A network with a layer whose output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.first(inputs)
        return self.last(inputs)


class Still(nn.Module):
    """A network whose first layer has no gradients."""

    def __init__(self, still: Any, *, whole: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.still, self.whole = nn.Linear(6, 4), nn.Linear(4, 3), still, whole

    def forward(self, inputs: Tensor) -> Tensor:
        with self.still():
            features = self.first(inputs)
            if self.whole:
                return self.last(features)
        return self.last(features)


class Shifted(nn.Module):
    """A network with a parameter of its own, outside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.last = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last((inputs + self.shift).tanh())


class Words(nn.Module):
    """A network that embeds the bin of each number."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 6, **options), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.words((2 * inputs + 4).clamp(0, 8).long()).mean(1))


class Placed(nn.Module):
    """A network that embeds positions; it has as many positions as a batch has items."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.last = nn.Embedding(len(make_batches()[0][0]), 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        places = self.place(torch.arange(self.place.num_embeddings))
        return self.last((inputs[:, None] + places).tanh().mean(1))


def hooked() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 3))


def test_a_layer_whose_weight_is_made_of_parameters_has_a_posterior_over_the_rest_of_it():
    normed: Any = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    network = nn.Sequential(normed, nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"leave it out, with layers=\['0', '2'\]"):
        lam.fit(network, make_batches(), lam.Laplace(margin=0.7, layers="all"), progress=False)
    encoder: Any = lam.fit(network, make_batches(), lam.Laplace(margin=0.7, layers=["0", "2"]), progress=False)
    assert encoder.posterior.curvature.shapes == ((1, 4), (3, 5))
    assert encoder.embed(make_batches()).kappa.isfinite().all()


def test_a_layer_whose_inputs_a_hook_changes_has_a_posterior():
    network = make_network()
    network[2].register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    encoder: Any = lam.fit(network, make_batches(), lam.Laplace(margin=0.7, layers=["2"]), progress=False)
    assert encoder.posterior.curvature.shapes == ((3, 13),)


def test_no_inputs_are_refused():
    encoder = fit(layers="all")
    for embed in (encoder.embed, encoder.predict):
        with pytest.raises(ValueError, match="inputs.*embed"):
            embed(torch.zeros(0, 6))


class Transposed(nn.Module):
    """An autoencoder that decodes with the transposed weight of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(self.first(x).relu(), self.first.weight.T))


PATHS: list[Any] = ["all", ["first"], ["last"]]


@pytest.mark.parametrize(
    ("network", "layers", "message"),
    [
        *[
            (make_network(), layers, rf'layers must be "last", "all".*among 0, 2.*{re.escape(repr(layers))}')
            for layers in (["1"], [], "some")
        ],
        (shared(), "all", r"layer '0' \(Linear\) shares.*'2'.*layers=\['4'\]"),
        (Twice(), ["again", "last"], r"layer 'again' \(Linear\) runs 2"),
        (Twice(), ["never", "last"], r"layer 'never' \(Linear\) never runs"),
        (Transposed(), "all", r"layer 'first' \(Linear\).*elsewhere"),
        (Recurrent(), "all", r"layer 'memory' \(GRU\).*one tensor to one"),
        (with_norm(track_running_stats=False), "all", r"'1' \(BatchNorm1d\).*mean and variance"),
        *[(AlwaysTraining(), layers, r"'norm' \(BatchNorm1d\).*mean and variance") for layers in PATHS],
        (Beside(), "all", r"outputs.*'last'.*layer 'first'.*layers=\['last'\]"),
        *[
            (Still(still), "all", r"layer 'first'.*gradients.*torch.inference_mode\(\).*layers=\['last'\]")
            for still in (torch.no_grad, torch.inference_mode)
        ],
        (Still(torch.no_grad, whole=True), ["last"], "layer 'last'.*gradients"),
        (Shifted(), "all", r"layer ''.*'last'.*\(shift\).*layers=\['last'\]"),
        (nn.Sequential(Shifted()), "all", r"layer '0'.*'0.last'.*\(shift\)"),
        *[
            (Words(**options), "all", r"layer 'words' \(Embedding\).*no derivative")
            for options in ({"sparse": True}, {"max_norm": 1.0})
        ],
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)), "all", "layer.*2 outputs"),
        (make_network(), None, 'layers must be "last", "all".*None'),
        (make_network(), {"0"}, r"layers must be .last., .all..*\{'0'\}"),
        (make_network(), [0], r'layers must be "last", "all".*\[0\]'),
        (Placed(), "all", r"layer 'place' \(Embedding\).*one tensor to one"),
        (hooked(), "all", r"layer '0' \(Linear\).*hook.*torch.nn.utils.parametrizations.*layers=\['2'\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_layers_that_cannot_be_had_are_refused(
    network: nn.Module, layers: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in production
    with pytest.raises(ValueError, match=message):
        lam.fit(network, make_batches(), lam.Laplace(margin=0.7, layers=layers), progress=False)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_an_empty_batch_adds_nothing(structure: str):
    batches = make_batches()
    empty = torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64)
    with_empty, without = (fit(each, layers="all", structure=structure) for each in ([*batches, empty], batches))
    assert torch.equal(with_empty.posterior.curvature.sums, without.posterior.curvature.sums)
    assert torch.equal(with_empty.embed([empty, *batches]).kappa, without.embed(batches).kappa)
    for encoder, held_out in ((with_empty, [*batches, empty]), (without, batches)):
        encoder.tune(held_out)
    assert with_empty.tuning == without.tuning


class OfBatch(nn.Module):
    """A network in which `change` makes an item's output random, or dependent on its batch."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(6, 6), nn.Linear(6, 3), change

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.change(self.first(inputs)))


@pytest.mark.parametrize("options", [{"layers": "last"}, {"layers": "all"}, {"head": "identity"}])
@pytest.mark.parametrize(
    "change",
    [
        lambda y: y - y.mean(0),
        lambda y: (y - y.mean(0)) / y.std(0),
        lambda y: F.batch_norm(y, None, None, training=True),
        lambda y: F.scaled_dot_product_attention(y, y, y),
        lambda y: F.dropout(y, training=True),
    ],
    ids=["mean", "standard", "norm", "attention", "noise"],
)
def test_a_network_that_gives_an_item_something_else_in_every_batch_is_refused(change: Any, options: Any):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="depends.*other items"):
        lam.fit(OfBatch(change), make_batches(), lam.Laplace(margin=0.7, **options), progress=False)


@pytest.mark.parametrize("options", [{"layers": "last"}, {"head": "identity"}])
def test_batch_norm_in_training_mode_is_refused_for_the_last_layer_too(options: Any):
    for network in (with_norm(track_running_stats=False), AlwaysTraining()):
        with pytest.raises(ValueError, match=r"\(BatchNorm1d\).*mean and variance"):
            lam.fit(network, make_batches(), lam.Laplace(margin=0.7, **options), progress=False)


def test_inputs_that_cannot_be_cut_by_item_are_taken_as_they_are():
    class WithNames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 3)

        def forward(self, inputs: Tensor, names: list[str]) -> Tensor:
            assert len(inputs) == len(names)
            return self.last(inputs)

    batches = [({"inputs": inputs, "names": ["a"] * len(inputs)}, labels) for inputs, labels in make_batches()]
    assert lam.fit(WithNames(), batches, margin=0.7, progress=False).embed(batches).kappa.isfinite().all()


def test_half_precision_is_refused():
    network = make_network().bfloat16()
    batches = [(inputs.bfloat16(), labels) for inputs, labels in make_batches()]
    with pytest.raises(ValueError, match=r"weights.*torch.bfloat16.*network.float\(\)"):
        lam.fit(network, batches, lam.Laplace(margin=0.7, layers="all"), progress=False)


def test_kron_names_the_layers_that_it_has_factors_of():
    message = r"layer '1' \(BatchNorm1d\).*layers=\['0', '3'\].*use structure=.diag."
    with pytest.raises(ValueError, match=message):
        lam.fit(with_norm(), make_batches(), lam.Laplace(margin=0.7, layers="all", structure="kron"), progress=False)
    lam.fit(with_norm(), make_batches(), lam.Laplace(margin=0.7, layers=["0", "3"], structure="kron"), progress=False)
    lam.fit(with_norm(), make_batches(), lam.Laplace(margin=0.7, layers="all"), progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "full"}, "structure.*diag, kron.*'full'.*layers='all'"),
        ({"structure": "low_rank", "rank": 3}, "structure.*diag, kron.*'low_rank'"),
        ({"structure": "diag", "rank": 3}, 'rank.*structure="low_rank"'),
        ({"predictive": "exact"}, "predictive.*linearised, sampled.*'exact'"),
        ({"layers": "last", "predictive": "sampled"}, "predictive.*'sampled'.*layers=.last."),
        ({"head": "train"}, "layers='all'.*network.*head='train'"),
        ({"pairs": "dataset"}, "layers='all'.*pairs='dataset'.*pairs=.batch."),
        ({"curvature": ContrastiveCurvature(0.7, fix="full")}, "layers.*cross terms.*ContrastiveCurvature"),
        ({"max_memory": 1000}, 'structure="diag".*2 layers.*123 weights.*1,968 bytes.*max_memory, 1,000'),
        ({"structure": "kron", "max_memory": 1000}, 'structure="kron".*2 layers.*123 weights'),
        (
            {"max_memory": 3000},
            "and 180 bytes an item, exceeds max_memory, 3,000: ",
        ),
    ],
)
def test_options_that_do_not_go_with_layers_are_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in production
    with pytest.raises(ValueError, match=message):
        unchecked(fit)(**{"layers": "all", **options})


def test_it_is_not_exported(tmp_path: Path):
    encoder = fit(layers="all")
    with pytest.raises(ValueError, match="LayersPosterior.*exported"):
        encoder.export(tmp_path / "encoder.pt2", make_batches()[0][0])


def test_a_posterior_over_layers_is_not_loaded_without_a_network():
    posterior: Any = fit(layers="all").posterior
    with pytest.raises(ValueError, match="needs its network, got None"):
        type(posterior).restored(posterior.tensors(), posterior.settings())


def test_a_method_trains_and_puts_the_posterior_over_its_layers():
    network = models.build("convnet8", dimension=3)
    trained: Any = LaplacePosthoc(layers="all", structure="kron").train(network, images(), training())
    assert trained.encoder.posterior.layers == ("features.0", "features.2", "head")
    assert trained.encoder.embed(images().images).kappa.isfinite().all()


def test_a_method_refuses_layers_that_its_network_has_not_before_it_trains():
    network = models.build("convnet8", dimension=3)
    before = network.head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"list of paths.*\['nose'\]"):
        LaplacePosthoc(layers=["nose"]).train(network, images(), training())
    assert torch.equal(network.head.weight, before)


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        ("convnet8", {"layers": "all", "max_memory": 10_000}, 'structure="diag".*3 layers.*6,339 weights'),
        ("convnet8", {"layers": "all", "max_memory": 150_000}, "bytes.*exceeds max_memory, 150,000"),
        ("cifar_resnet18", {"layers": "all", "structure": "kron"}, "got layer 'features.bn1'"),
        ("convnet8", {"head": "train", "structure": "full", "max_memory": 10}, "layer.*3 x 4 weights"),
        ("convnet8", {"head": "identity", "structure": "kron", "max_memory": 10}, "layer.*3 x 3 weights"),
        ("convnet8", {"head": "train", "dimension": 4}, "dimension.*2 to 3"),
    ],
)
def test_a_method_refuses_what_its_curvature_would_take_before_it_trains(network: str, options: Any, message: str):
    built = models.build(network, dimension=3, **({} if network == "convnet8" else {"channels": 1}))
    with pytest.raises(ValueError, match=message):
        LaplacePosthoc(**options).check(built, images(), training())


def test_a_hook_may_look_at_what_a_layer_gives_but_not_change_it():
    batches, network, seen = make_batches(), make_network(), []
    handle = network[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape))
    encoder: Any = lam.fit(network, batches, lam.Laplace(margin=0.7, layers="all"), progress=False)
    assert seen
    handle.remove()
    assert torch.equal(encoder.posterior.curvature.sums, fit(batches, layers="all").posterior.curvature.sums)
    network[0].register_forward_hook(lambda _module, _inputs, output: 10 * output)
    with pytest.raises(ValueError, match=r"layer '0' \(Linear\).*forward hook.*\['2'\]"):
        lam.fit(network, batches, lam.Laplace(margin=0.7, layers="all"), progress=False)
    assert (
        lam.fit(network, batches, lam.Laplace(margin=0.7, layers=["2"]), progress=False)
        .embed(batches)
        .kappa.isfinite()
        .all()
    )
