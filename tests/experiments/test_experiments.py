"""The experiments: their data, learning in a short run, written files, and errors."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lam import losses
from lam.cli import main
from lam.encoders.base import Prediction
from lam.experiments import EXPERIMENTS, conduct, load_experiment
from lam.experiments.aninfonce_latents import AnInfoNCELatents, near, observation, pairs_of_way, uniform_on_sphere
from lam.experiments.augmentation_readout import AugmentationReadout
from lam.experiments.base import SECONDS, Plot
from lam.experiments.explicit_concentration import BY_KIND, BY_OOD_SET, ExplicitConcentration, outlyingness
from lam.experiments.images import NETWORKS
from lam.experiments.networks import trained_decoder
from lam.experiments.posterior_recovery import PosteriorRecovery, Process, compared, drawn, pairs_of_batch
from lam.experiments.report import _picture
from lam.experiments.varcon_accuracy import ClassDirections, VarConAccuracy
from lam.inputs.corruption import published_kinds
from lam.losses import AnInfoNCE, MCInfoNCE
from lam.methods import Deterministic
from lam.models import build
from lam.pairs import Pairs
from lam.retrieval.metrics.uncertainty import rank_correlation
from lam.training import Training
from lam.vmf import Embeddings, VonMisesFisher
from lam.vmf.bessel import log_normalizer

SHORT: dict[str, dict[str, Any]] = {
    "posterior-recovery": {
        **{"n_batches": 4, "batch_size": 8, "n_negatives": 4, "straightening": 20, "n_samples": 2, "n_test": 50}
    },
    "aninfonce-latents": {"n_batches": 4, "batch_size": 8, "width": 8, "n_test": 100},
    "augmentation-readout": {"limit": 60, "epochs": 4, "batch_size": 16, "losses": ("infonce", "unnormalised")},
    "varcon-accuracy": {
        **{"losses": ("varcon", "cross_entropy"), "batch_sizes": (16,), "few": (3,)},
        **{"limit": 60, "epochs": 4, "n_corrupted": 10},
    },
    "explicit-concentration": {
        **{"bases": ("simclr", "byol"), "additions": ("none", "square"), "ood": {"digits_patches": None}},
        **{"limit": 60, "epochs": 4, "n_corrupted": 10, "batch_size": 16},
    },
}
LEARNING: dict[str, Any] = {
    **{"accelerator": "cpu", "dimension": 4, "style": 2.0, "content": 40.0, "batch_size": 128, "learning_rate": 1e-2}
}


@pytest.mark.long
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_writes_a_table_and_a_page_and_the_seed_repeats_it(name: str, tmp_path: Path) -> None:
    experiment, state, seen = EXPERIMENTS[name](**SHORT[name], accelerator="cpu"), torch.get_rng_state(), []
    outcome = conduct(experiment, tmp_path / "one", progress=lambda *facts: seen.append(facts))
    assert torch.equal(torch.get_rng_state(), state)
    first = next(iter(outcome.rows[0]))
    assert {facts[0] for facts in seen} == {row[first] for row in outcome.rows}
    assert max(done for _, done, _ in seen) == 4
    again = conduct(experiment, tmp_path / "two")
    for row, other in zip(outcome.rows, again.rows, strict=True):
        for column in set(row) - {SECONDS}:
            is_number = isinstance(other[column], float)
            assert row[column] == (pytest.approx(other[column], rel=1e-5) if is_number else other[column])
    written = json.loads((tmp_path / "one" / "outcome.json").read_text())
    assert written["experiment"] == name
    assert written["rows"] == [dict(row) for row in outcome.rows]
    page = (tmp_path / "one" / "report.html").read_text()
    assert written["tables"] == {title: [dict(row) for row in table] for title, table in outcome.tables.items()}
    for heading in (experiment.title, *outcome.tables):
        assert heading in page
    assert ("data:image/png;base64," in page) == bool(outcome.plots)
    assert 'src="http' not in page


def test_the_command_prints_the_table_and_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    settings = [f"--{name}={value}" for name, value in (SHORT["posterior-recovery"] | {"losses": "[elk]"}).items()]
    folder = str(tmp_path / "out")
    assert main(["experiment", "posterior-recovery", "--quiet", "-o", folder, *settings]) == 0
    printed = capsys.readouterr().out
    assert "loss elk  RMSE of μ" in printed
    assert f"report: {folder}/report.html" in printed
    assert main(["experiment", "posterior-recovery", "--dimension=1"]) == 1
    assert "at least 2, got 1" in capsys.readouterr().err


def test_an_experiment_leaves_the_report_of_a_run_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("of a run")
    with pytest.raises(ValueError, match="report.html.*--output"):
        conduct(PosteriorRecovery(**SHORT["posterior-recovery"]), tmp_path)
    assert (tmp_path / "report.html").read_text() == "of a run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing", "no experiment 'nothing'.*posterior-recovery, aninfonce-latents, aug"),
        ("posterior-recovery --depth=3", "no setting depth.*`lam experiment --help`"),
        ("posterior-recovery --dimension", "dimension needs a"),
        ("posterior-recovery --dimension=1", "dimension.*2.*1"),
        ("posterior-recovery --losses=[nice]", "'elk', 'hib' or 'infonce', got 'nice'"),
        ("posterior-recovery --n_batches=abc", "a valid integer, .* got 'abc'"),
        ("posterior-recovery --losses=[]", "losses.*mc_infonce, elk, hib, infonce.*none"),
        ("posterior-recovery --ambiguity=[32,16]", "1 < least < largest.*.inf.*32.0 and 16.0"),
        ("posterior-recovery --ambiguity=[16,.inf]", "1 < least < largest.*.inf.*16.0 and inf"),
        ("posterior-recovery --posterior=cauchy", "'vmf', 'gaussian' or 'laplace', got 'cauchy'"),
        ("posterior-recovery --encoder_dimension=1", "encoder_dimension.*2.*1"),
        ("aninfonce-latents --dimension=5", "dimension.*got 5"),
        ("aninfonce-latents --content=0", "content.*0"),
        ("aninfonce-latents --ways=3", "ways.*1 or 2.*3"),
        ("aninfonce-latents --n_hard=-1", "n_hard.*0.*-1"),
        ("aninfonce-latents --hard_from=6000", "hard_from.*below n_batches, 6000.*6000"),
        ("aninfonce-latents --others=false", "give n_hard"),
        ("aninfonce-latents --others=false --n_hard=3 --hard=5", "hard.*5, got 5"),
        ("aninfonce-latents --images=cats", "images: .* got 'cats'"),
        ("aninfonce-latents --drift=-1", "drift.*0.*-1"),
        ("aninfonce-latents --vae_epochs=0", "vae_epochs.*1.*0"),
        ("augmentation-readout --losses=[]", "losses.*infonce, aninfonce, unnorm"),
        ("augmentation-readout --temperature=0", "temperature.*positive.*0"),
        ("augmentation-readout --n_corrupted=5", "n_corrupted.*20.*5"),
        ("augmentation-readout --crop_scale=2", r"crop_scale.*\(0, 1\]"),
        ("varcon-accuracy --batch_sizes=[]", "batch_sizes.*size.*none"),
        ("varcon-accuracy --few=[1]", "few.*2.*1"),
        ("varcon-accuracy --losses=[hinge]", "losses.0.*'varcon', 'supcon', 'cross_"),
        ("varcon-accuracy --epsilon=0.1", "epsilon.*±temperature, 0.1.*0.1"),
        ("varcon-accuracy --network=vgg", "network: .* got 'vgg'"),
        ("explicit-concentration --jitter=1", r"jitter.*\[0, 1\).*1"),
        ("explicit-concentration --noise=-1", "noise.*0.*-1"),
        ("varcon-accuracy --temperature=0", "temperature.*positive.*0"),
        ("explicit-concentration --bases=[]", "bases.*simclr, simsiam, byol, sw"),
        ("explicit-concentration --weight=-1", "weight.*positive.*-1"),
        ("explicit-concentration --limit=3", "limit.*40.*3"),
        ("explicit-concentration --data=cars", "data: .* 'folder', got 'cars'"),
    ],
)
def test_settings_that_cannot_be_are_named(words: str, message: str) -> None:
    name, *settings = words.split()
    with pytest.raises(ValueError, match=message):
        load_experiment(name, settings)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PosteriorRecovery, "run", lambda *_: pytest.fail("the experiment has run"))
    (tmp_path / "file").touch()
    assert main(["experiment", "posterior-recovery", "-o", str(tmp_path / "file")]) == 1
    assert "File exists" in capsys.readouterr().err


def test_a_learning_rate_that_is_too_large_is_named() -> None:
    experiment = PosteriorRecovery(**SHORT["posterior-recovery"] | {"n_batches": 20}, learning_rate=1e9)
    with pytest.raises(ValueError, match=r"mc_infonce.*batch \d+: lower learning_rate \(now 1e\+09\)"):
        experiment.run(lambda *_: None)
    latents = AnInfoNCELatents(**SHORT["aninfonce-latents"] | {"n_batches": 20}, learning_rate=1e9)
    with pytest.raises(ValueError, match=r"the training diverged: lower learning_rate \(now 1e\+09\)"):
        latents.run(lambda *_: None)


def test_the_process_has_its_range_and_directions_that_go_with_the_inputs() -> None:
    for dimension in (2, 10):
        process = Process(PosteriorRecovery(accelerator="cpu", dimension=dimension, straightening=300))
        inputs = torch.rand(3000, dimension, generator=torch.Generator().manual_seed(1))
        mean, kappa = process.mean(inputs), process.kappa(inputs)
        assert kappa.min() > 14
        assert kappa.max() < 36
        assert kappa.max() - kappa.min() > 10
        angles = (mean[:1500] * mean[1500:]).sum(1).clamp(-1, 1).acos()
        distances = (inputs[:1500] - inputs[1500:]).norm(dim=1)
        assert torch.corrcoef(torch.stack([angles, distances]))[0, 1] > 0.6
        close = process.mean(inputs + 1e-3 / dimension**0.5)
        assert (mean * close).sum(1).min() > 0.99  # nowhere does the direction turn round within a thousandth


@pytest.mark.long
def test_the_positives_of_a_latent_have_the_density_of_the_theory() -> None:
    process, n_cells, n = Process(PosteriorRecovery(accelerator="cpu", straightening=300, kappa_pos=5.0)), 6, 4000
    latent, generator = torch.tensor([0.6, 0.8]), torch.Generator().manual_seed(0)
    positives = torch.cat([process.positives(latent.expand(n // 100, 2), generator) for _ in range(100)])
    steps = (torch.arange(10 * n_cells) + 0.5) / (10 * n_cells)
    grid = torch.cartesian_prod(steps, steps)
    mean, kappa = process.mean(grid).double(), process.kappa(grid).double()
    total = (kappa[:, None] * mean + 5.0 * latent).norm(dim=1)  # E e^(κ_pos z·z⁺) = C(κ) / C(‖κ μ + κ_pos z‖)
    density = (log_normalizer(2, kappa) - log_normalizer(2, total)).exp()
    cells = [((points * n_cells).long() * torch.tensor([n_cells, 1])).sum(1) for points in (grid, positives)]
    expected = torch.zeros(n_cells**2, dtype=torch.float64).index_add(0, cells[0], density / density.sum() * n)
    counts = torch.bincount(cells[1], minlength=n_cells**2)
    assert expected.min() > 5
    chi_square = ((counts - expected).square() / expected).sum()
    assert chi_square < n_cells**2 + 3 * (2 * n_cells**2) ** 0.5  # three standard deviations


def test_the_pairs_of_a_batch_go_one_way() -> None:
    process = Process(PosteriorRecovery(accelerator="cpu", straightening=100))
    batch = next(process.batches(400, 7, torch.Generator().manual_seed(0)))
    assert batch.shape == (807, 2)
    mean = process.mean(batch)
    positive, others = (mean[:400] * mean[400:800]).sum(1), mean[:400] @ mean[:400].T
    assert positive.mean() > others.mean() + 0.3
    pairs = pairs_of_batch(400, 7)
    assert pairs.positive.sum(1).tolist() == [1] * 400 + [0] * 407
    assert pairs.negative.sum(1).tolist() == [7] * 400 + [0] * 407


@pytest.mark.long
def test_the_truth_is_where_mcinfonce_is_least() -> None:
    experiment = PosteriorRecovery(accelerator="cpu", straightening=300)
    process, pairs, loss = Process(experiment), pairs_of_batch(256, 256), MCInfoNCE(20.0, n_samples=32)
    batches, slopes = process.batches(256, 256, experiment.generator("batches")), {0.6: 0.0, 1.0: 0.0, 1.6: 0.0}
    true, mirrored = 0.0, 0.0
    for inputs in (next(batches) for _ in range(8)):
        mean, kappa = process.mean(inputs), process.kappa(inputs)
        for factor in slopes:
            log_factor = torch.tensor(factor).log().requires_grad_()
            loss(mean, kappa * log_factor.exp(), pairs, generator=torch.Generator().manual_seed(0)).backward()
            assert log_factor.grad is not None
            slopes[factor] += float(log_factor.grad) / 8
        true += float(loss(mean, kappa, pairs, generator=torch.Generator().manual_seed(0)))
        mirrored += float(loss(mean, 48 - kappa, pairs, generator=torch.Generator().manual_seed(0)))
    assert slopes[0.6] < -0.05
    assert abs(slopes[1.0]) < 0.035
    assert slopes[1.6] > 0.04
    assert true < mirrored


@pytest.mark.long
def test_the_loss_hardly_tells_narrower_means_of_greater_kappa_from_the_truth() -> None:
    """If latents cover only a part of the circle, a pair's spread is about 1/κ_pos + 2/κ, the same for both."""
    experiment, factor = PosteriorRecovery(accelerator="cpu"), 0.7
    process, pairs = Process(experiment), pairs_of_batch(256, 256)
    batches = process.batches(256, 256, experiment.generator("batches"))
    middle = torch.atan2(*process.mean(torch.full((1, 2), 0.5)).flip(1).unbind(1))
    gain = {16: 0.0, 64: 0.0}
    for number, inputs in enumerate(next(batches) for _ in range(10)):
        mean, kappa = process.mean(inputs), process.kappa(inputs)
        angle = torch.atan2(mean[:, 1], mean[:, 0]) - middle
        narrow = factor * (torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi) + middle
        sharper = 2 / (factor**2 * (1 / 20 + 2 / kappa) - 1 / 20)
        assert (sharper > 0).all()
        for n_samples in gain:
            losses = [
                float(MCInfoNCE(20.0, n_samples)(*posteriors, pairs, generator=torch.Generator().manual_seed(number)))
                for posteriors in ((mean, kappa), (torch.stack([narrow.cos(), narrow.sin()], 1), sharper))
            ]
            gain[n_samples] += (losses[0] - losses[1]) / 10
    assert abs(gain[64]) < 0.015
    assert gain[16] > 0.015


