"""torch's autocast is for networks: lam's computations on their outputs are the same with and without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lam
from lam import methods
from lam.encoders.deterministic import GaussianEncoder, HeadEncoder, NeighbourEncoder, NormEncoder
from lam.encoders.ensemble import EnsembleEncoder, align
from lam.hessians import ContrastiveCurvature, Diagonal
from lam.hessians.accumulate import LastLayerAccumulator
from lam.hessians.losses.contrastive import FIXES, SPLITS
from lam.models.head import features_and_output
from lam.models.kappa_head import KappaHead, UncertaintyHead
from lam.pairs.pairs import Pairs
from lam.pairs.relation import Relation
from lam.posteriors import LAYERS_POSTERIORS, POSTERIORS, Posterior
from lam.retrieval import Index, sampled_nearest
from lam.retrieval.metrics.reference import Reference, knn_distance
from lam.utils.autocast import without_autocast
from lam.vmf.distribution import VonMisesFisher, fuse
from tests.encoders.small import WIDE, fit, make_batches, make_network
from tests.helpers import contrastive_ggn, contrastive_ggn_dataset
from tests.methods.small_data import images, network, outside, training

N, P, D = 64, 16, 12


def mixed() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def layer(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, labels, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator) for size in ((N, P), (D, P), (D,))]
    return parts[0], torch.arange(N) % 4, parts[1], parts[2]


def posterior(structure: str) -> Posterior:
    features, labels, weight, bias = layer()
    options = lam.Laplace(margin=0.7, likelihood_scale=1e3, structure=structure)
    return lam.fit_features(features, labels, weight, bias, options).posterior


def same(compute: Callable[[], Any]) -> None:
    """Check that a computation gives the same bits and types under autocast."""
    alone = compute()
    with mixed():
        together = compute()
        assert torch.is_autocast_enabled("cpu")
    for one, other in zip(alone, together, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(1)), dim=-1)


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("split", SPLITS)
def test_curvature(split: Any, fix: Any) -> None:
    features, labels, weight, bias = layer()
    options: dict[str, Any] = {"margin": 0.7, "split": split, "fix": fix}
    same(lambda: [contrastive_ggn(features, weight, bias, Pairs.by_label(labels), **options).h])
    if fix != "full":
        options["progress"] = False
        same(lambda: [contrastive_ggn_dataset(features, weight, bias, related=labels, **options).h])


def test_mined_curvature() -> None:
    features, labels, weight, bias = layer()
    relation, curvature = Relation(miner="semihard", max_pairs=200, triplet_margin=0.7), ContrastiveCurvature(0.7)
    empty = Diagonal.zeros(weight, curvature, has_bias=True)
    summing = LastLayerAccumulator(empty=empty, relation=relation, weight=weight, bias=bias)
    same(lambda: [summing.accumulate([(features, labels)])[0].h])


@pytest.mark.parametrize("structure", POSTERIORS)
@pytest.mark.parametrize("mode", ["marginal", "network"])
def test_posterior(mode: Any, structure: str) -> None:
    features, laplace = layer(1)[0], posterior(structure)

    def predicted() -> list[Tensor]:
        embeddings = laplace.predict(features, mode=mode)
        return [embeddings.mean, embeddings.kappa, embeddings.variance]

    same(predicted)
    same(lambda: [laplace.sampled_embeddings(features, n_samples=5)])
    same(lambda: [torch.tensor(laplace.clipped_variance_share(features))])


@pytest.mark.parametrize("structure", LAYERS_POSTERIORS)
def test_posterior_over_layers(structure: str) -> None:
    ((inputs, _), *_), laplace = make_batches(), fit(layers="all", structure=structure).posterior
    same(lambda: [laplace.outputs(inputs), torch.tensor(laplace.clipped_variance_share(inputs))])


def test_von_mises_fisher() -> None:
    mean, kappa, samples = unit(7, D), torch.logspace(-3, 6, 7), unit(50, 7, D)
    vmf = VonMisesFisher(mean, kappa)
    same(lambda: [vmf.log_prob(unit(7, D)), vmf.entropy(), vmf.credible_cap(0.9)])
    same(lambda: [vmf.rsample((3,), generator=torch.Generator().manual_seed(0))])
    same(lambda: [VonMisesFisher.fit(samples).concentration, fuse(mean, kappa).concentration])


def test_neighbours() -> None:
    samples, reference = unit(3, N, D), unit(40, P)
    same(lambda: [sampled_nearest(samples), sampled_nearest(samples, samples[:, :9])])
    same(lambda: [knn_distance(layer()[0], Reference.of(reference), k=5)])


@pytest.mark.parametrize("pairs", ["batch", "dataset"])
def test_fit_takes_the_features_that_the_network_gives_and_nothing_else_from_autocast(pairs: Any) -> None:
    data, trained = make_batches(), make_network()
    with mixed():
        encoder = fit(data, pairs=pairs, structure="diag")
        feature_batches = [(features_and_output(trained, "2", inputs)[0].float(), labels) for inputs, labels in data]
        embeddings = encoder.embed(data)
    features, labels = (torch.cat(parts) for parts in zip(*feature_batches, strict=True))
    head: Any = trained[2]
    weight, bias = head.weight.detach(), head.bias.detach()
    if pairs == "batch":
        empty = Diagonal.zeros(weight, ContrastiveCurvature(0.7), has_bias=True)
        summing = LastLayerAccumulator(empty=empty, relation=Relation(), weight=weight, bias=bias)
        expected = summing.accumulate(feature_batches)[0]
    else:
        expected = contrastive_ggn_dataset(features, weight, bias, related=labels, margin=0.7, progress=False)
    assert torch.equal(encoder.posterior.curvature.h, expected.h)
    torch.testing.assert_close(embeddings.kappa, encoder.posterior.predict(features).kappa, rtol=0, atol=0)


def test_a_trained_head_is_that_of_no_autocast() -> None:
    data = [(inputs, labels) for inputs, labels in make_batches()]

    class Given(nn.Module):
        """Embeddings that autocast does not touch."""

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs

    same(
        lambda: [
            lam.fit(Given(), data, lam.Laplace(margin=0.7, head="train", dimension=3), progress=False).posterior.weight
        ]
    )


def test_a_network_may_use_autocast_in_its_own_forward() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            with mixed():
                features = self.body(inputs).relu()
            return self.head(features.float())

    data = make_batches()
    encoder = lam.fit(Mixed(), data, margin=0.7, progress=False)
    features = encoder.features(data)
    assert torch.equal(features, features.bfloat16().float())
    assert encoder.embed(data).mean.dtype == torch.float32
    same(lambda: [encoder.embed(data).kappa])


class Unmixed(nn.Module):
    """A head that autocast does not touch, on features that are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        with without_autocast():
            return self.head(inputs)


