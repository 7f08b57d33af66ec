import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lam
from lam import models
from lam.files import CorruptFileError
from lam.hessians import contrastive_ggn
from lam.preprocessing import Preprocessing
from lam.relevance import LabelRelevance
from lam.tuning import sampled_ece
from tests.helpers import unchecked

Batches = list[tuple[Tensor, Tensor]]


def make_network(seed: int = 0, D: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, D))


def make_batches(count: int = 4, N: int = 16, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 6, generator=generator)
    batches = []
    for _ in range(count):
        labels = torch.randint(0, 4, (N,), generator=generator)
        batches.append((centres[labels] + 0.3 * torch.randn(N, 6, generator=generator), labels))
    return batches


def fit(batches: Batches | None = None, **options) -> lam.BayesianEncoder:
    return lam.fit(make_network(), batches or make_batches(), margin=0.7, progress=False, **options)


def same_posterior(one: lam.BayesianEncoder, other: lam.BayesianEncoder) -> bool:
    mine, yours = one.posterior, other.posterior
    return (
        torch.equal(mine.weight, yours.weight)
        and torch.equal(mine.curvature.positive, yours.curvature.positive)
        and torch.equal(mine.curvature.negative, yours.curvature.negative)
        and (mine.curvature.n_positives, mine.curvature.n_negatives, mine.n_items, mine.scale)
        == (yours.curvature.n_positives, yours.curvature.n_negatives, yours.n_items, yours.scale)
    )


def test_features_are_what_enters_the_head_and_the_mean_is_near_the_output():
    network, batches = make_network(), make_batches()
    encoder = lam.fit(network, batches, margin=0.7, likelihood_scale=1e12, prior_precision=1e6, progress=False)
    inputs = batches[0][0]
    torch.testing.assert_close(encoder.features(inputs), network[1](network[0](inputs)))
    torch.testing.assert_close(encoder.embed(inputs).mean, F.normalize(network(inputs)), atol=1e-2, rtol=0)
    assert encoder.features(batches).shape == (64, 12)
    assert encoder.dimension == 3


def test_the_curvature_is_the_sum_over_batches():
    batches = make_batches()
    encoder = fit(batches)
    total = None
    for inputs, labels in batches:
        features = encoder.features(inputs)
        head = encoder.network[2]
        part = contrastive_ggn(features, head.weight, head.bias, lam.Pairs.by_label(labels), margin=0.7)
        total = part if total is None else total + part
    torch.testing.assert_close(encoder.posterior.curvature.weight, total.weight)
    assert encoder.posterior.scale == 64.0**2


def test_two_fits_added_equal_one_and_forgetting_undoes_it():
    batches = make_batches(6)
    whole, first, second = fit(batches), fit(batches[:2]), fit(batches[2:])
    joined = first + second
    for name in ("positive", "negative"):
        expected = getattr(whole.posterior.curvature, name)
        torch.testing.assert_close(getattr(joined.posterior.curvature, name), expected, rtol=1e-12, atol=0)
    assert joined.posterior.scale == whole.posterior.scale
    joined.forget(batches[2:])
    torch.testing.assert_close(
        joined.posterior.curvature.weight, first.posterior.curvature.weight, rtol=1e-9, atol=1e-12
    )
    assert joined.posterior.n_items == first.posterior.n_items
    with pytest.raises(ValueError, match="cannot forget 96 of 32 items"):
        joined.forget(batches)


@pytest.mark.parametrize("fix", ["fixed", "positive"])
def test_the_whole_data_set_does_not_depend_on_how_it_is_cut(fix):
    inputs, labels = (torch.cat(parts) for parts in zip(*make_batches(), strict=True))
    options = {"pairs": "dataset", "fix": fix}
    one = fit([(inputs, labels)], fix=fix).posterior.curvature
    for size in (5, 16, 64):
        cut = list(zip(inputs.split(size), labels.split(size), strict=True))
        encoder = fit(cut, **options)
        torch.testing.assert_close(encoder.posterior.curvature.weight.float(), one.weight.float(), rtol=1e-4, atol=1e-6)
        assert encoder.posterior.curvature.n_positives == one.n_positives
    with pytest.raises(ValueError, match="only a posterior fitted in batches can forget; .* of scope dataset"):
        encoder.forget(cut)
    with pytest.raises(ValueError, match="only encoders fitted in batches"):
        encoder + encoder


