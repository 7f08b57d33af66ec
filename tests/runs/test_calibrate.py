"""`lam calibrate`: from the folder of a run to a calibration, and its promises on the embedded digits."""

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from scipy.stats import betabinom
from torch import Tensor

from lam import datasets
from lam.cli import main
from lam.encoders.base import Encoder
from lam.gallery.embed import embed_items
from lam.retrieval import N_HITS, SCORES, Calibration, Targets
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.flags import COMBINED, FLAGS
from lam.retrieval.metrics.open_set import Searches, search_open_set
from lam.retrieval.metrics.scores import scores_of
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.calibration_report import statistic_name
from lam.runs.config_files import load_config
from lam.runs.data import load_data, loader_of
from lam.runs.finished import Run
from lam.runs.index import index_images
from lam.runs.run import run
from lam.utils.files import seal
from lam.utils.notes import Note
from lam.vmf.embeddings import Embeddings
from tests.conftest import FinishedRun
from tests.helpers import written_hits
from tests.runs.conftest import Lam

pytestmark = pytest.mark.usefixtures("unrendered")

PARTS = {"kappa_epistemic", "kappa_aleatoric", "p_known"}  # which the run's encoder has not learned
TARGETS = ("--target-far=0.05", "--target-ood=0.05", "--target-miss=0.1")
FRESH = ("--target-far=0.1", "--target-ood=0.1", "--gallery=held-out", "--reference=0")


Calibrated = Callable[..., tuple[Calibration, str]]


@pytest.fixture
def calibrated(run_copy: Path, lam: Lam) -> Calibrated:
    """Run `lam calibrate` with options, and return the new calibration and the output."""

    def done(*options: str) -> tuple[Calibration, str]:
        printed = lam("calibrate", run_copy, "--quiet", *options).out
        return Run(run_copy).calibration, printed

    return done


@pytest.fixture(scope="module")
def digits(finished_run: FinishedRun) -> tuple[Embeddings, Searches]:
    """Test digits, which the run has not seen, and their searches of the validation split."""
    splits = datasets.load("digits")
    encoder = Run(finished_run.folder).encoder
    embeddings, gallery = (
        encoder.embed(part.images)
        for part in (splits.test, splits.validation)  # type: ignore[attr-defined]
    )
    labels, others = splits.test.labels, splits.validation.labels
    found = search_open_set(embeddings.mean, gallery.mean, lambda rows: labels[rows][:, None] == others)
    return embeddings, found


def _rates(scores: Tensor, target: float, *, known: int, times: int) -> tuple[Tensor, list[bool]]:
    """Over random splits of the scores: the rate on the rest, and whether the interval contains it."""
    generator = torch.Generator().manual_seed(0)
    rates, held = [], []
    for _ in range(times):
        order = torch.randperm(len(scores), generator=generator)
        tail = ConformalScores.of(scores[order[:known]])
        threshold = tail.threshold(target)
        low, high = tail.interval(threshold)
        rates.append(float((scores[order[known:]] > threshold).double().mean()))
        held.append(low <= rates[-1] <= high)
    return torch.tensor(rates, dtype=torch.float64), held


@pytest.mark.parametrize("target", [0.05, 0.1])
def test_false_flags_of_digits_keep_the_target_and_follow_the_law(
    digits: tuple[Embeddings, Searches], target: float
) -> None:
    scores = -digits[0].kappa
    rates, _ = _rates(scores, target, known=99, times=200)
    new = len(scores) - 99
    law = betabinom(new, *ConformalScores(torch.arange(99.0).double()).law(target))
    assert float(rates.mean()) <= target + 2 * float(rates.std()) / math.sqrt(200)
    assert float(rates.std()) * new == pytest.approx(law.std(), rel=0.2)