@pytest.mark.parametrize(
    "made",
    [
        lambda network, data: lam.fit(network, data, margin=0.7, progress=False),
        lambda network, _: NormEncoder(network, "head"),
        lambda network, _: HeadEncoder(network, "head", KappaHead(6)),
        lambda network, _: GaussianEncoder(network, "head", UncertaintyHead(6, 3), unit_mean=True),
        lambda network, _: NeighbourEncoder(network, "head", reference=unit(40, 6)),
    ],
    ids=["posterior", "norm", "head", "gaussian", "neighbours"],
)
def test_a_head_that_turns_autocast_off_is_followed(made: Callable[[nn.Module, Any], lam.Encoder]) -> None:
    data = make_batches()

    def embedded() -> list[Tensor]:
        embeddings = made(Unmixed(), data).embed(data)
        return [embeddings.mean, embeddings.kappa, embeddings.variance]

    same(embedded)


def test_ambiguity_is_learned_without_autocast() -> None:
    features, labels, weight, bias = layer()
    held_out = layer(seed=1)[:2]

    def learned() -> list[Tensor]:
        encoder = lam.fit_features(features, labels, weight, bias, margin=0.7)
        encoder.learn_ambiguity([held_out])
        with torch.autocast("cpu", enabled=False):
            embeddings = encoder.embed(features)
        return [embeddings.kappa, *embeddings.parts().values()]

    same(learned)


@pytest.mark.parametrize("name", ["deterministic", "laplace_posthoc", "mc_dropout", "pfe", "norm", "knn_distance"])
def test_every_method_embeds_in_float32(name: Any) -> None:
    trained = network(dropout=0.1) if name == "mc_dropout" else network()
    accepted_under_autocast(methods.find(name)().train(trained, images(), training()).encoder)


def test_an_ensemble_embeds_in_float32() -> None:
    members = [network() for _ in range(3)]
    with torch.no_grad():
        units = torch.stack([F.normalize(member(images().images)) for member in members])
    accepted_under_autocast(EnsembleEncoder(members, "head", rotations=align(units)))


def accepted_under_autocast(encoder: lam.Encoder) -> None:
    alone = encoder.predict(outside(), n_samples=8, joint=True)
    with mixed():
        prediction = encoder.predict(outside(), n_samples=8, joint=True)
        index = Index(encoder.dimension)
        index.add(prediction.embeddings, ids=range(len(prediction.embeddings)))
        assert index.search(prediction.embeddings, 1).ids[:, 0].tolist() == list(range(len(prediction.embeddings)))
    for part in (prediction.embeddings.mean, prediction.embeddings.kappa, prediction.embeddings.variance):
        assert part.dtype == torch.float32
    torch.testing.assert_close(prediction.embeddings.mean, alone.embeddings.mean, rtol=0, atol=0.05)


def test_it_is_off_inside_and_on_again_afterwards_whatever_happens() -> None:
    @without_autocast()
    def fails() -> None:
        raise RuntimeError(f"inside it is {torch.is_autocast_enabled('cpu')}")

    with mixed():
        with pytest.raises(RuntimeError, match="inside.*False"):
            fails()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


@pytest.mark.long
def test_a_program_exported_under_autocast_needs_none_to_run(tmp_path: Path) -> None:
    inputs, _ = make_batches()[0]
    encoder = fit(D=WIDE)
    with mixed():
        encoder.export(tmp_path / "encoder.pt2", inputs)
    _, mean, kappa, _ = torch.export.load(tmp_path / "encoder.pt2").module()(inputs)
    expected = encoder.embed(inputs)
    torch.testing.assert_close(mean, expected.mean)
    torch.testing.assert_close(kappa, expected.kappa, rtol=1e-4, atol=0)
