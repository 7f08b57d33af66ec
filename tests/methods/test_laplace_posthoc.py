from dataclasses import replace
from typing import Any

import pytest
import torch
from pytorch_metric_learning.miners import TripletMarginMiner
from torch import nn
from torch.utils.data import DataLoader

from lam import Laplace, losses, models
from lam.datasets import TensorImages
from lam.datasets.augmented import AugmentationOptions, Augmented, Views
from lam.hessians import ContrastiveCurvature
from lam.losses import InfoNCE
from lam.methods import Deterministic
from lam.methods.fit import fit
from lam.methods.laplace_posthoc import LaplacePosthoc
from lam.pairs import Pairs, Relation
from lam.training import Training
from lam.training import train as train_network
from tests.helpers import contrastive_ggn
from tests.methods.small_data import trainer

train = trainer(LaplacePosthoc)
OPTIONS = LaplacePosthoc(fix="positive", batch_size=12, prior_precision=2.0, likelihood_scale=1e4, negative_weight=0.5)


def make_data(N: int = 48) -> TensorImages:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) % 4
    noise = torch.randint(0, 60, (N, 1, 8, 8), generator=generator)
    return TensorImages((40 * labels[:, None, None, None] + noise).to(torch.uint8), labels)


def settings() -> dict[str, Any]:
    training: dict[str, Any] = {"loss": losses.build(margin=0.7), "epochs": 2, "batch_size": 16, "seed": 1}
    return {**training, "accelerator": "cpu", "progress": False}


def test_it_is_training_and_then_a_fit_on_shuffled_batches() -> None:
    data, network, twin = make_data(), models.build("convnet8", dimension=3), models.build("convnet8", dimension=3)
    stages: list[str] = []

    def stage(name: str) -> Any:
        stages.append(name)
        return torch.no_grad() if name == "fit" else torch.enable_grad()

    encoder, histories = train(network, data, options=OPTIONS, stage=stage, **settings())
    history = train_network(twin, data, Training(**settings()))
    loader = DataLoader(data, batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(1))
    expected = fit(
        twin,
        loader,
        Laplace(
            curvature=ContrastiveCurvature(0.7, fix="positive", negative_weight=0.5),
            prior_precision=2.0,
            likelihood_scale=1e4,
        ),
        seed=1,
        progress=False,
    )
    assert stages == ["train", "fit"]
    assert histories["network"].losses == history.losses
    torch.testing.assert_close(encoder.posterior.weight, expected.posterior.weight, rtol=0, atol=0)
    torch.testing.assert_close(encoder.posterior.curvature.h, expected.posterior.curvature.h, rtol=0, atol=0)
    assert (encoder.posterior.scale, encoder.posterior.prior_precision, encoder.posterior.seed) == (1e4, 2.0, 1)


def test_augmentation_ends_with_training() -> None:
    data, network = make_data(), models.build("convnet8", dimension=3)
    encoder, histories = train(network, data, options=OPTIONS, pretrained=True, **settings())
    assert histories == {}
    views = Augmented(data, AugmentationOptions(crop_scale=0.3, flip=0.5))
    augmented, _ = train(network, views, options=OPTIONS, pretrained=True, **settings())
    assert torch.equal(augmented.posterior.curvature.h, encoder.posterior.curvature.h)


@pytest.mark.parametrize("margin", [None, 2.0])
def test_the_plain_sum_over_triplets_is_that_of_three_loops(margin: float | None) -> None:
    """As in the authors' code: the summed curvature of all violating triplets in all batches, and a prior of 1."""
    options = replace(OPTIONS, fix="fixed", miner="violating", average=False, likelihood_scale=None)
    options = replace(options, negative_weight=1.0, prior_precision=1.0, batch_size=8, margin=margin, structure="diag")
    data, network = make_data(16), models.build("convnet8", dimension=3)
    encoder, _ = train(network, data, options=options, pretrained=True, **settings())
    assert encoder.posterior.scale == 1.0
    weight, bias = encoder.posterior.weight, encoder.posterior.bias
    total = torch.zeros(3, weight.shape[1] + 1, dtype=torch.float64)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
    for inputs, labels in loader:
        features = network.features(inputs).detach()
        embeddings = torch.nn.functional.normalize(features @ weight.T + bias)
        anchor, positive, negative = TripletMarginMiner(margin=0.7, type_of_triplets="all")(embeddings, labels)
        for others, sign in ((positive, 1), (negative, -1)):
            for a, b in zip(anchor.tolist(), others.tolist(), strict=True):
                pair = torch.zeros(8, 8, dtype=torch.bool)
                pair[a, b] = pair[b, a] = True
                none = torch.zeros_like(pair)
                kinds = (pair, none) if sign > 0 else (none, pair)
                ggn = contrastive_ggn(features, weight, bias, Pairs(*kinds, 1, 1), margin=margin or 0.7)
                total += (ggn.sums[0] - ggn.sums[1]) / 2  # only one of the two orders of a pair counts
    torch.testing.assert_close(encoder.posterior.curvature.h, total, rtol=1e-5, atol=1e-5 * float(total.abs().max()))
    torch.testing.assert_close(encoder.posterior.variance.double(), 1 / (total.relu() + 1), rtol=1e-3, atol=0)