def test_false_accepts_of_digits_are_in_their_interval(digits: tuple[Embeddings, Searches]) -> None:
    scores = digits[1].non_mated
    rates, held = _rates(scores, 0.1, known=99, times=200)
    assert float(rates.mean()) <= 0.1 + 2 * float(rates.std()) / math.sqrt(200)
    tail = ConformalScores(torch.arange(99.0).double())
    law, (low, high) = betabinom(len(scores) - 99, *tail.law(0.1)), tail.interval(tail.threshold(0.1))
    rest = len(scores) - 99
    expected = law.cdf(math.floor(high * rest)) - law.cdf(math.ceil(low * rest) - 1)
    assert sum(held) / 200 > expected - 3 * math.sqrt(expected * (1 - expected) / 200)


@pytest.mark.long
def test_the_command_keeps_a_calibration_that_decides(run_copy: Path, calibrated: Calibrated) -> None:
    made, printed = calibrated(*TARGETS)
    assert re.search(r"match: (P\(known\) · P\(right \| known\)|the cosine|−\w+) above", printed)
    assert "hits: if the gallery holds a match, " in printed
    assert not {"answers:", "new classes:"} & set(printed.split())
    assert "first hits are right" in printed or re.search(r"from \d+ scores: \w+ \d+%, ", printed)
    assert re.search(r"compared with \d+ training items, \S+ MiB", printed)
    assert made.facts["false_accepts"] == "for known classes; no bound for unseen classes"
    assert f"\n       {made.facts['false_accepts']}\n" in printed
    assert made.key == Run(run_copy).fingerprint
    assert (made.gallery_size, made.facts["data"], made.facts["queries"]) == (60, "validation split", 60)
    assert made.targets == Targets(far=0.05, ood=0.05, conformal_miss=0.1)
    assert (run_copy / "plots" / "probability.png").is_file()
    encoder, index = Run(run_copy).encoder, Run(run_copy).gallery
    queries = encoder.embed(datasets.load("digits").test.images[:20])  # type: ignore[attr-defined]
    decisions = made.decide(index.search(queries, N_HITS), queries, gallery_size=len(index))
    assert set(decisions.decision) <= {"match", "unknown", "abstain"}
    assert not decisions.stale
    verified = made.verify(queries[:10], queries[:10])
    assert set(verified.decision) <= {"match", "abstain"}
    assert ((verified.probability > 0) & (verified.probability < 1)).all()
    assert made.detector.calibrated.keys() == {*SCORES, COMBINED} - PARTS
    assert {len(known) for known in made.detector.calibrated.values()} == {60}  # no half is lost


@pytest.mark.long
def test_a_search_of_a_calibrated_run_says_its_decision(run_copy: Path, digit_folder: Path, lam: Lam) -> None:
    image = str(next(iter(sorted(digit_folder.glob("*/*.png")))))
    assert "decision" not in lam("search", run_copy, image, "-k1").out
    lam("calibrate", run_copy, "--quiet", "--flag=combined", *TARGETS)
    printed = lam("search", run_copy, image, "-k1").out
    number = r"-?\d\S*"
    factors = (
        rf"  if the gallery holds it, the first hit is right: {number}\n"
        rf"  the gallery holds it at all: {number} \(where half of all queries have no match\)\n"
        rf"  together {number}(; .* decides: {number})?; answered above {number}; .* without a match looks? as good\n"
    )
    flagged = r"  flagged by combined: a share \S+ of known queries is as unusual\n"
    assert re.search(rf"^decision: ((match|unknown)\n{factors}|abstain\n{flagged})", printed, re.MULTILINE)
    assert len(printed.splitlines()) == (5 if "decision: abstain" in printed else 7)
    lam("index", run_copy, digit_folder, "--quiet")
    assert re.search(r"^decision: \w+, calibration: stale$", lam("search", run_copy, image).out, re.MULTILINE)


