"""Classes that a run holds out, and the promises of `lam calibrate` about them."""

import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from PIL import Image

import lam
from lam.cli import main
from lam.datasets import Dataset
from lam.datasets.base import Preview
from lam.gallery.enrolment import item_of_embedding
from lam.retrieval.decisions.calibration import Targets
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.index.checks import unit_vectors
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.data import load_data
from lam.runs.finished import Run
from lam.utils.files import read_json
from tests.conftest import TINY, unrendered_pictures
from tests.runs.conftest import Lam

RATES = ("--quiet", "--target-ood=0.2", "--target-miss=0.2")


@pytest.fixture(scope="module")
def run_with_strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits that holds out three of the eight classes."""
    folder = tmp_path_factory.mktemp("strangers") / "run"
    with unrendered_pictures():
        assert main(["run", "digits", "norm", "--quiet", *TINY, "--data.strangers=0.375", f"--output={folder}"]) == 0
    return folder


@pytest.mark.long
def test_a_run_neither_trains_on_them_nor_stores_them(run_with_strangers: Path) -> None:
    run = Run(run_with_strangers)
    splits = load_data(run.config.data)[0]
    strange = {splits.strangers.classes[label] for label in splits.strangers.labels.tolist()}
    assert len(strange) == 3
    assert strange.isdisjoint(item.label for item in run.gallery.items)
    assert run.config.data.strangers == 0.375
    recorded = read_json(run_with_strangers / "data.json")["parts"]
    assert recorded["strangers"]["items"] == len(splits.strangers) == 60
    assert list(recorded)[:4] == ["train", "validation", "test", "strangers"]


def test_what_scores_know_of_classes_never_trained_on_is_measured(run_with_strangers: Path) -> None:
    run, metrics = Run(run_with_strangers), read_json(run_with_strangers / "metrics.json")
    strangers = load_data(run.config.data)[0].strangers
    assert strangers is not None
    own = lam.evaluate(run.encoder, torch.utils.data.DataLoader(strangers, 100)).metrics
    assert metrics["unseen_recall@1"] == own["recall@1"]
    for key in ("r_auroc", "r_auroc_cosine", "ausc"):
        assert metrics[f"{key}@unseen"] == pytest.approx(own[key], rel=1e-5)
    assert "classes never trained on" in (run_with_strangers / "report.html").read_text(encoding="utf-8").lower()


@pytest.mark.long
def test_false_accepts_are_promised_of_classes_never_trained_on(run_with_strangers: Path, lam: Lam) -> None:
    printed = lam("calibrate", run_with_strangers, "--target-far=0.25", "--accept=cosine", *RATES).out
    run = Run(run_with_strangers)
    calibration, strangers = run.calibration, load_data(run.config.data)[0].strangers
    promise = "for a random item of an unseen class, like the 3 held-out classes"
    assert calibration.facts["false_accepts"] == promise
    assert promise in printed
    embeddings = run.encoder.embed(torch.utils.data.DataLoader(strangers, 100))
    scores = run.gallery.search(embeddings, 1).scores[:, 0]
    known = ConformalScores.of(scores, strangers.labels)
    assert calibration.false_accepts.n_units == 3
    assert calibration.accept_above == pytest.approx(known.threshold(0.25), abs=1e-6)
    rate = calibration.false_accepts.rate(calibration.accept_above)
    low, high = calibration.false_accepts.interval(calibration.accept_above)
    assert rate == pytest.approx(0.25)  # the least that three classes can promise
    assert low == 0 < high
    assert "false accepts 0.25, 95 % interval" in printed


@pytest.mark.parametrize("gallery", ["index", "held-out"])
def test_a_bound_counts_held_out_classes_and_not_their_items(
    gallery: str, run_with_strangers: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(run_with_strangers, tmp_path / "run")
    options = CalibrationOptions({"far": 0.25, "ood": 0.2, "conformal_miss": 0.2}, gallery=gallery)
    for acceptance in calibrate_run(run, options, progress=False).acceptances:
        classes = acceptance.false_accepts.classes
        assert classes is not None
        assert len(classes.unique()) == 3


@pytest.mark.long
def test_of_too_few_classes_it_says_the_least_that_they_promise(run_with_strangers: Path, lam: Lam) -> None:
    printed = lam("calibrate", run_with_strangers, "--target-far=0.1", *RATES).out
    calibration = Run(run_with_strangers).calibration
    assert calibration.false_accepts.classes is None
    assert calibration.facts["false_accepts"] == (
        "for known classes; no bound for unseen classes: 3 held-out classes can bound a rate of 0.25 or more "
        "(--target-far 0.25)"
    )
    assert calibration.facts["false_accepts"] in printed
    shown = re.search(
        r"of the 3 held-out classes that is accepted: ([\d.]+), 95 % interval ([\d.]+) to ([\d.]+)", printed
    )
    share, low, high = map(float, shown.groups())
    assert low <= share <= high
    assert calibration.facts["strangers_accepted"] == pytest.approx([share, low, high], rel=1e-3)


@pytest.mark.long
def test_items_of_their_classes_that_were_added_count_as_matches(run_with_strangers: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(run_with_strangers, tmp_path / "run"))
    strangers = load_data(run.config.data)[0].strangers
    embeddings = run.encoder.embed(torch.utils.data.DataLoader(strangers, 100))
    names = [strangers.classes[label] for label in strangers.labels.tolist()]
    rows = zip(unit_vectors(embeddings, 3).numpy(), embeddings.kappa.tolist(), names, strict=True)
    with closing(run.open_gallery()) as gallery:
        gallery.write([item_of_embedding(f"more{i}", *row, Preview("")) for i, row in enumerate(rows)])
    assert len(run.gallery) == 60 + len(strangers)
    targets = Targets(far=0.25, ood=0.2, conformal_miss=0.2)
    scores = calibrate_run(run.folder, CalibrationOptions(targets=targets), progress=False).false_accepts.scores
    assert float(scores.max()) < 1 - 1e-6  # no stranger finds itself


@pytest.mark.long
def test_p_known_is_learned_from_them_or_from_unlabelled_queries(
    run_with_strangers: Path, tmp_path: Path, lam: Lam
) -> None:
    command = ("calibrate", str(run_with_strangers), "--target-far=0.25", *RATES)
    printed = lam(*command, "--share-of-strangers=0.3").out
    usual = "from how unusual a query is"
    learned_from = (
        "from queries without their matches, and from 60 strangers; 0.3 of all queries are expected to have no"
    )
    assert f"{usual}, {learned_from} match\n" in printed
    run = Run(run_with_strangers)
    splits, ood = load_data(run.config.data)
    learned = [one.match_probability.contrast for one in run.calibration.acceptances]
    assert [contrast.share for contrast in learned] == [0.3] * len(learned)
    full, of_vectors = (set(contrast.regression.evidence) for contrast in (learned[0], learned[-1]))
    assert full > of_vectors  # a vector has no features

    known, foreign = splits.validation.subset(torch.arange(40)), ood["digits_patches"].subset(torch.arange(40))
    mixed = tmp_path / "mixed"
    _write_images(mixed / "known", known)
    _write_images(mixed / "foreign", foreign)
    printed = lam(*command, f"--unlabelled={mixed}").out
    share, low, high = Run(run_with_strangers).calibration.facts["share_of_strangers"]
    assert low < 0.5 < high
    numbers = f"a share {share:.2g} of them strangers (95 % interval {low:.2g} to {high:.2g})"
    assert f"{usual}, and from 80 queries in {mixed}, {numbers}\n" in printed

    for images, may in ((known, "so they may all be known"), (foreign, "so they may all be strangers")):
        folder = tmp_path / may
        _write_images(folder / "images", images)
        printed = lam(*command, f"--unlabelled={folder}").out
        assert f"{usual}, not from 40 queries in {folder}: their share of strangers is " in printed
        assert f"{may}, from queries without their matches, and from 60 strangers; half of all" in printed


@pytest.mark.long
def test_without_strangers_its_own_queries_stand_for_them(run_copy: Path, lam: Lam) -> None:
    rates = ("--target-far=0.1", "--target-ood=0.1", "--target-miss=0.2", "--quiet")
    learned = "from queries without their matches, and from the same with their classes as new;"
    for share, words in (("half", ()), ("0.1", ("--share-of-strangers=0.1",))):
        printed = lam("calibrate", run_copy, *rates, *words).out
        assert f"{learned} {share} of all queries are expected to have no match\n" in printed
    said = lam("calibrate", "no-run", "--share-of-strangers=1", code=1).err
    assert "(0, 1), got 1.0" in said


def _write_images(folder: Path, items: Dataset) -> None:
    folder.mkdir(parents=True)
    for row in range(len(items)):
        Image.fromarray((items[row][0][0] * 255).round().to(torch.uint8).numpy()).save(folder / f"{row}.png")