def test_the_truth_itself_is_perfectly_recovered() -> None:
    process = Process(PosteriorRecovery(accelerator="cpu", straightening=50))
    values = compared(process, process.posteriors, torch.rand(500, 2, generator=torch.Generator().manual_seed(0)))
    assert values == pytest.approx(
        {f"RMSE of {what}": 0.0 for what in ("μ", "κ", "spread")}
        | {f"rank correlation of {what}": 1.0 for what in ("μ", "κ", "spread")}
        | {"median of κ̂": values["median of κ̂"], "κ̂ over κ": 1.0, "angles of μ̂ over those of μ": 1.0}
    )
    assert 16 < values["median of κ̂"] < 32  # pyright: ignore [reportOperatorIssue]


def test_an_injective_process_has_one_latent_for_each_input_and_no_finite_kappa(tmp_path: Path) -> None:
    settings = [
        "--ambiguity=[.inf,.inf]",
        *(f"--{name}={value}" for name, value in SHORT["posterior-recovery"].items()),
    ]
    experiment = load_experiment("posterior-recovery", [*settings, "--losses=[mc_infonce]"])
    assert isinstance(experiment, PosteriorRecovery)
    process, inputs = Process(experiment), torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    assert process.kappa(inputs).isinf().all()
    torch.testing.assert_close(process.latents(inputs, torch.Generator()), process.mean(inputs))
    (row,) = conduct(experiment, tmp_path).rows
    assert json.loads((tmp_path / "outcome.json").read_text())["settings"]["ambiguity"] == ["inf", "inf"]
    assert row["RMSE of κ"] is row["rank correlation of κ"] is row["κ̂ over κ"] is None
    assert row["median of κ̂"] > 1  # pyright: ignore [reportOperatorIssue]
    assert 0 < row["RMSE of spread"] < 1  # pyright: ignore [reportOperatorIssue]


