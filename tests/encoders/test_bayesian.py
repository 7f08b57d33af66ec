"""The Bayesian encoder: its fit, its embeddings, sums of encoders, and tuning."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lam
from lam.hessians import ContrastiveCurvature
from lam.pairs import Relation
from lam.posteriors import POSTERIORS
from lam.retrieval.index.exact import rank
from tests.encoders.small import fit, make_batches, make_network, same_posterior
from tests.helpers import contrastive_ggn


def test_features_are_what_enters_the_head():
    network, batches = make_network(), make_batches()
    encoder = fit(batches)
    inputs = batches[0][0]
    torch.testing.assert_close(encoder.features(inputs), network[1](network[0](inputs)))
    assert encoder.features(batches).shape == (64, 12)
    assert encoder.dimension == 3


@pytest.mark.parametrize("layer", ["plain", "weight_norm"])
@pytest.mark.parametrize("use", ["embed", "features", "tune", "forget", "save", "export"])
def test_a_network_that_was_trained_since_the_fit_is_rejected(use: str, layer: str, tmp_path):
    network, batches = make_network(), make_batches()
    if layer == "weight_norm":
        nn.utils.parametrizations.weight_norm(network[2])
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    actions = {
        name: lambda name=name: getattr(encoder, name)(batches) for name in ("embed", "features", "tune", "forget")
    }
    actions["save"] = lambda: encoder.save(tmp_path / "encoder")
    actions["export"] = lambda: encoder.export(tmp_path / "encoder.pt2", batches[0][0])
    actions["embed"]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(batches[0][0]).square().sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="changed since"):
        actions[use]()
    assert not list(tmp_path.iterdir())


def test_a_head_whose_bias_alone_changed_is_rejected():
    network, batches = make_network(), make_batches()
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    with torch.no_grad():
        network[2].bias.add_(0.5)
    with pytest.raises(ValueError, match="bias of '2' has changed"):
        encoder.embed(batches)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_network_may_be_converted_after_the_fit(dtype: torch.dtype):
    network, batches = make_network(), make_batches()
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    inputs, before = batches[0][0], encoder.embed(batches[0][0]).kappa
    network.to(dtype)
    torch.testing.assert_close(encoder.embed(inputs.to(dtype)).kappa, before, rtol=0.3, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("scale", [1e-3, 1e12])
@pytest.mark.parametrize("head", [None, "identity", "train"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_direction_is_the_networks_own_to_the_bit_however_wide_the_posterior(scale, head, dtype, monkeypatch):
    batches = [(inputs.to(dtype), labels) for inputs, labels in make_batches()]
    encoder = lam.fit(
        make_network().to(dtype), batches, lam.Laplace(margin=0.7, likelihood_scale=scale, head=head), progress=False
    )
    inputs = batches[0][0]
    with torch.no_grad():
        output = encoder.network(inputs).float()
    expected = F.normalize(output)
    if head is not None:
        expected = F.normalize(F.linear(output, encoder.posterior.weight, encoder.posterior.bias))
    for n_samples in (2, 32, 101):
        assert torch.equal(encoder.embed(inputs, n_samples=n_samples).mean, expected)
        assert torch.equal(encoder.predict(inputs, n_samples=n_samples, joint=True).embeddings.mean, expected)
    # samples are drawn in parts, directions are not
    monkeypatch.setattr("lam.posteriors.base.CHUNK_ELEMENTS", 32 * 3 * 5)
    assert torch.equal(encoder.embed(inputs).mean, expected)
    alone = torch.cat([encoder.embed(inputs[row : row + 1]).mean for row in range(len(inputs))])
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_a_badly_tuned_posterior_ranks_as_the_plain_network_does():
    batches = make_batches(N=64)
    encoder = fit(batches, likelihood_scale=1e-3, prior_precision=1e-2)
    gallery, queries = batches[0][0], batches[1][0]
    with torch.no_grad():
        plain = [F.normalize(encoder.network(inputs)) for inputs in (gallery, queries)]
    items, asked = encoder.embed(gallery, n_samples=100), encoder.embed(queries)
    encoder.mean = "sampled"
    sampled = encoder.embed(gallery, n_samples=100), encoder.embed(queries)
    expected = rank(plain[1], plain[0], k=10)[0]
    assert torch.equal(rank(asked.mean, items.mean, k=10)[0], expected)
    assert not torch.equal(rank(sampled[1].mean, sampled[0].mean, k=10)[0], expected)  # the posterior is bad indeed
    again = encoder.posterior.predict(encoder.features(gallery), n_samples=100, mode="network", mean="sampled")
    samples = encoder.posterior.sampled_embeddings(encoder.features(gallery), n_samples=100)
    torch.testing.assert_close(again.mean, F.normalize(samples.double().mean(0)).float())
    assert (items.mean_samples, sampled[0].mean_samples, sampled[1].mean_samples) == (None, 100, 32)


def test_the_mean_and_the_samples_of_an_encoder_are_saved_with_it(tmp_path):
    batches = make_batches()
    encoder = fit(batches)
    encoder.mean, encoder.n_samples = "sampled", 7
    expected = encoder.embed(batches)
    assert expected.mean_samples == 7
    encoder.save(tmp_path / "encoder")
    again = lam.load(tmp_path / "encoder", make_network()).embed(batches)
    assert torch.equal(again.mean, expected.mean)
    assert torch.equal(again.kappa, expected.kappa)
    encoder.n_samples = 1
    with pytest.raises(ValueError, match="n_samples.*2.*1"):
        encoder.embed(batches)


def test_the_curvature_is_the_sum_over_batches():
    batches = make_batches()
    encoder = fit(batches, structure="diag", prior_precision=1.0)
    total = None
    for inputs, labels in batches:
        features = encoder.features(inputs)
        head = encoder.network[2]
        part = contrastive_ggn(features, head.weight, head.bias, lam.Pairs.by_label(labels), margin=0.7)
        total = part if total is None else total + part
    torch.testing.assert_close(encoder.posterior.curvature.h, total.h)
    assert encoder.posterior.scale == 64.0**2


def test_new_data_are_added_to_a_tuned_and_saved_encoder(tmp_path):
    batches = make_batches(6)
    whole, first, second = fit(batches), fit(batches[:2]), fit(batches[2:])
    first.tune(make_batches(2, seed=1))
    first.save(tmp_path)
    for joined in (first + second, second + lam.load(tmp_path, make_network()), sum([first, second])):
        assert joined.posterior.likelihood_scale is None
        assert joined.posterior.scale == whole.posterior.scale
        joined.tune(make_batches(2, seed=1))
        assert joined.posterior.likelihood_scale is not None
    assert first.posterior.likelihood_scale is not None
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = 1 + first


@pytest.mark.parametrize("fix", ["fixed", "positive"])
def test_the_whole_data_set_does_not_depend_on_how_it_is_cut(fix):
    inputs, labels = (torch.cat(parts) for parts in zip(*make_batches(), strict=True))
    options = {"curvature": ContrastiveCurvature(0.7, fix=fix), "structure": "diag"}
    one = fit([(inputs, labels)], **options).posterior.curvature
    for size in (5, 16, 64):
        cut = list(zip(inputs.split(size), labels.split(size), strict=True))
        encoder = fit(cut, pairs="dataset", **options)
        torch.testing.assert_close(encoder.posterior.curvature.h.float(), one.h.float(), rtol=1e-4, atol=1e-6)
        assert encoder.posterior.curvature.counts == one.counts
    with pytest.raises(ValueError, match="posterior fitted.*batches"):
        encoder.forget(cut)
    with pytest.raises(ValueError, match="only.*fitted in batches"):
        encoder + encoder


@pytest.mark.parametrize("fix", ["fixed", "positive", "full"])
def test_features_alone_are_enough(fix):
    batches = make_batches(1, N=40)
    curvature = ContrastiveCurvature(0.7, fix=fix)
    encoder = fit(batches, curvature=curvature, structure="diag")
    features, labels = encoder.features(batches), batches[0][1]
    head = encoder.network[2]
    alone = lam.fit_features(
        features, labels, head.weight.detach(), head.bias.detach(), lam.Laplace(curvature=curvature, structure="diag")
    )
    mine, theirs = alone.posterior.curvature.h, encoder.posterior.curvature.h
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone.embed(features).kappa, encoder.embed(batches).kappa, rtol=1e-3, atol=0)


def test_places_are_paired_by_distance():
    inputs, _ = make_batches(1, N=30)[0]
    positions = torch.rand(30, 2, generator=torch.Generator().manual_seed(3)) * 60
    distances = {"positive_within": 10.0, "negative_beyond": 25.0}
    in_batch = fit([(inputs, positions)], pairs=Relation(**distances), structure="diag")
    cut = [(inputs[:17], positions[:17]), (inputs[17:], positions[17:])]
    at_once = fit(cut, pairs=Relation("dataset", **distances), structure="diag")
    expected = lam.Pairs.by_distance(positions, 10.0, 25.0)
    for encoder in (in_batch, at_once):
        assert encoder.posterior.curvature.counts == (expected.n_positives, expected.n_negatives)
    one, other = in_batch.posterior.curvature.h, at_once.posterior.curvature.h
    torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-6)


def test_a_batch_is_taken_as_a_loader_yields_it():
    batches = make_batches()
    encoder = fit(batches)
    expected = encoder.embed(batches[0][0]).kappa
    assert torch.equal(encoder.embed(batches[0]).kappa, expected)
    assert torch.equal(encoder.embed(list(batches[0])).kappa, expected)
    assert torch.equal(encoder.embed([batches[0][0]]).kappa, expected)


def test_tuning_by_evidence_chooses_the_prior():
    encoder = fit(prior_precision=1.0)
    before = encoder.posterior
    encoder.tune([], by="marginal_likelihood", step=0.1)
    assert encoder.posterior.prior_precision == pytest.approx(math.exp(0.1)) or (
        encoder.posterior.prior_precision == pytest.approx(math.exp(-0.1))
    )
    encoder.tune([], by="marginal_likelihood")
    after = encoder.posterior
    assert after.prior_precision != before.prior_precision
    assert before.log_marginal_likelihood(after.prior_precision) > before.log_marginal_likelihood(1.0)


def test_tuning_by_evidence_forgets_the_trials_and_warns_without_a_maximum():
    encoder, batches = fit(structure="diag"), make_batches()
    encoder.tune(batches, greatest=1e8)
    assert encoder.tuning is not None
    encoder.tune([], by="marginal_likelihood")
    assert encoder.tuning is None
    with pytest.raises(ValueError, match="step.*-1"):
        encoder.tune([], by="marginal_likelihood", step=-1.0)
    curvature = encoder.posterior.curvature
    negative = replace(curvature, sums=-curvature.sums.abs())
    encoder.posterior = replace(encoder.posterior, curvature=negative)
    with pytest.warns(UserWarning, match="evidence.*no maximum.*1e-08"):
        encoder.tune([], by="marginal_likelihood")


def test_half_precision_networks_keep_a_float32_posterior():
    network = make_network().bfloat16()
    batches = [(inputs.bfloat16(), labels) for inputs, labels in make_batches()]
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    assert encoder.posterior.weight.dtype == torch.float32
    assert encoder.embed(batches).kappa.dtype == torch.float32
    assert network[2].weight.dtype == torch.bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_curvature_of_the_cpu():
    batches = make_batches()
    network = make_network().double()
    doubled = [(inputs.double(), labels) for inputs, labels in batches]
    on_cpu = lam.fit(network, doubled, margin=0.7, progress=False)
    on_gpu = lam.fit(make_network().double().cuda(), doubled, margin=0.7, progress=False)
    torch.testing.assert_close(on_gpu.posterior.curvature.h.cpu(), on_cpu.posterior.curvature.h, rtol=1e-10, atol=1e-12)
    assert on_gpu.embed(doubled).kappa.device.type == "cuda"
    on_gpu.tune(doubled, n_samples=4, greatest=1e3)
    assert lam.evaluate(on_gpu, doubled, [doubled[0][0]], n_samples=4).metrics["recall@1"] > 0


def test_an_item_with_no_features_at_all_is_uncertain_not_an_error():
    features, labels = torch.randn(12, 5), torch.arange(12) % 3
    for bias in (None, torch.tensor([0.1, -0.2, 0.3])):
        encoder = lam.fit_features(
            features, labels, torch.eye(3, 5), bias, lam.Laplace(margin=0.7, likelihood_scale=1e6)
        )
        empty = torch.zeros(1, 5)
        alone = encoder.embed(empty)
        together = encoder.embed(torch.cat([features[:3], empty]))
        torch.testing.assert_close(alone.kappa[0], together.kappa[3])
        assert alone.mean.norm() == pytest.approx(0 if bias is None else 1, abs=1e-6)  # without bias: no direction
    without = lam.fit_features(features, labels, torch.eye(3, 5), options=lam.Laplace(margin=0.7, likelihood_scale=1e6))
    assert without.embed(torch.zeros(1, 5)).kappa < 1 < without.embed(features).kappa.median()
    with pytest.raises(ValueError, match="features.*zero"):
        lam.fit_features(torch.zeros(12, 5), labels, torch.eye(3, 5), torch.ones(3), margin=0.7)


def test_heads_are_read_as_they_are_used():
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(input=x)

    network, batches = ByName(), make_batches()
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    torch.testing.assert_close(encoder.posterior.weight, network.head.weight.detach())
    torch.testing.assert_close(encoder.features(batches[0]), batches[0][0])


@pytest.mark.filterwarnings(
    "ignore:the held-out data", "ignore:.*the mean of the samples"
)  # the network is not trained
def test_the_posterior_keeps_its_own_copy_in_float32():
    layer = nn.Linear(5, 3)
    features, labels = torch.randn(12, 5), torch.arange(12) % 3
    encoder = lam.fit_features(features, labels, layer.weight, layer.bias, margin=0.7)
    before = encoder.embed(features).kappa
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(encoder.embed(features).kappa, before)
    encoder.tune([(features, labels)], n_samples=4)
    assert not encoder.posterior.weight.requires_grad
    half = lam.fit_features(features.half(), labels.tolist(), torch.eye(3, 5).half(), margin=0.7)
    assert half.embed(features.half()).kappa.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:the held-out items contain", "ignore:κ says little", "ignore:.*queries do not")
@pytest.mark.parametrize("structure", POSTERIORS)
def test_features_of_a_network_with_gradients_give_the_same_encoder_as_without(structure: str) -> None:
    features, labels, layer = nn.Linear(5, 5)(torch.randn(40, 5)), torch.arange(40) % 4, torch.eye(3, 5)
    encoder, same = (
        lam.fit_features(each, labels, layer, options=lam.Laplace(margin=0.7, structure=structure))
        for each in (features, features.detach())
    )
    assert torch.equal(copy.deepcopy(encoder).embed(features).kappa, same.embed(features.detach()).kappa)
    assert not encoder.features([features]).requires_grad
    encoder.tune([(features, labels)])
    encoder.learn_ambiguity([(features, labels)])
    assert lam.evaluate(encoder, [(features, labels)], features, reference=features).metrics["auroc_knn"] is not None


def test_a_batch_without_positive_pairs_can_be_forgotten():
    batches = make_batches(3)
    lonely = (torch.randn(3, 6), torch.arange(3))
    encoder = fit([*batches, lonely])
    encoder.forget([lonely])
    assert same_posterior(encoder, fit(batches)) or encoder.posterior.n_items == 48
    torch.testing.assert_close(encoder.posterior.curvature.sums, fit(batches).posterior.curvature.sums)


@pytest.mark.parametrize("settings", [{}, {"structure": "diag"}, {"layers": "all"}])
def test_the_last_matches_are_not_forgotten(settings: dict[str, str]):
    matches, lonely = make_batches(1)[0], (torch.randn(3, 6), torch.arange(3))
    encoder = fit([matches, lonely], **settings)
    expected = encoder.embed(lonely[0]).kappa
    with pytest.raises(ValueError, match="no positive.*left.*batches"):
        encoder.forget([matches])
    assert torch.equal(encoder.embed(lonely[0]).kappa, expected)


@pytest.mark.filterwarnings(
    "ignore:the held-out data", "ignore:.*the mean of the samples"
)  # the network is not trained
def test_one_batch_is_enough_for_every_call():
    batch = make_batches(1, N=40)[0]
    encoder = lam.fit(make_network(), batch, margin=0.7, progress=False)
    assert encoder.posterior.n_items == 40
    encoder.tune(batch, n_samples=4)
    assert lam.evaluate(encoder, batch, n_samples=4).metrics["n_queries"] == 40