@pytest.mark.long
def test_few_of_the_answers_are_wrong_where_that_is_asked_for_and_until_it_is_not(calibrated: Calibrated) -> None:
    before, printed = calibrated("--target-far=0.3", "--target-ood=0.1")
    assert "answers:" not in printed
    for options, wrong in ((["--target-wrong=0.9"], 0.9), ([], 0.9), (["--target-wrong=0"], None)):
        made, printed = calibrated(*options)
        assert made.targets.wrong == wrong
        assert made.accept_above >= before.accept_above
        stream = "for queries like the calibration queries, none of them without a match in the gallery"
        assert made.facts["answers_wrong"] == (stream if wrong else None)
        said = f"answers: at most 0.9 of the answers are wrong, with confidence 0.95\n       {stream}; "
        assert (said in printed) == (wrong is not None)


@pytest.mark.long
def test_a_gallery_with_classes_of_one_item_tells_new_ones(
    run_copy: Path, digit_folder: Path, tmp_path: Path, lam: Lam
) -> None:
    files = sorted(digit_folder.glob("*/*.png"))
    lines = [f"{file},{file.parent.name}" for file in files]
    lines[-3:] = [f"{file},{name}" for file, name in zip(files[-3:], "xyz", strict=True)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]), encoding="utf-8")
    lam("index", run_copy, f"--csv={tmp_path / 'list.csv'}", "--quiet")
    targets = ["--target-far=0.3", "--target-ood=0.3", "--target-miss=0.3"]
    told = f"new classes: 3 classes have one item; at most {4 / (len(files) + 1):.3g} of new items are of a new class"
    assert told in lam("calibrate", run_copy, "--quiet", *targets).out
    made, gallery = Run(run_copy).calibration, Run(run_copy).gallery
    assert made.unseen is not None
    assert int(made.unseen.is_single.sum()) == 3
    cosines = gallery.embeddings.mean.double() @ gallery.embeddings.mean.double().T
    nearest = cosines.fill_diagonal_(-torch.inf).amax(1).sort().values
    torch.testing.assert_close(made.unseen.left_out.sort().values, nearest, rtol=0, atol=1e-6)
    assert "p-value of a new class" in lam("search", run_copy, files[0], "-k1").out
    written, lines = written_hits(run_copy, str(files[0]), "-k1")
    (entry,) = written["images"]
    assert 0 < entry["p_new"] <= 1
    assert 0 < entry["p_in_gallery"] <= 1
    assert [float(line["p_new"]) for line in lines] == [entry["p_new"]]
    lam("calibrate", run_copy, "--quiet", *targets, "--gallery=held-out")
    assert Run(run_copy).calibration.unseen is None


@pytest.mark.long
@pytest.mark.parametrize("flag", ["mahalanobis", "votes", "mean_cosine"])
def test_any_score_can_flag(run_copy: Path, digit_folder: Path, flag: str, lam: Lam) -> None:
    printed = lam("calibrate", run_copy, "--quiet", f"--flag={flag}", *TARGETS).out
    assert f"abstain: {flag} above {Run(run_copy).calibration.flag_above:.6g}" in printed
    assert "decision: " in lam("search", run_copy, digit_folder).out


@pytest.mark.long
def test_a_search_says_which_score_flags_and_in_place_of_which(
    run_copy: Path, digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lam: Lam
) -> None:
    lam("calibrate", run_copy, "--quiet", "--flag=votes", *TARGETS)
    files = sorted(digit_folder.glob("*/*.png"))
    listed = tmp_path / "listed.csv"
    listed.write_text("\n".join(["path", *map(str, files)]), encoding="utf-8")
    lam("index", run_copy, f"--csv={listed}", "--quiet")
    asked = [str(run_copy), str(files[0])]
    instead = "by mean_cosine instead of votes.*"
    assert re.search(rf"^decision: \w+, .*\n  judged {instead}$", lam("search", *asked).out, re.MULTILINE)
    monkeypatch.setattr(Calibration, "_flags_above", defaultdict(lambda: -math.inf))
    reason = rf"  flagged {instead}: a share [\d.]+ of known queries is as unusual"
    assert re.search(rf"^decision: abstain, .*\n{reason}$", lam("search", *asked).out, re.MULTILINE)
    written, lines = written_hits(run_copy, str(files[0]), "-k1")
    assert [entry["flagged_by"] for entry in (*written["images"], *lines)] == ["mean_cosine"] * 2