@pytest.mark.parametrize("family", ["vmf", "gaussian", "laplace"])
def test_latents_of_each_family_have_the_spread_that_is_reported(family: Any) -> None:
    process = Process(PosteriorRecovery(accelerator="cpu", dimension=3, straightening=20, posterior=family))
    inputs = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    many = inputs.repeat_interleave(20_000, 0)
    latents = process.latents(many, torch.Generator().manual_seed(1))
    torch.testing.assert_close(latents.norm(dim=1), torch.ones(len(many)))
    gaps = (1 - (latents * process.mean(many)).sum(1)).view(6, -1).mean(1).double()
    torch.testing.assert_close(process.spread(inputs).double(), gaps, rtol=0.25, atol=0)
    scale = process.kappa(inputs).double() * gaps  # a noise of variance v in each of two tangents has a spread of v
    expected = {"vmf": 1.0, "gaussian": 1.0, "laplace": 2 / process.kappa(inputs).double()}[family]
    torch.testing.assert_close(scale, torch.ones(6).double() * expected, rtol=0.15, atol=0)


@pytest.mark.parametrize("changes", [{"encoder_dimension": 3}, {"shared": True}, {"losses": ("infonce",)}])
def test_the_encoder_may_differ_from_the_process(changes: dict[str, Any]) -> None:
    experiment = PosteriorRecovery(**{**SHORT["posterior-recovery"], "losses": ("elk",), **changes}, accelerator="cpu")
    inputs = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    process = Process(experiment)
    learned = experiment.learn(experiment.losses[0], process, lambda *_: None)
    assert learned.mean(inputs).shape == (5, changes.get("encoder_dimension", 2))
    if "shared" in changes:
        for posteriors in (process.posteriors, learned):
            assert posteriors.of_kappa[0].in_features == 2  # pyright: ignore
            nudged = posteriors.kappa(inputs)
            torch.nn.init.zeros_(posteriors.of_mean[-1].weight)  # pyright: ignore
            assert not torch.equal(posteriors.kappa(inputs), nudged)
    (row,) = experiment.run(lambda *_: None).rows
    assert (row["RMSE of κ"] is None) == (experiment.losses == ("infonce",))