@pytest.mark.parametrize("fix", ["fixed", "positive", "full"])
def test_features_alone_are_enough(fix):
    batches = make_batches(1, N=40)
    encoder = fit(batches, fix=fix)
    features, labels = encoder.features(batches), batches[0][1]
    head = encoder.network[2]
    alone = lam.fit_features(features, labels, head.weight.detach(), head.bias.detach(), margin=0.7, fix=fix)
    mine, theirs = alone.posterior.curvature.weight, encoder.posterior.curvature.weight
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone.embed(features).kappa, encoder.embed(batches).kappa, rtol=1e-3, atol=0)


def test_places_are_paired_by_distance():
    inputs, _ = make_batches(1, N=30)[0]
    positions = torch.rand(30, 2, generator=torch.Generator().manual_seed(3)) * 60
    distances = {"positive_within": 10.0, "negative_beyond": 25.0}
    in_batch = fit([(inputs, positions)], **distances)
    at_once = fit([(inputs[:17], positions[:17]), (inputs[17:], positions[17:])], pairs="dataset", **distances)
    expected = lam.Pairs.by_distance(positions, 10.0, 25.0)
    for encoder in (in_batch, at_once):
        curvature = encoder.posterior.curvature
        assert (curvature.n_positives, curvature.n_negatives) == (expected.n_positives, expected.n_negatives)
    one, other = in_batch.posterior.curvature.weight, at_once.posterior.curvature.weight
    torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-6)


def test_one_item_has_the_same_kappa_alone_and_in_any_batch():
    batches = make_batches()
    encoder = fit(batches)
    together = encoder.embed(batches)
    assert len(together) == 64
    alone = torch.cat([encoder.embed(batches[1][0][i : i + 1]).kappa for i in range(16)])
    torch.testing.assert_close(alone, together.kappa[16:32], rtol=1e-4, atol=0)


def test_a_batch_is_taken_as_a_loader_yields_it():
    batches = make_batches()
    encoder = fit(batches)
    expected = encoder.embed(batches[0][0]).kappa
    assert torch.equal(encoder.embed(batches[0]).kappa, expected)
    assert torch.equal(encoder.embed(list(batches[0])).kappa, expected)
    assert torch.equal(encoder.embed([batches[0][0]]).kappa, expected)


def test_tuning_by_calibration_lowers_the_error_on_held_out_data():
    batches = make_batches(8, N=32)
    encoder = fit(batches[:4])
    before = encoder.posterior
    encoder.tune(batches[4:], n_samples=16, greatest=1e8)
    tried = dict(encoder.tuning.tried)
    held_out, labels = encoder.features(batches[4:]), torch.cat([targets for _, targets in batches[4:]])
    assert sampled_ece(encoder.posterior, held_out, LabelRelevance(labels), n_samples=16) == encoder.tuning.ece
    assert encoder.tuning.ece < sampled_ece(before, held_out, LabelRelevance(labels), n_samples=16)
    assert encoder.posterior.likelihood_scale == encoder.tuning.likelihood_scale
    assert encoder.tuning.ece == min(tried.values()) < max(tried.values())
    assert encoder.posterior.prior_precision == before.prior_precision
    assert encoder.posterior.curvature is before.curvature
    scales = sorted(tried)
    assert scales == list(tried)
    assert (scales[0], scales[-1]) == (1.0, 1e8)


def test_tuning_by_evidence_chooses_the_prior():
    encoder = fit()
    before = encoder.posterior
    encoder.tune([], by="marginal_likelihood")
    after = encoder.posterior
    assert after.prior_precision != before.prior_precision
    assert before.log_marginal_likelihood(after.prior_precision) > before.log_marginal_likelihood(1.0)