@pytest.mark.long
def test_images_of_the_gallery_are_known_though_they_find_themselves(run_copy: Path, calibrated: Calibrated) -> None:
    (made, _), run, known = calibrated(*TARGETS), Run(run_copy), {}
    splits = load_data(run.config.data)[0]
    for name, images in (("gallery", splits.test), ("calibrated on", splits.validation)):
        prediction = run.encoder.predict(loader_of(images, batch_size=100))
        hits = run.gallery.search(prediction.embeddings, N_HITS)
        scores = made.scores(hits, prediction.embeddings, features=prediction.features)
        known[name] = float(made.match_probability.usual(scores).mean())
    assert known["gallery"] > known["calibrated on"] - 0.05


def test_the_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    words = re.findall(r"[a-z_]+", capsys.readouterr().out)
    assert set(words) >= set(FLAGS)


@pytest.mark.long
def test_the_index_can_be_what_is_searched(calibrated: Calibrated) -> None:
    made, _ = calibrated(*TARGETS, "--reference=0")
    assert (made.gallery_size, made.facts["gallery"], made.reference) == (60, "index", None)


def test_fresh_images_are_parted_into_queries_and_a_gallery(calibrated: Calibrated, digit_folder: Path) -> None:
    made, _ = calibrated(*FRESH, f"--folder={digit_folder}")
    assert (made.facts["data"], made.facts["queries"], made.gallery_size) == (str(digit_folder), 12, 12)
    assert made.facts["false_accepts"] == f"for classes like the classes in {digit_folder}; no bound for others"


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_a_flag_does_not_stick_where_its_evidence_is_gone(run_copy: Path, digit_folder: Path, lam: Lam) -> None:
    lam("calibrate", run_copy, "--quiet", *TARGETS, "--flag=combined")
    lam("calibrate", run_copy, "--quiet")
    assert Run(run_copy).calibration.flag == "combined"
    fresh = (*FRESH, f"--folder={digit_folder}")
    assert "flag combined compares" in lam("calibrate", run_copy, "--quiet", *fresh).err
    assert Run(run_copy).calibration.flag in Run(run_copy).calibration.detector.ranking
    said = lam("calibrate", run_copy, "--quiet", *fresh, "--flag=knn", code=1).err
    assert "flag 'knn' compares" in said


@pytest.mark.long
def test_a_flag_that_nobody_asked_for_is_chosen_anew(calibrated: Calibrated) -> None:
    for options in ((), ("--gallery=held-out",), ()):
        made, _ = calibrated(*TARGETS, *options)
        best = max(made.detector.ranking.values())
        assert made.flag == made.detector.best
        assert made.detector.ranking[made.flag] >= best - 0.1


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_a_rate_that_nobody_asked_for_is_the_least_that_can_be_promised(run_copy: Path, lam: Lam) -> None:
    warned = lam("calibrate", run_copy, "--quiet").err
    assert warned.count("\n") == 1
    assert "far to 0.0164" in warned
    assert "there are 60" in warned
    assert "--target-far" in warned
    made = Run(run_copy).calibration
    assert (made.targets, made.facts["asked_rates"]) == (Targets(far=0.0164), [])
    assert made.false_accepts.rate(made.accept_above) <= 0.0164
    for asked in ("--target-far=0.05", "--target-ood=0.2"):
        assert lam("calibrate", run_copy, "--quiet", asked).err == ""
    made = Run(run_copy).calibration
    assert (made.targets, made.facts["asked_rates"]) == (Targets(far=0.05, ood=0.2), ["far", "ood"])