@pytest.mark.long
def test_infonce_learns_the_directions_alone() -> None:
    short = SHORT["posterior-recovery"] | {"n_batches": 200, "batch_size": 128, "n_negatives": 128}
    experiment = PosteriorRecovery(**{**short, "losses": ("infonce",), "straightening": 300}, accelerator="cpu")
    (row,) = experiment.run(lambda *_: None).rows
    assert row["rank correlation of μ"] > 0.8  # pyright: ignore [reportOperatorIssue]
    assert row["rank correlation of κ"] is None


def test_pictures_in_two_dimensions_lie_on_each_other_after_the_rotation() -> None:
    process = Process(PosteriorRecovery(accelerator="cpu", straightening=50))
    turned = Process(PosteriorRecovery(accelerator="cpu", straightening=50)).posteriors
    rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    plain = turned.mean
    turned.mean = lambda inputs: plain(inputs) @ rotation  # pyright: ignore [reportAttributeAccessIssue]
    curves = drawn(process, turned, torch.rand(50, 2, generator=torch.Generator().manual_seed(0))).curves
    assert len(curves) == 10
    for number in range(1, 6):
        true, learned = (torch.tensor(curves[f"{number}, {name}"]) for name in ("true", "learned"))
        torch.testing.assert_close(true, learned, rtol=1e-3, atol=1e-4)
        assert float(torch.trapezoid(true[:, 1], true[:, 0])) == pytest.approx(1, abs=1e-3)