def test_saved_and_loaded_it_is_the_same_to_the_bit(tmp_path: Path):
    batches = make_batches(8, N=32)
    encoder = fit(batches[:4], preprocessing=Preprocessing(mode="L", size=(8, 8)))
    encoder.tune(batches[4:], n_samples=16, greatest=1e8)
    encoder.save(tmp_path / "encoder")
    loaded = lam.load(tmp_path / "encoder", make_network(seed=9))
    assert same_posterior(loaded, encoder)
    assert (loaded.preprocessing, loaded.relation, loaded.tuning, loaded.head) == (
        encoder.preprocessing,
        encoder.relation,
        encoder.tuning,
        encoder.head,
    )
    assert torch.equal(loaded.embed(batches).kappa, encoder.embed(batches).kappa)
    encoder.tune([], by="marginal_likelihood")
    encoder.save(tmp_path / "encoder")
    assert lam.load(tmp_path / "encoder", make_network()).posterior.prior_precision != 1.0


def test_named_networks_are_rebuilt_by_name_and_others_must_be_given(tmp_path: Path):
    network = models.build("convnet8", dimension=3, seed=4)
    images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    encoder = lam.fit(network, [(images, torch.arange(32) % 4)], margin=0.7, progress=False)
    encoder.save(tmp_path / "named")
    loaded = lam.load(tmp_path / "named")
    assert torch.equal(loaded.embed(images).kappa, encoder.embed(images).kappa)
    fit().save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"cannot rebuild by name: pass one of the same architecture"):
        lam.load(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"2\.bias is \(4,\) in the network, \(3,\) in the file; 2\.weight is \(4, 12\)"
    ):
        lam.load(tmp_path / "other", make_network(D=4))
    with pytest.raises(
        ValueError, match=r"0\.bias is missing in the network; .*features\.0\.bias is missing in the file"
    ):
        lam.load(tmp_path / "other", models.build("convnet8", dimension=3))


def test_an_encoder_of_features_is_saved_without_a_network(tmp_path: Path):
    features, labels = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    encoder = lam.fit_features(features, labels, torch.eye(3, 5), margin=0.7)
    encoder.save(tmp_path)
    assert torch.equal(lam.load(tmp_path).embed(features).kappa, encoder.embed(features).kappa)
    with pytest.raises(ValueError, match="saved without a network"):
        lam.load(tmp_path, make_network())
    with pytest.raises(ValueError, match="without a network cannot be exported"):
        encoder.export(tmp_path / "program.pt2", features)


def test_altered_files_and_other_versions_are_refused(tmp_path: Path):
    folder = tmp_path / "encoder"
    fit().save(folder)
    (posterior,) = folder.glob("generation-*/posterior.safetensors")
    content = bytearray(posterior.read_bytes())
    content[-3] ^= 1
    posterior.write_bytes(bytes(content))
    with pytest.raises(CorruptFileError, match=r"posterior.safetensors is truncated or altered"):
        lam.load(folder, make_network())
    with pytest.raises(CorruptFileError, match="MANIFEST.json is missing"):
        lam.load(tmp_path)
    fit().save(folder)
    (metadata,) = folder.glob("generation-*/encoder.json")
    from lam.files import seal, write_json

    write_json(metadata, {**json.loads(metadata.read_text()), "format": 99})
    seal(folder, [str(path.relative_to(folder)) for path in folder.glob("generation-*/*")])
    with pytest.raises(ValueError, match="has format 99, this version of lam reads 2"):
        lam.load(folder, make_network())