@pytest.mark.long
@pytest.mark.parametrize("asked", [("--flag=combined",), ()])
def test_all_queries_count_for_a_flag(calibrated: Calibrated, asked: tuple[str, ...]) -> None:
    made, _ = calibrated(*asked, "--target-far=0.1", "--target-ood=0.03")
    assert made.flag == ("combined" if asked else made.detector.best)
    assert len(made.detector.conformal_scores("combined")) == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target-far=0",), r"target far.*\(0, 1\), got 0"),
        (("--reference=3", *TARGETS), "reference.*5 items, or 0 .*got 3"),
        (
            ("--reference=0", "--flag=knn", *TARGETS),
            "flag 'knn'.*reference=0",
        ),
        (("--flag=length", *TARGETS), "flag must.*kappa, .*'length'"),
        (("--flag=p_known", *TARGETS), "flag 'p_known'.*ambiguity"),
        (("--folder=nowhere", *TARGETS), "nowhere"),
        (("--target-wrong=2", *TARGETS), r"target wrong.*\(0, 1\), got 2"),
    ],
)
def test_mistakes_are_said_in_a_line_and_leave_nothing(
    run_copy: Path, lam: Lam, options: tuple[str, ...], message: str
) -> None:
    said = lam("calibrate", run_copy, "--quiet", *options, code=1).err
    assert re.search(message, said)
    assert said.count("\n") == 1
    assert not (run_copy / "calibration").exists()


@pytest.mark.parametrize(("name", "least"), [("far", 999), ("ood", 999), ("wrong", 2995)])
def test_rates_that_the_data_cannot_bound_are_rejected_before_embedding(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch, lam: Lam, name: str, least: int
) -> None:
    monkeypatch.setattr(Encoder, "predict", lambda *_, **__: pytest.fail("embedded"))
    error = lam("calibrate", run_copy, "--quiet", f"--target-{name}=0.001", code=1).err
    assert error.count("\n") == 1
    assert f"--target-{name}" in error
    assert f"at least {least} queries, got 60" in error
    assert not (run_copy / "calibration").exists()