def test_positive_latents_have_the_density_that_is_asked_for() -> None:
    anchors = uniform_on_sphere(4000, 3, torch.Generator().manual_seed(0))
    isotropic = near(anchors, torch.full((3,), 6.0), torch.Generator().manual_seed(1))
    torch.testing.assert_close(isotropic.norm(dim=1), torch.ones(4000))
    cosine = (anchors * isotropic).sum(1).mean()  # e^(−6‖x − z‖²) on the sphere is von Mises-Fisher at κ = 12
    expected = VonMisesFisher(anchors[0], torch.tensor(12.0)).mean.norm()
    assert float(cosine) == pytest.approx(float(expected), abs=0.01)
    gap = (near(anchors, torch.tensor([2.0, 2.0, 50.0]), torch.Generator().manual_seed(1)) - anchors).square().mean(0)
    assert gap[2] < gap[:2].min() / 4


def test_a_dimension_in_which_positives_are_too_rare_is_named() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="60 dimensions.*Λ from 5 to 5.*dimension.*style"):
        near(uniform_on_sphere(1, 60, generator), torch.full((60,), 5.0), generator)


def test_what_is_observed_can_be_inverted() -> None:
    network, z = (
        observation(6, torch.Generator().manual_seed(0)),
        uniform_on_sphere(50, 6, torch.Generator().manual_seed(1)),
    )
    x = network(z)
    for layer in reversed(list(network)):
        x = x @ layer.weight if isinstance(layer, torch.nn.Linear) else torch.where(x > 0, x, 5 * x)
    torch.testing.assert_close(x, z, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_aninfonce_tells_style_from_content_in_few_batches() -> None:
    experiment = AnInfoNCELatents(**LEARNING, n_batches=300, width=64, n_test=500)
    outcome = experiment.run(lambda *_: None)
    anisotropic, isotropic = outcome.rows
    assert anisotropic["R² of content"] > 0.8  # pyright: ignore [reportOperatorIssue]
    assert anisotropic["Λ of content"] > 1.3 * anisotropic["Λ of style"]  # pyright: ignore
    assert isotropic["Λ of style"] is None
    losses = {name: dict(points)[300.0] for name, points in outcome.plots["Loss over batches"].curves.items()}
    assert losses["aninfonce"] == pytest.approx(losses["aninfonce, at the truth"], abs=0.5)
    first = dict(outcome.plots["Loss over batches"].curves["aninfonce"])[15.0]
    assert first > losses["aninfonce"] > losses["aninfonce, at the truth"] - 0.1


@pytest.mark.long
def test_an_ensemble_has_a_concentration_for_each_way() -> None:
    experiment = AnInfoNCELatents(**LEARNING, n_batches=200, width=32, n_test=100, ways=2, losses=("ensemble",))
    assert experiment.concentrations.tolist() == [[2, 2, 40, 40], [40, 40, 2, 2]]
    latents = next(experiment.batches(torch.Generator().manual_seed(0))).view(3, 128, 4)
    squares = (latents[1:] - latents[0]).square().mean(1)
    assert squares[0, :2].min() > 3 * squares[0, 2:].max()
    assert squares[1, 2:].min() > 3 * squares[1, :2].max()
    (row,) = experiment.run(lambda *_: None).rows
    assert row["correlation of both Λ"] < -0.3  # pyright: ignore [reportOperatorIssue]
    assert row["Λ of content"] > 1.3 * row["Λ of style"]  # pyright: ignore


def test_negatives_near_the_anchor_are_added_to_the_others_or_are_all_there_are() -> None:
    options: dict[str, Any] = {"dimension": 4, "n_hard": 3, "hard": 50.0, "batch_size": 20}
    experiment = AnInfoNCELatents(accelerator="cpu", **options, hard_from=2)
    batches = experiment.batches(torch.Generator().manual_seed(0))
    assert [len(next(batches)) for _ in range(4)] == [40, 40, 100, 100]
    latents = next(batches)
    anchors, hard = latents[:20], latents[40:].view(20, 3, 4)
    assert (anchors[:, None] * hard).sum(-1).mean() > 0.95
    (pairs,) = experiment.pairs(3, torch.device("cpu"))
    assert pairs.negative[1].nonzero()[:, 0].tolist() == [0, *range(2, 20), 43, 44, 45]
    assert pairs.negative.sum(1).tolist() == [19 + 3] * 20 + [0] * 80
    alone = pairs_of_way(20, 1, 1, 3, others=False)
    assert alone.negative[1].nonzero()[:, 0].tolist() == [43, 44, 45]
    short = SHORT["aninfonce-latents"] | {"n_hard": 2, "losses": ("aninfonce",)}
    rows = [
        AnInfoNCELatents(accelerator="cpu", **short, **further).run(lambda *_: None).rows[0]
        for further in ({}, {"hard_from": 2}, {"others": False})
    ]
    assert len({row["Λ of style"] for row in rows}) == 3


@pytest.mark.long
def test_of_near_negatives_alone_the_best_similarity_has_the_difference_of_both_concentrations() -> None:
    near: dict[str, Any] = {"n_hard": 16, "hard": 8.0, "others": False}
    concentrations: dict[str, Any] = {"style": 20.0, "content": 20.0, "initial": 20.0}
    experiment = AnInfoNCELatents(accelerator="cpu", dimension=4, batch_size=64, **near, **concentrations)
    batches, slopes = experiment.batches(torch.Generator().manual_seed(0)), {6.0: 0.0, 12.0: 0.0, 24.0: 0.0}
    (pairs,) = experiment.pairs(16, torch.device("cpu"))
    for latents in (next(batches) for _ in range(20)):
        for similarity in slopes:
            loss = AnInfoNCE(4, similarity)
            loss(latents, pairs).backward()
            assert loss.log_concentration.grad is not None
            slopes[similarity] += float(loss.log_concentration.grad.sum()) / 20
    assert slopes[6.0] < -0.1
    assert abs(slopes[12.0]) < 0.05
    assert slopes[24.0] > 0.1


def test_corruptions_begin_with_the_images_themselves_and_are_inputs_of_the_network() -> None:
    experiment = ExplicitConcentration(accelerator="cpu", n_corrupted=7)
    _, test = experiment.parts()
    kinds = dict(experiment.corruptions(test))
    assert tuple(kinds) == published_kinds(1)
    clean, *worse = kinds["brightness"]
    assert torch.equal(clean, torch.stack([test[row][0] for row in range(7)]))
    assert len(worse) == 5
    assert [float(images.mean()) for images in worse] == sorted(float(images.mean()) for images in worse)


def test_few_images_are_as_many_of_each_class_and_differ_by_seed() -> None:
    train, _ = VarConAccuracy().parts()
    few = [VarConAccuracy(seed=seed)._few(train, 3) for seed in (0, 0, 1)]
    assert few[0].labels.bincount().tolist() == [3] * 8
    assert torch.equal(few[0][5][0], few[1][5][0])
    assert not all(torch.equal(few[0][row][0], few[2][row][0]) for row in range(24))


def test_cross_entropy_is_that_of_cosines_with_learned_directions() -> None:
    loss, labels = ClassDirections(3, 2, 0.5, seed=0), torch.tensor([0, 2, 1, 1])
    rows = torch.nn.functional.normalize(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    expected = 0.0
    for row, label in zip(rows, labels, strict=True):
        scores = [float(row @ (direction / direction.norm())) / 0.5 for direction in loss.directions.detach()]
        expected += (math.log(sum(map(math.exp, scores))) - scores[label]) / 4
    assert loss(rows, Pairs.by_label(labels)).item() == pytest.approx(expected, rel=1e-5)


def test_what_is_said_of_kappa_is_undefined_where_it_says_nothing() -> None:
    experiment, right = ExplicitConcentration(), torch.tensor([True, True, False])
    correlations = {"fog": -1.0, "snow": -0.9}
    said = experiment._of_kappa(correlations, torch.tensor([3.0, 2.0, 1.0]), right)
    assert said["correlation with severity"] == pytest.approx((-1 - 0.9) / 2)
    assert said["kinds at most −0.8"] == 2
    assert said["AUROC of wrong"] == 1
    assert set(experiment._of_kappa({}, None, right).values()) == {None}
    constant = experiment._of_kappa({"fog": None}, torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert set(constant.values()) == {None, 0}


def test_a_file_has_the_name_and_settings_and_the_command_sets_others_above_them(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: posterior-recovery\ndimension: 10\nlosses: [elk]\nseed: 1\n")
    experiment = load_experiment(str(file), ["--seed=3"])
    assert experiment == PosteriorRecovery(dimension=10, losses=("elk",), seed=3)
    for text, message in (
        ("name: nothing", "no experiment 'nothing'.*YAML"),
        ("dimension: 10", "mine.yaml.*name of an"),
        ("name: posterior-recovery\ndepth: 3", "no setting depth"),
        ("posterior-recovery", "got 'posterior-recovery'"),
        ("[1", "mine.yaml.*valid YAML"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_experiment(str(file))


def test_axes_say_what_they_are() -> None:
    curves = {"style": [(1.0, 2.0), (2.0, 3.0)]}
    pictures = {_picture(Plot(x, y, curves)) for x, y in (("batches", "R²"), ("severity", "R²"), ("batches", "κ"))}
    assert len(pictures) == 3


@pytest.mark.long
def test_outputs_are_unit_vectors_or_as_the_encoder_gives_them() -> None:
    short = SHORT["aninfonce-latents"] | {"losses": ("aninfonce",)}
    rows = [AnInfoNCELatents(**short, normalise=normalise).run(lambda *_: None).rows[0] for normalise in (True, False)]
    assert rows[0]["Λ of style"] != rows[1]["Λ of style"]
    identity = torch.nn.Identity()
    for normalise, lengths in ((True, [1.0, 1.0]), (False, [5.0, 10.0])):
        outputs = AnInfoNCELatents(normalise=normalise)._outputs(identity, torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
        assert outputs.norm(dim=1).tolist() == pytest.approx(lengths)


@pytest.mark.long
def test_kappa_is_told_by_kind_and_of_ood_sets_for_each_training_that_has_one() -> None:
    short = SHORT["explicit-concentration"] | {"bases": ("simclr",), "epochs": 1}
    outcome = ExplicitConcentration(**short, accelerator="cpu").run(lambda *_: None)
    by_kind, of_ood = outcome.tables[BY_KIND], outcome.tables[BY_OOD_SET]
    assert [row["kind"] for row in by_kind] == list(published_kinds(1))
    for row in outcome.rows:
        if row["κ"] == "none":
            continue
        correlations: list[Any] = [of_kind[f"{row['base']}, {row['κ']}"] for of_kind in by_kind]
        assert row["correlation with severity"] == pytest.approx(sum(correlations) / len(correlations))
        assert row["kinds at most −0.8"] == sum(correlation <= -0.8 for correlation in correlations)
    ((_, plot),) = outcome.plots.items()
    for of_kind in by_kind:
        severities, means = map(torch.tensor, zip(*plot.curves[str(of_kind["kind"])], strict=True))
        assert of_kind["simclr, square"] == rank_correlation(severities, means)
    assert [(row["regulariser"], row["OOD set"]) for row in of_ood] == [("square", "digits_patches")]
    for row in of_ood:
        assert all(0 <= row[by] <= 1 for by in ("features", "κ", "both"))  # pyright: ignore [reportOperatorIssue]


def test_ood_images_are_told_by_features_by_kappa_and_by_both_in_units_of_the_known() -> None:
    def prediction(features: list[list[float]], kappa: list[float]) -> Prediction:
        directions = torch.tensor([[1.0, 0.0]]).expand(len(kappa), -1)
        return Prediction(
            torch.tensor(features), Embeddings(directions, torch.tensor(kappa), *torch.zeros(2, len(kappa)))
        )

    known = prediction(
        [[0.0, 0.0], [0.0, 4.0], [4.0, 0.0], [4.0, 4.0], [2.0, 2.0], [9.0, 9.0]], [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]
    )
    items = prediction([[0.0, 0.0], [2.0, 2.0]], [3.0, 80.0])
    scores = outlyingness(items, known)
    for number, (x, kappa) in enumerate(zip(items.features, items.embeddings.kappa, strict=True)):
        by_features, by_both = [], []
        for y, other in zip(known.features, known.embeddings.kappa, strict=True):
            square = float((x - y).square().sum()) / known.features.var().item()
            by_features.append(square**0.5)
            by_both.append((square + float(kappa - other) ** 2 / known.embeddings.kappa.var().item()) ** 0.5)
        assert float(scores["features"][number]) == pytest.approx(sorted(by_features)[4], rel=1e-5)
        assert float(scores["both"][number]) == pytest.approx(sorted(by_both)[4], rel=1e-5)
    assert scores["κ"].tolist() == [-3.0, -80.0]
    constant = outlyingness(prediction(items.features.tolist(), [7.3] * 2), prediction([[0.0, 1.0]] * 300, [7.3] * 300))
    torch.testing.assert_close(constant["both"], constant["features"])


@pytest.mark.long
def test_clusters_are_compared_with_classes_in_three_ways() -> None:
    short: dict[str, Any] = SHORT["varcon-accuracy"] | {"losses": ("varcon",), "few": (), "n_corrupted": 2}
    (row,) = VarConAccuracy(**short, accelerator="cpu").run(lambda *_: None).rows
    assert row["NMI"] != row["ARI"] != row["purity"]
    for column in ("NMI", "ARI", "purity"):
        assert 0 < row[column] <= 1  # pyright: ignore [reportOperatorIssue]


def test_a_given_epsilon_is_not_learned() -> None:
    experiment = VarConAccuracy(accelerator="cpu", epsilon=0.02)
    loss = experiment._method("varcon", 10)[1]
    assert (float(loss.epsilon), loss.raw.requires_grad) == (pytest.approx(0.02), False)  # pyright: ignore
    learned = VarConAccuracy(accelerator="cpu")._method("varcon", 10)[1]
    assert learned.raw.requires_grad  # pyright: ignore [reportAttributeAccessIssue]


def test_a_map_has_a_point_for_each_item_and_keeps_groups_together() -> None:
    experiment = VarConAccuracy(accelerator="cpu", limit=60)
    _, test = experiment.parts()
    means = torch.nn.functional.normalize(torch.eye(16)[test.labels] + 0.01 * torch.arange(60)[:, None] / 60)
    clouds = {name: torch.tensor(points) for name, points in experiment._map(means, test).curves.items()}
    assert sorted(clouds) == sorted({test.classes[label] for label in test.labels.tolist()})
    assert sum(map(len, clouds.values())) == 60
    points, names = torch.cat(list(clouds.values())), [name for name, cloud in clouds.items() for _ in cloud]
    nearest = torch.cdist(points, points).fill_diagonal_(torch.inf).argmin(1)
    right = sum(names[number] == names[other] for number, other in enumerate(nearest.tolist()))
    assert right > 50


@pytest.mark.long
def test_a_network_of_another_name_takes_the_same_images() -> None:
    short: dict[str, Any] = SHORT["varcon-accuracy"] | {"losses": ("varcon",), "few": (), "n_corrupted": 2, "epochs": 1}
    (row,) = VarConAccuracy(**short, network="cifar_resnet18", accelerator="cpu").run(lambda *_: None).rows
    assert 0 <= row["linear probe"] <= 1  # pyright: ignore [reportOperatorIssue]


def test_a_decoder_renders_images_of_the_classes_that_it_learned() -> None:
    generator = torch.Generator().manual_seed(0)
    dark, light = torch.rand(2, 200, 12, generator=generator)
    images = torch.cat([0.2 * dark, 1 - 0.2 * light])
    decoder = trained_decoder(images, 2, 40, generator)
    rendered = decoder(uniform_on_sphere(500, 2, generator))
    assert rendered.shape == (500, 12)
    assert 0 <= rendered.min() <= rendered.max() <= 1
    near = torch.cdist(rendered, torch.tensor([[0.1], [0.9]]).expand(2, 12)).min(1).values / 12**0.5
    assert near.median() < 0.15  # most latents are either dark or light
    shares = (rendered.mean(1) > 0.5).double().mean()
    assert 0.2 < shares < 0.8
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


@pytest.mark.long
def test_latents_are_observed_as_images_and_neighbours_find_real_ones() -> None:
    short = {"n_batches": 60, "batch_size": 64, "width": 32, "n_test": 200, "vae_epochs": 10, "graded": True}
    experiment = AnInfoNCELatents(images="digits", dimension=4, accelerator="cpu", **short)  # pyright: ignore
    torch.testing.assert_close(experiment.concentrations, torch.linspace(5, 25, 4)[None])
    outcome = experiment.run(lambda *_: None)
    assert all(0.3 < row["k-NN"] <= 1 for row in outcome.rows)  # pyright: ignore [reportOperatorIssue]
    assert list(outcome.plots["Λ of aninfonce over batches"].curves) == ["1", "2", "3", "4"]
    assert "Λ of infonce over batches" not in outcome.plots


def test_anchors_drift_to_opposite_poles_and_can_then_be_told_apart() -> None:
    even, drifted = (AnInfoNCELatents(dimension=4, drift=drift, accelerator="cpu", n_test=500) for drift in (0.0, 20.0))
    train, test = (drifted._anchors(2000, torch.Generator().manual_seed(0), test=test) for test in (False, True))
    for anchors, sign in ((train, 1), (test, -1)):
        torch.testing.assert_close(anchors.norm(dim=1), torch.ones(2000))
        resultant = VonMisesFisher(torch.eye(4)[0], torch.tensor(20.0)).mean[0]
        torch.testing.assert_close(anchors.mean(0), sign * resultant * torch.eye(4)[0], atol=0.03, rtol=0)
    assert drifted._told_apart() > 0.99
    assert 0.4 < even._told_apart() < 0.6
    assert next(drifted.batches(torch.Generator().manual_seed(0)))[:256, 0].mean() > 0.8


def test_about_half_of_the_images_are_augmented_and_the_others_are_as_they_were() -> None:
    experiment = AugmentationReadout(accelerator="cpu", limit=40)
    train, _ = experiment.parts()
    network = build("convnet8", dimension=4)
    training = Training(loss=losses.build(margin=0.7), epochs=1, pretrained=True)
    encoder = Deterministic().train(network, train, training).encoder
    plain, _ = experiment._clean(encoder, train)
    features, changed = experiment._augmented(encoder, train, "brightness")
    differs = ((features["features"] - plain["features"]).abs().amax(1) > 1e-5).long()
    assert torch.equal(differs, changed)
    assert 10 < int(changed.sum()) < 30
    normed = torch.nn.functional.normalize(plain["projection"])
    torch.testing.assert_close(normed, encoder.embed(train.batch(range(40))).mean.cpu(), rtol=1e-4, atol=1e-5)


def test_images_of_ones_own_are_read_from_a_folder_a_class(tmp_path: Path) -> None:
    for name, shade in (("cats", 40), ("dogs", 200)):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("RGB", (48, 40 + number), (shade, number, 0)).save(tmp_path / name / f"{number}.png")
    experiment = load_experiment("explicit-concentration", ["--data=folder", f"--root={tmp_path}", "--n_corrupted=2"])
    assert isinstance(experiment, ExplicitConcentration)
    train, test = experiment.parts()
    assert train.labels.tolist() != sorted(train.labels.tolist())  # the first images are of several classes
    assert (train.classes, train.shape, len(test)) == (("cats", "dogs"), (3, 32, 32), 4)
    network = build(NETWORKS["folder"], dimension=4)
    _, (clean, *_) = next(experiment.corruptions(test))
    assert network(clean).shape == (2, 4)
    with pytest.raises(ValueError, match="folder needs.*root"):
        ExplicitConcentration(data="folder").parts()


def test_curves_may_have_names_that_the_font_lacks() -> None:
    assert _picture(Plot("x", "y", {"鹤": [(0.0, 1.0), (1.0, 2.0)]})).startswith(b"\x89PNG")