def test_exported_it_gives_the_same_for_any_batch_size(tmp_path: Path):
    batches = make_batches()
    encoder = fit(batches)
    with pytest.raises(ValueError, match="the shape of an input is not known: give an example"):
        encoder.export(tmp_path / "encoder.pt2")
    encoder.export(tmp_path / "encoder.pt2", batches[0][0])
    program = torch.export.load(tmp_path / "encoder.pt2").module()
    for size in (2, 5, 16):
        inputs = batches[1][0][:size]
        features, mean, kappa, variance = program(inputs)
        expected = encoder.embed(inputs)
        torch.testing.assert_close(features, encoder.features(inputs))
        torch.testing.assert_close(mean, expected.mean)
        torch.testing.assert_close(kappa, expected.kappa, rtol=1e-4, atol=0)
        torch.testing.assert_close(variance, expected.variance)
    with pytest.raises(ValueError, match="at least 2 inputs"):
        encoder.export(tmp_path / "one.pt2", batches[0][0][:1])


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (None, {"margin": 2.5}, r"margin must be in \(0, 2\]"),
        (None, {"split": "angle"}, "split must be one of euclidean, arccos, got 'angle'"),
        (None, {"fix": "half"}, "fix must be one of positive, fixed, full, got 'half'"),
        (None, {"fix": "full", "pairs": "dataset"}, "fix must be fixed or positive with pairs"),
        (None, {"negative_beyond": 3.0}, "negative_beyond needs positive_within"),
        (None, {"prior_precision": 0.0}, "prior_precision must be positive"),
        ([], {}, "the loader gave no batch"),
        ([(torch.randn(1, 6), torch.tensor([0]))], {}, "at least 2 items are needed to form a pair, got 1"),
        ([(torch.randn(5, 6), torch.zeros(5, dtype=torch.long))], {}, "no batch of the 5 items holds a negative pair"),
        ([(torch.randn(5, 6), torch.arange(5))], {}, "no batch of the 5 items holds a positive pair"),
        ([(torch.randn(5, 6), torch.arange(4))], {}, "there are 5 items and 4 labels"),
        ([torch.randn(5, 6)], {}, "needs batches of inputs with targets"),
        ([(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))], {}, "the first batch is empty"),
    ],
)
def test_bad_input_to_fit_is_refused(batches, options, message):
    batches = make_batches() if batches is None else batches
    with pytest.raises(ValueError, match=message):
        unchecked(lam.fit)(make_network(), batches, **{"margin": 0.7, "progress": False, **options})


def test_an_unknown_scope_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="pairs must be one of batch, dataset, got 'epoch'"):
        fit(pairs="epoch")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(8, dtype=torch.long), "all 8 items have one label: there is no negative pair"),
        (torch.arange(8), "no two of 8 items share a label: there is no positive pair"),
        (torch.arange(7), "there are 8 items and 7 labels"),
    ],
)
def test_bad_labels_are_refused_before_any_work(labels, message):
    with pytest.raises(ValueError, match=message):
        lam.fit_features(torch.full((8, 4), float("nan")), labels, torch.eye(3, 4), margin=0.7)


def test_labels_of_a_data_set_are_checked_before_the_network_runs():
    class OneClass(torch.utils.data.Dataset):
        labels = torch.zeros(6, dtype=torch.long)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise AssertionError("an image was read")

    with pytest.raises(ValueError, match="all 6 items have one label"):
        lam.fit(make_network(), torch.utils.data.DataLoader(OneClass(), batch_size=2), margin=0.7, progress=False)


def test_features_that_are_not_finite_are_named_by_their_place_in_the_data():
    batches = make_batches()
    batches[2][0][5, 0] = float("nan")
    for options in ({}, {"pairs": "dataset"}):
        with pytest.raises(ValueError, match="features must be finite, got nan at item 37"):
            fit(batches, **options)
    encoder = fit()
    with pytest.raises(ValueError, match="got nan at item 37"):
        encoder.embed(batches)


def test_bad_input_to_tune_is_refused():
    encoder = fit()
    with pytest.raises(ValueError, match="by must be one of calibration, marginal_likelihood, got 'luck'"):
        unchecked(lam.BayesianEncoder.tune)(encoder, make_batches(), by="luck")
    with pytest.raises(ValueError, match="marginal_likelihood can choose prior_precision, not 'likelihood_scale'"):
        encoder.tune(make_batches(), by="marginal_likelihood", over="likelihood_scale")
    with pytest.raises(ValueError, match="marginal_likelihood takes no options, got n_samples"):
        encoder.tune(make_batches(), by="marginal_likelihood", n_samples=3)
    with pytest.raises(ValueError, match="batches of inputs with labels"):
        encoder.tune([make_batches()[0][0]])
    with pytest.raises(ValueError, match="at least 2 items are needed to form a pair, got 1"):
        encoder.tune([(torch.randn(1, 6), torch.tensor([0]))])


