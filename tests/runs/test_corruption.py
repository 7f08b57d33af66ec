"""Corrupted images and texts, and their κ and answers."""

from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import lam
from lam import datasets
from lam.encoders.deterministic import DeterministicEncoder
from lam.inputs.corruption import KINDS, PUBLISHED_KINDS, corrupt, published_kinds
from lam.runs.config_files import load_config
from lam.runs.corruption import (
    TEXT_KINDS,
    CorruptionCurve,
    TextKind,
    corrupted_text,
    corruption_metrics,
    corruptions_of,
    measure_corruption,
)
from lam.runs.run import run
from tests.helpers import unchecked
from tests.methods import small_data as small


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_kinds_are_the_four_unless_others_are_asked_for():
    images, texts = datasets.load("digits").test, datasets.load("docstrings").test
    assert corruptions_of(images) == KINDS == ("noise", "blur", "contrast", "crop")
    assert corruptions_of(texts) == corruptions_of(texts, "all") == TEXT_KINDS
    assert corruptions_of(images, "all") == (*KINDS, *published_kinds(1))
    colours = datasets.TensorImages(torch.rand(2, 3, 8, 8), torch.arange(2))
    assert corruptions_of(colours, "all") == (*KINDS, *PUBLISHED_KINDS)
    assert corruptions_of(images, "snow") == ("snow",)
    for kinds, message in (
        (["rain"], r"images of shape \(1, 8, 8\).*noise, blur, contrast, crop, gauss"),
        (["fog", "saturate"], "jpeg, each once, got fog, saturate"),
        (["fog", "fog"], "each once, got fog, fog"),
        ([], "each once, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            corruptions_of(images, kinds)
    with pytest.raises(ValueError, match="of texts.*words, typing.*fog"):
        corruptions_of(texts, ["fog"])


@pytest.mark.long
def test_a_run_measures_the_kinds_that_it_is_asked_for(tmp_path):
    settings = ["--training.epochs=1", "--evaluation.corrupted=6", "--evaluation.n_samples=4", "--accelerator=cpu"]
    folder = [f"--output={tmp_path / 'run'}"]
    said = "evaluation.corruptions of images.*words"
    with pytest.raises(ValueError, match=said):
        run(load_config("digits laplace_posthoc", [*settings, *folder, "--evaluation.corruptions=[words]"]))
    assert not (tmp_path / "run").exists()
    every = load_config("digits laplace_posthoc", [*settings, *folder, "--evaluation.corruptions=all"])
    result = run(every, progress=False)
    kinds = {key.split("_")[1] for key in result.metrics if key.startswith("corruption_") and key.endswith("_trend")}
    assert kinds == {*KINDS, *published_kinds(1)}
    page = result.report.read_text()
    assert all(f'<th scope="row">{kind}</th>' in page for kind in kinds)
    assert (tmp_path / "run" / "plots" / "corruption.png").is_file()


def test_the_trend_is_the_mean_rank_correlation_of_images():
    kappa = torch.rand(4, 30, generator=generator()).mul(6).round()  # with ties
    curve = CorruptionCurve(kappa, torch.ones(4, 30, dtype=torch.bool))
    each = [spearmanr(range(4), row).statistic for row in kappa.T.numpy() if len(set(row)) > 1]
    assert curve.trend == pytest.approx(np.mean(each))
    falling = CorruptionCurve(torch.tensor([[4.0], [3.0], [2.0], [1.0]]), torch.ones(4, 1, dtype=torch.bool))
    assert falling.trend == pytest.approx(-1)
    level = CorruptionCurve(torch.ones(4, 3), torch.ones(4, 3, dtype=torch.bool))
    assert level.trend != level.trend


def test_the_trend_of_many_images_compares_none_with_another():
    falling = torch.arange(6.0).flip(0)[:, None].expand(6, 200_000).contiguous()  # 300 GB, as pairs of images
    assert CorruptionCurve(falling, falling > 0).trend == pytest.approx(-1)


def test_other_scores_have_trends_of_their_own_and_crops_a_share():
    kappa = torch.rand(6, 20, generator=generator())
    parts = {"kappa_aleatoric": kappa.flip(0), "p_known": torch.arange(6)[:, None].expand(6, 20).float()}
    curve = CorruptionCurve(kappa, torch.ones(6, 20, dtype=torch.bool), parts)
    assert curve.trends["kappa_aleatoric"] == pytest.approx(-curve.trend)
    assert curve.trends["p_known"] == pytest.approx(1)
    metrics = corruption_metrics({"crop": curve, "blur": curve})
    assert metrics["corruption_blur_trend_kappa_aleatoric"] == pytest.approx(-curve.trend)
    assert metrics["crop_less_sure"] == pytest.approx(float((kappa[5] < kappa[0]).double().mean()))
    assert "crop_less_sure" not in corruption_metrics({"blur": curve})


def test_corrupted_queries_search_the_clean_gallery_without_themselves():
    images = small.images(60, noise=0.05)
    images = type(images)((images.images.clamp(0, 1) * 255).byte(), images.labels)
    encoder = lam.fit(small.network(), small.batches(images), margin=0.7, progress=False)
    evaluation = lam.evaluate(encoder, small.batches(images))
    curves = measure_corruption(encoder, images, evaluation, size=25, seed=3)
    assert tuple(curves) == KINDS
    assert all(curve.kappa.shape == curve.correct.shape == (6, 25) for curve in curves.values())
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:25]
    for curve in curves.values():
        assert torch.equal(curve.correct[0], evaluation.correct[rows])
        torch.testing.assert_close(curve.kappa[0], evaluation.embeddings.kappa[rows], rtol=1e-3, atol=0)
    worse = corrupt(images.images[rows], "contrast", 5, generator=generator())
    mean = encoder.embed(worse).mean
    cosines = mean @ evaluation.gallery.mean.T
    cosines[torch.arange(25), rows] = -2
    expected = images.labels[cosines.argmax(1)] == images.labels[rows]
    assert torch.equal(curves["contrast"].correct[5], expected)
    torch.testing.assert_close(curves["contrast"].scores["cosine"][5], cosines.amax(1))
    again = measure_corruption(encoder, images, evaluation, size=25, seed=3)
    assert all(torch.equal(again[kind].kappa, curve.kappa) for kind, curve in curves.items())
    (foggy,) = measure_corruption(encoder, images, evaluation, size=25, seed=3, kinds=["fog"]).items()
    assert foggy[0] == "fog"
    assert torch.equal(foggy[1].kappa[0], curves["blur"].kappa[0])
    none = replace(evaluation, answerable=torch.zeros(60, dtype=torch.bool))
    assert measure_corruption(encoder, images, none, size=25) == {}


def test_metrics_name_every_kind_and_severity():
    images = small.images(40)
    images = type(images)((images.images.clamp(0, 1) * 255).byte(), images.labels)
    encoder = DeterministicEncoder(small.network(), "head")
    curves = measure_corruption(encoder, images, lam.evaluate(encoder, small.batches(images)), size=10)
    metrics = corruption_metrics(curves)
    assert metrics["corruption_noise_2_recall@1"] == float(curves["noise"].recall[2])
    assert metrics["corruption_clean_kappa"] == float(np.median(curves["blur"].kappa[0]))
    assert metrics["corruption_blur_trend"] is None  # κ is one bound
    assert metrics["crop_less_sure"] == 0.5
    without = corruption_metrics(curves, has_kappa=False)
    assert {name for name in metrics if name.endswith(("recall@1", "trend_cosine"))} == without.keys()
    assert len(without) == 1 + 4 * 5 + 4
    assert torch.tensor(list(without.values())).abs().le(1).all()


class TestTexts:
    text = "How do I move money between two accounts of mine?"

    @pytest.mark.parametrize("kind", TEXT_KINDS)
    def test_severity_rises_and_the_seed_decides(self, kind: TextKind) -> None:
        def worse(severity: int, seed: int = 0) -> str:
            generator = torch.Generator().manual_seed(seed)
            return corrupted_text(20 * self.text, kind, severity, generator=generator)

        assert worse(0) == 20 * self.text
        alike = [SequenceMatcher(None, 20 * self.text, worse(severity), autojunk=False).ratio() for severity in (1, 5)]
        assert 1 > alike[0] > alike[1] > 0.1
        assert worse(3) == worse(3) != worse(3, seed=1)

    @pytest.mark.parametrize("kind", TEXT_KINDS)
    def test_something_stays(self, kind: TextKind) -> None:
        for seed in range(50):
            assert corrupted_text("a", kind, 5, generator=torch.Generator().manual_seed(seed)).strip()

    def test_refused(self) -> None:
        with pytest.raises(ValueError, match="kind.*words, typing.*'noise'"):
            unchecked(corrupted_text)("a", "noise", 1, generator=torch.Generator())
        with pytest.raises(ValueError, match="severity.*0 to 5.*6"):
            corrupted_text("a", "words", 6, generator=torch.Generator())