@pytest.mark.long
def test_false_accepts_can_be_promised_of_strangers(
    run_copy: Path, tmp_path: Path, lam: Lam, calibrated: Calibrated
) -> None:
    folder, generator = tmp_path / "strangers", torch.Generator().manual_seed(0)
    folder.mkdir()
    for number in range(40):
        pixels = torch.randint(0, 256, (8, 8), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    made, printed = calibrated(*TARGETS, "--accept=cosine", f"--strangers={folder}")
    assert made.facts["strangers"] == str(folder)
    assert made.facts["false_accepts"] == f"for strangers like the ones in {folder}"
    assert made.facts["false_accepts"] in printed
    embedded = embed_items(Run(run_copy).encoder, folder, progress=False)
    first = Run(run_copy).gallery.search(embedded.embeddings, 1).scores[:, 0]
    assert len(embedded.sources) == len(made.false_accepts) == 40
    assert made.accept_above == pytest.approx(float(first.sort().values[-2]), abs=1e-6)
    said = lam("calibrate", run_copy, "--quiet", "--target-far=0.001", f"--strangers={folder}", code=1).err
    assert "target far (--target-far): a rate of 0.001 needs at least 999 calibration scores" in said


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_strangers_in_subfolders_count_by_class(
    run_copy: Path, tmp_path: Path, lam: Lam, calibrated: Calibrated
) -> None:
    folder, generator = tmp_path / "strangers", torch.Generator().manual_seed(0)
    for number in range(40):
        (path := folder / f"person {number % 4}").mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (8, 8), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(path / f"{number}.png")
    options = "--target-ood=0.2", "--target-miss=0.2", "--accept=cosine", f"--strangers={folder}"
    made, printed = calibrated("--target-far=0.25", *options)
    assert f"for a random item of a new class, like the 4 in {folder}" in printed
    embedded = embed_items(Run(run_copy).encoder, folder, progress=False)
    first = Run(run_copy).gallery.search(embedded.embeddings, 1).scores[:, 0]
    classes = torch.tensor([int(source.label[-1]) for source in embedded.sources])
    assert made.accept_above == pytest.approx(ConformalScores.of(first, classes).threshold(0.25), abs=1e-6)
    pairs = Run(run_copy).gallery.search(embedded.embeddings, len(Run(run_copy).gallery)).scores
    assert (pairs > made.verifier.impostors.threshold(0.25)).double().mean() < 0.3
    (folder / "person 0").rename(folder / "3")  # a label of the gallery
    said = lam("calibrate", run_copy, "--target-far=0.05", *options, code=1).err
    assert "10 of 40 strangers" in said
    assert "at least 19 classes, got 4" in said


@pytest.mark.long
def test_a_calibration_again_asks_for_what_the_last_one_did(calibrated: Calibrated) -> None:
    calibrated(*TARGETS, "--flag=combined")
    made, _ = calibrated("--target-ood=0.2")
    assert (made.targets, made.flag) == (Targets(far=0.05, ood=0.2, conformal_miss=0.1), "combined")


@pytest.mark.long
def test_what_is_printed_can_be_acted_on(calibrated: Calibrated) -> None:
    made, printed = calibrated(*TARGETS, "--target-miss=0.0001", "--flag=kappa")
    assert f"abstain: kappa below {made.kappa_below:.6g}; false flags at most 0.05" in printed
    assert "too few queries had a match to say how many hits include one with probability 0.9999" in printed
    made, printed = calibrated("--target-miss=0.1", "--flag=knn")
    assert f"abstain: knn above {made.flag_above:.6g}" in printed
    assert f"one is among the first {made.depth} with probability 0.9" in printed


def test_data_that_changed_since_the_run_are_refused(run_copy: Path, lam: Lam) -> None:
    data = run_copy / "data.json"
    data.write_text(data.read_text().replace('"items": 60', '"items": 61', 1))
    (run_copy / "MANIFEST.json").unlink()
    seal(run_copy, ["config.yaml", "data.json", "metrics.json", "report.html"])
    assert "data of the" in lam("calibrate", run_copy, "--quiet", *TARGETS, code=1).err


def test_a_calibration_needs_no_soft_labels(run_copy: Path, calibrated: Calibrated) -> None:
    settings = yaml.safe_load((run_copy / "config.yaml").read_text())
    settings["data"]["soft_labels"] = str(run_copy / "gone.npy")
    (run_copy / "config.yaml").write_text(yaml.safe_dump(settings))
    seal(run_copy, ["config.yaml", "data.json", "metrics.json", "report.html"])
    calibrated(*TARGETS)


def test_a_gallery_that_cannot_serve_is_refused(run_copy: Path, digit_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(digit_folder / "2", tmp_path / "others" / "two")
    index_images(run_copy, tmp_path / "others", progress=False)
    match = r"\d+ stored items.*'0': .*'two'"
    with pytest.raises(ValueError, match=match):
        calibrate_run(run_copy, CalibrationOptions(reference=0), progress=False)
    with pytest.raises(ValueError, match="no class folders"):
        calibrate_run(run_copy, CalibrationOptions(folder=digit_folder / "2", reference=0), progress=False)
    options = CalibrationOptions()
    object.__setattr__(options, "gallery", "test")  # type checks of tests reject it as an argument
    with pytest.raises(ValueError, match="gallery.*index, held-out.*'test'"):
        options.__post_init__()


def test_a_run_that_held_whole_classes_out_is_calibrated_on_halves_of_these(tmp_path: Path, lam: Lam) -> None:
    gray = torch.Generator().manual_seed(0)
    for number in range(12):
        (tmp_path / "people" / f"{number}").mkdir(parents=True)
        for index in range(3):
            pixels = torch.randint(20 * number, 20 * number + 30, (8, 8), generator=gray, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "people" / f"{number}" / f"{index}.png")
    settings = ["--network.name=convnet8", "--network.dimension=4", "--training.epochs=1", "--evaluation.corrupted=0"]
    settings += ["--data.options={preprocessing: {mode: L, size: 8, mean: [0.5], std: [0.5]}}"]
    settings += [f"--data.root={tmp_path / 'people'}", f"--output={tmp_path / 'run'}"]
    with pytest.warns(Note, match=r"\(3\): .*12 classes .*, 2 for test and 2 for validation"):
        run(load_config("folder laplace_posthoc", settings), progress=False)
    targets = Targets(far=0.25, ood=0.25)
    with pytest.warns(Note, match="2 validation classes: 3 of the 6") as told:
        calibration = calibrate_run(tmp_path / "run", CalibrationOptions(targets=targets), progress=False)
    assert len(told) == 1  # the run has already shown the note on its splits
    assert (calibration.facts["gallery"], calibration.facts["queries"]) == ("held-out", 3)
    gallery = Run(tmp_path / "run").gallery
    assert calibration.gallery_size == len(gallery.items) == 6
    assert not calibration.is_stale(len(gallery.items))
    assert "stale" not in lam("search", tmp_path / "run", tmp_path / "people" / "3" / "0.png").out
    lam("index", tmp_path / "run", tmp_path / "people", "--quiet")
    unlike = pytest.warns(UserWarning, match="8 classes.*no validation")
    with unlike, pytest.warns(Note, match="6 of 6 queries"):
        calibrate_run(tmp_path / "run", CalibrationOptions(targets=targets), progress=False)


def test_another_encoder_makes_a_calibration_invalid(run_copy: Path, calibrated: Calibrated) -> None:
    calibrated(*TARGETS, "--reference=0")
    encoder = Run(run_copy).encoder
    encoder.save(run_copy / "encoder")
    _ = Run(run_copy).calibration  # the same one, written again
    encoder.posterior = replace(encoder.posterior, prior_precision=2.0)  # type: ignore[attr-defined]
    encoder.save(run_copy / "encoder")
    with pytest.raises(ValueError, match="another network, posterior"):
        _ = Run(run_copy).calibration


@pytest.mark.filterwarnings("ignore:.*incomplete")
def test_a_run_whose_first_calibration_was_interrupted_counts_as_uncalibrated(
    run_copy: Path, digit_folder: Path, lam: Lam, calibrated: Calibrated
) -> None:
    (run_copy / "calibration" / "generation-0").mkdir(parents=True)
    with pytest.warns(UserWarning, match="incomplete"):
        assert Run(run_copy).calibration is None
    lam("search", run_copy, digit_folder / "1" / "0.png")
    assert calibrated(*TARGETS, "--reference=0")[0] is not None


@pytest.mark.parametrize("score", ["cosine", "mean_cosine"])
def test_a_cosine_that_accepts_is_named_without_a_minus(score: str) -> None:
    """The statistic is minus a score, because scores rise with doubt; for these two scores, it is the cosine itself."""
    statistic = -scores_of({"cosines": torch.tensor([[0.9, 0.8]]), "labels": torch.tensor([[0, 1]])})[score]
    assert statistic > 0
    assert statistic_name(score) == f"the {score.replace('_', ' ')}"
    assert statistic_name("margin") == "−margin"


def test_a_run_that_cannot_be_written_is_refused_before_any_work(
    finished_run: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != finished_run.folder)
    monkeypatch.setattr("lam.runs.calibrate.Inputs", None)
    with pytest.raises(ValueError, match="run.*written, .*this user"):
        calibrate_run(finished_run.folder)