def test_half_precision_networks_keep_a_float32_posterior():
    network = make_network().bfloat16()
    batches = [(inputs.bfloat16(), labels) for inputs, labels in make_batches()]
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    assert encoder.posterior.weight.dtype == torch.float32
    assert encoder.embed(batches).kappa.dtype == torch.float32
    assert network[2].weight.dtype == torch.bfloat16


def test_moved_to_a_device_it_stays_the_same():
    batches = make_batches()
    encoder = fit(batches)
    expected = encoder.embed(batches).kappa
    assert encoder.to("cpu") is encoder
    assert torch.equal(encoder.embed(batches).kappa, expected)
    assert encoder.posterior.to("cpu").seed == encoder.posterior.seed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_curvature_of_the_cpu():
    batches = make_batches()
    network = make_network().double()
    doubled = [(inputs.double(), labels) for inputs, labels in batches]
    on_cpu = lam.fit(network, doubled, margin=0.7, progress=False)
    on_gpu = lam.fit(make_network().double().cuda(), doubled, margin=0.7, progress=False)
    torch.testing.assert_close(
        on_gpu.posterior.curvature.weight.cpu(), on_cpu.posterior.curvature.weight, rtol=1e-10, atol=1e-12
    )
    assert on_gpu.embed(doubled).kappa.device.type == "cuda"
    on_gpu.tune(doubled, n_samples=4, greatest=1e3)
    assert lam.evaluate(on_gpu, doubled, [doubled[0][0]], n_samples=4).metrics["recall@1"] > 0


def test_images_are_exported_without_an_example(tmp_path: Path):
    network = models.build("convnet8", dimension=3)
    images = torch.rand(16, 1, 8, 8)
    sort = Preprocessing(mode="L", size=(8, 8))
    encoder = lam.fit(network, [(images, torch.arange(16) % 4)], margin=0.7, preprocessing=sort, progress=False)
    encoder.export(tmp_path / "encoder.pt2", n_samples=8)
    kappa = torch.export.load(tmp_path / "encoder.pt2").module()(images)[2]
    torch.testing.assert_close(kappa, encoder.embed(images, n_samples=8).kappa, rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [1e20, 1e38])
def test_features_too_large_to_square_are_named_and_never_fitted(value: float):
    features, labels = torch.randn(12, 5), torch.arange(12) % 3
    features[7, 2] = value
    layer = torch.eye(3, 5)
    with pytest.raises(ValueError, match=r"at most 4.3e\+09 in size, .* at item 7, feature 2"):
        lam.fit_features(features, labels, layer, margin=0.7)
    encoder = lam.fit_features(torch.randn(12, 5), labels, layer, margin=0.7)
    with pytest.raises(ValueError, match="at item 7, feature 2"):
        encoder.embed(features)
    with pytest.raises(ValueError, match="the curvature of the weight is not finite"):
        replace(
            encoder.posterior, curvature=replace(encoder.posterior.curvature, positive=torch.full((3, 5), torch.inf))
        )


def test_an_item_with_no_features_at_all_is_uncertain_not_an_error():
    features, labels = torch.randn(12, 5), torch.arange(12) % 3
    for bias in (None, torch.tensor([0.1, -0.2, 0.3])):
        encoder = lam.fit_features(features, labels, torch.eye(3, 5), bias, margin=0.7, likelihood_scale=1e6)
        empty = torch.zeros(1, 5)
        alone = encoder.embed(empty)
        together = encoder.embed(torch.cat([features[:3], empty]))
        torch.testing.assert_close(alone.kappa[0], together.kappa[3])
        assert alone.mean.norm() == pytest.approx(1, abs=1e-6)
    without = lam.fit_features(features, labels, torch.eye(3, 5), margin=0.7, likelihood_scale=1e6)
    assert without.embed(torch.zeros(1, 5)).kappa < 1 < without.embed(features).kappa.median()
    with pytest.raises(ValueError, match="features are all zero"):
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


@pytest.mark.filterwarnings("ignore:.*predictive variance is due")  # the network is not trained
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