def test_places_in_shuffled_batches_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match='pairs.*"dataset".*places'):
        train(models.build("convnet8", dimension=3), make_data(), relation=Relation(positive_within=5.0), **settings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"miner": "hard"}, "hard triplets.*margin"),
        ({"views": Views()}, "views.*crops"),
    ],
)
def test_what_the_fit_cannot_use_is_refused_before_training(options: dict[str, Any], message: str) -> None:
    rows = [(torch.rand(8), number % 4) for number in range(24)]
    training: dict[str, Any] = settings() | {"loss": InfoNCE(), "stage": pytest.fail}
    with pytest.raises(ValueError, match=message):
        train(nn.Linear(8, 3), rows, options=LaplacePosthoc(curvature="infonce", **options), **training)


@pytest.mark.parametrize(("views", "size"), [(None, 8), (Views(flip=0.5), 16)])
def test_a_batch_of_views_takes_the_memory_of_two_for_each_image(views: Any, size: int) -> None:
    options = LaplacePosthoc(layers="all", views=views, batch_size=8, max_memory=200_000)
    matrices = size * 2 * 3 * 3 * 4  # terms, outputs and bytes of float32
    with pytest.raises(ValueError, match=f" {matrices:,} bytes"):
        options.check(models.build("convnet8", dimension=3), make_data(), Training(**settings()))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("euclidean", "fixed", 0.0), ("arccos", "projected", 1.0)]),
        (
            {"structure": "diag"},
            [("euclidean", "positive", 1.0), ("euclidean", "fixed", 0.0), ("arccos", "projected", 1.0)],
        ),
        ({"structure": "full"}, []),
        ({"structure": "diag", "layers": "all"}, [("euclidean", "fixed", 0.0), ("arccos", "projected", 1.0)]),
        ({"curvature": {"name": "supcon", "temperature": 0.1}}, []),
        *(
            ({"curvature": curvature}, [("euclidean", "fixed", 0.0), ("arccos", "projected", 1.0)])
            for curvature in ({"name": "contrastive", "margin": 0.5}, "own", ContrastiveCurvature(0.5))
        ),
        ({"views": Views(flip=0.5)}, [("euclidean", "fixed", 0.0), ("arccos", "projected", 1.0)]),
    ],
    ids=["kron", "diag", "full", "layers", "supcon", "mapping", "own", "object", "views"],
)
def test_the_fit_can_be_repeated_with_curvatures_that_clip_nothing(
    options: dict[str, Any], expected: list[Any]
) -> None:
    data, loss = make_data(), losses.build(margin=0.5)
    training = settings() | {"loss": loss, "trained_by": Deterministic().trained_by(loss, 3), "pretrained": True}
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
    encoder, _ = train(network, data, options=LaplacePosthoc(batch_size=48, **options), **training)
    others = encoder.fitted.without_clipping(encoder.posterior)
    found = [other.curvature.curvature for other in others]
    assert [(each.split, each.fix, each.negative_weight) for each in found] == expected
    for other in others:
        assert other.curvature.curvature.margin == 0.5
        assert other.structure is encoder.posterior.structure
        assert other.n_items == encoder.posterior.n_items
        assert other.curvature.counts[0] == encoder.posterior.curvature.counts[0]
        assert other.curvature.clipped == 0
        assert torch.equal(other.weight, encoder.posterior.weight)


def test_a_repeated_fit_with_the_same_curvature_gives_the_same_posterior() -> None:
    options = LaplacePosthoc(pairs="dataset", head="train", dimension=3)
    encoder, _ = train(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), make_data(), options=options, pretrained=True, **settings()
    )
    again, own = encoder.to("cpu").fitted.posterior(), encoder.posterior
    torch.testing.assert_close(again.curvature.h, own.curvature.h)
    assert torch.equal(again.weight, own.weight)
    assert (again.n_items, again.prior_ratio, again.seed) == (own.n_items, own.prior_ratio, own.seed)