@pytest.mark.parametrize("labels", [torch.rand(12), torch.zeros(12, 2, dtype=torch.long)])
def test_labels_that_are_no_vector_of_integers_are_refused(labels):
    with pytest.raises(ValueError, match="labels must be integers of shape"):
        lam.fit_features(torch.randn(12, 5), labels, torch.eye(3, 5), margin=0.7)


def test_encoders_with_other_settings_or_networks_do_not_add_up():
    batches = make_batches()
    with pytest.raises(ValueError, match=r"same prior precision, likelihood scale and seed add up, got .*: add first"):
        fit(batches) + fit(batches, prior_precision=2.0)
    other = make_network()
    with torch.no_grad():
        other[0].weight.add_(1)
    with pytest.raises(ValueError, match="only encoders of one network add up"):
        fit(batches) + lam.fit(other, batches, margin=0.7, progress=False)


def test_a_batch_without_positive_pairs_can_be_forgotten():
    batches = make_batches(3)
    lonely = (torch.randn(3, 6), torch.arange(3))
    encoder = fit([*batches, lonely])
    encoder.forget([lonely])
    assert same_posterior(encoder, fit(batches)) or encoder.posterior.n_items == 48
    torch.testing.assert_close(encoder.posterior.curvature.weight, fit(batches).posterior.curvature.weight)


def test_one_batch_is_enough_for_every_call():
    batch = make_batches(1, N=40)[0]
    encoder = lam.fit(make_network(), batch, margin=0.7, progress=False)
    assert encoder.posterior.n_items == 40
    encoder.tune(batch, n_samples=4)
    assert lam.evaluate(encoder, batch, n_samples=4).metrics["n_queries"] == 40
    for nothing in ([], batch[0][:0]):
        with pytest.raises(ValueError, match="there are no inputs to embed"):
            encoder.embed(nothing)
        with pytest.raises(ValueError, match="there are no inputs to embed"):
            encoder.observe(nothing)


def test_places_that_are_all_near_each_other_have_no_negative_pair():
    inputs, positions = torch.randn(20, 6), torch.rand(20, 2)
    with pytest.raises(ValueError, match="all 20 places are near each other"):
        lam.fit_features(inputs, positions, torch.eye(3, 6), margin=0.7, positive_within=10.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"least": 0.0}, "0 < least < greatest, got 0.0 and"),
        ({"least": 1e5, "greatest": 1e3}, "0 < least < greatest, got 100000.0 and 1000.0"),
        ({"refinements": -1}, "refinements must be at least 0"),
    ],
)
def test_ranges_of_scales_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        fit().tune(make_batches(), **options)


def test_tuning_stays_in_its_range_and_says_when_it_ends_there():
    encoder = fit()
    with pytest.warns(UserWarning, match="the best likelihood scale, .*, is at an end of the range tried, 0.001 to 1"):
        encoder.tune(make_batches(), n_samples=4, least=1e-3, greatest=1.0)
    assert all(1e-3 <= scale <= 1.0 for scale, _ in encoder.tuning.tried)
    with pytest.raises(ValueError, match="all 8 items have one label"):
        encoder.tune([(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))])


def test_data_sets_of_others_are_checked_by_their_targets():
    class Others(torch.utils.data.Dataset):
        targets: ClassVar[list[int]] = [3, 3, 3]

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise AssertionError("an image was read")

    with pytest.raises(ValueError, match="all 3 items have one label"):
        lam.fit(make_network(), torch.utils.data.DataLoader(Others()), margin=0.7, progress=False)


def test_tuning_says_when_clipped_weights_make_it_pointless():
    batches = make_batches(8, N=32)
    encoder = fit(batches[:4])
    curvature = encoder.posterior.curvature
    positive = curvature.positive.abs() + curvature.positive.abs().mean()
    positive[:, 3] = -1
    none = torch.zeros_like(positive)
    encoder.posterior = replace(encoder.posterior, curvature=replace(curvature, positive=positive, negative=none))
    with pytest.warns(UserWarning, match=r"of the predictive variance is due to the .* whose curvature is negative"):
        encoder.tune(batches[4:], n_samples=8, greatest=1e8)
