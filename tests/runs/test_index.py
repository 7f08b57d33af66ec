"""Folders of images, embedded, indexed and searched by a run."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lam.cli import main
from lam.gallery.database import Transaction
from lam.gallery.embed import embed_items
from lam.gallery.item import file_id, pack
from lam.gallery.store import FILE, MARK, ItemStore
from lam.retrieval import Calibration, Index, fuse_identities
from lam.runs.finished import Run
from lam.runs.index import index_images
from lam.runs.search import search
from lam.utils.files import CorruptFileError, check_output
from lam.vmf.embeddings import Embeddings
from tests.helpers import written_hits
from tests.runs.conftest import Lam
from tests.service.test_full_disk import small_file_system


@pytest.fixture
def flat_folder(digit_folder: Path, tmp_path: Path) -> Path:
    """The images of one class, without sub-folders."""
    return Path(shutil.copytree(digit_folder / "1", tmp_path / "flat"))


@pytest.mark.parametrize("layout", ["by class", "flat"])
def test_embeddings_are_written_without_pickle(
    layout: str, run_copy: Path, digit_folder: Path, flat_folder: Path, tmp_path: Path
) -> None:
    folder, count = (digit_folder, 24) if layout == "by class" else (flat_folder, 8)
    output = tmp_path / "out.npz"
    assert main(["embed", str(run_copy), str(folder), "-o", str(output), "--quiet"]) == 0
    with np.load(output, allow_pickle=False) as found:
        assert all(found[name].dtype.kind in "fiU" for name in found)
        assert found["mean"].shape == (count, 3)
        np.testing.assert_allclose(np.linalg.norm(found["mean"], axis=1), 1, rtol=1e-5)
        for name in ("kappa", "variance", "resultant"):
            assert found[name].shape == (count,)
            assert np.isfinite(found[name]).all()
            assert (found[name] > 0).all()
        assert all(Path(path).is_file() for path in found["paths"])
        encoder = Run(run_copy).encoder
        assert encoder.preprocessing is not None
        alone = encoder.embed(encoder.preprocessing(found["paths"][-1])[None])
        assert float(alone.kappa[0]) == pytest.approx(found["kappa"][-1], rel=1e-5)


def test_no_work_is_done_for_an_output_that_cannot_be(run_copy: Path, digit_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder .*nowhere.*out.npz"):
        check_output(tmp_path / "nowhere" / "out.npz")
    with pytest.raises(ValueError, match="is a folder: "):
        check_output(tmp_path)
    assert main(["embed", str(tmp_path / "no run"), str(digit_folder), "-o", str(tmp_path / "a" / "b.npz")]) == 1


def test_labels_and_paths_cannot_steer_a_terminal(run_copy: Path, digit_folder: Path, tmp_path: Path, lam: Lam) -> None:
    own = Path(shutil.copytree(digit_folder / "1", tmp_path / "own" / "x\u202ey"))
    lam("index", run_copy, own.parent, "--quiet")
    printed = lam("search", run_copy, next(own.iterdir())).out
    assert r"x\u202ey  " in printed
    assert "\u202e" not in printed
    own.rename(own.with_name("x\x1b[31m"))
    refused = lam("index", run_copy, own.parent, "--quiet", code=1).err
    assert "control character" in refused
    assert "\x1b" not in refused


@pytest.mark.parametrize("factory", ["Flat", "HNSW32"])
def test_an_image_finds_itself(factory: str, run_copy: Path, digit_folder: Path) -> None:
    assert len(index_images(run_copy, digit_folder, factory=factory, progress=False)) == 24
    found = search(run_copy, digit_folder / "2" / "3.png", k=24)
    assert float(found.hits.scores[0, 0]) == pytest.approx(1)
    best = {item.path for item, score in zip(found.items[0], found.hits.scores[0], strict=True) if score > 1 - 1e-6}
    assert str((digit_folder / "2" / "3.png").resolve()) in best
    assert {item.label for item in found.items[0]} == {"0", "1", "2"}
    assert (found.hits.kappa > 0).all()
    assert found.hits.scores[0].diff().le(0).all()


def test_one_image_is_one_row_whatever_it_is_called(run_copy: Path, flat_folder: Path) -> None:
    shutil.copy(flat_folder / "0.png", flat_folder / "copy.png")
    assert len(index_images(run_copy, flat_folder, progress=False)) == 8
    found = search(run_copy, flat_folder / "0.png", k=100)
    assert found.hits.ids.shape == (1, 8)
    assert found.hits.ids.min() >= 0
    assert len({item.path for item in found.items[0]}) == 8
    first = sorted(item.id for item in found.items[0])
    assert len(index_images(run_copy, flat_folder, progress=False)) == 8
    assert sorted(item.id for item in search(run_copy, flat_folder / "0.png", k=100).items[0]) == first


def test_what_is_no_image_is_named_and_k_below_one_is_refused(run_copy: Path, flat_folder: Path) -> None:
    with pytest.raises(ValueError, match="^k .*1, got 0"):
        search(run_copy, flat_folder / "0.png", k=0)
    (flat_folder / "notes.png").write_text("milk, bread")
    for act in (
        lambda: index_images(run_copy, flat_folder, progress=False),
        lambda: search(run_copy, flat_folder / "notes.png"),
    ):
        with pytest.raises(ValueError, match="notes.png.*not an image"):
            act()
    with pytest.raises(ValueError, match="no image.*missing.png"):
        search(run_copy, flat_folder / "missing.png")


@pytest.mark.parametrize(
    "order", ["RUN FOLDER --factory HNSW32", "RUN --factory HNSW32 FOLDER", "--factory HNSW32 RUN FOLDER"]
)
def test_options_stand_wherever_they_are_written(run_copy: Path, flat_folder: Path, order: str) -> None:
    given = [{"RUN": str(run_copy), "FOLDER": str(flat_folder)}.get(word, word) for word in order.split()]
    assert main(["index", "--quiet", *given]) == 0
    found = Run(run_copy).gallery
    assert (len(found), found.factory) == (8, "HNSW32")
    assert len(Index.load(run_copy / "gallery" / "index")) == 8


def test_a_refused_index_leaves_the_old_one(run_copy: Path, flat_folder: Path) -> None:
    before = search(run_copy, flat_folder / "0.png").items
    with pytest.raises(ValueError, match="factory.*FAISS.*'Nonsense'"):
        index_images(run_copy, flat_folder, factory="Nonsense", progress=False)
    with pytest.raises(ValueError, match="train on 8 embeddings"):
        index_images(run_copy, flat_folder, factory="IVF20,Flat", progress=False)
    with pytest.raises(ValueError, match="is no folder"):
        index_images(run_copy, flat_folder / "missing", progress=False)
    assert search(run_copy, flat_folder / "0.png").items == before


ANSWERED = ("probability", "known", "right_if_known", "statistic", "accept", "accept_above", "false_accept")
STEPS = {
    "before the store is written": (ItemStore, "replace", 60),
    "while the store is written": (Transaction, "_update_ledger", 60),
    "before the log is erased": (ItemStore, "erase_log", 8),
    "before the index is kept": (Index, "save", 8),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_leaves_the_old_items_or_the_new_ones(
    run_copy: Path, flat_folder: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, left = STEPS[step]
    before, killed = search(run_copy, flat_folder / "0.png", k=100).items, tmp_path / "killed"

    def kill(*_: object, **__: object) -> None:
        if not killed.exists():
            shutil.copytree(run_copy, killed)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, name, kill)
        with pytest.raises(KeyboardInterrupt):
            index_images(run_copy, flat_folder, factory="HNSW8", progress=False)
    found = search(killed, flat_folder / "0.png", k=100).items
    assert len(found[0]) == left
    assert (found == before) == (left == 60)
    assert len(index_images(killed, flat_folder, progress=False)) == 8
    assert len(Run(killed).gallery) == 8


def test_lost_items_are_told_and_begun_anew_where_that_is_asked_for(run_copy: Path, flat_folder: Path) -> None:
    (run_copy / "gallery" / FILE).unlink()
    for act in (search, lambda run, folder: index_images(run, folder)):
        with pytest.raises(CorruptFileError, match="items.sqlite.*existed"):
            act(run_copy, flat_folder)
    (run_copy / "gallery" / MARK).unlink()
    with pytest.raises(ValueError, match="items.sqlite is missing or empty: .*`lam"):
        search(run_copy, flat_folder)
    index_images(run_copy, flat_folder, progress=False)
    assert search(run_copy, flat_folder / "0.png", k=1).items[0][0].label == ""  # no class folders, no label


def test_a_new_index_repairs_what_was_altered_of_the_old(run_copy: Path, flat_folder: Path) -> None:
    store = ItemStore(run_copy / "gallery" / FILE)
    store._writer.execute("UPDATE items SET kappa = 1e9 WHERE id = '7'")
    store.close()
    with pytest.raises(CorruptFileError, match="rows 7 are altered"):
        search(run_copy, flat_folder)
    index_images(run_copy, flat_folder, progress=False)
    assert len(search(run_copy, flat_folder / "0.png", k=100).items[0]) == 8


def test_a_gallery_that_nobody_can_write_is_searched(run_copy: Path, flat_folder: Path, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 2**26):
        run = shutil.copytree(run_copy, tmp_path / "disk" / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        assert len(search(run, flat_folder / "0.png", k=100).items[0]) == 60


def test_images_of_another_shape_are_made_to_fit(run_copy: Path, tmp_path: Path) -> None:
    Image.new("RGBA", (300, 20), (200, 10, 10, 128)).save(tmp_path / "wide.png")
    assert len(search(run_copy, tmp_path / "wide.png", k=2).items[0]) == 2


def test_an_encoder_that_knows_no_preprocessing_is_refused(run_copy: Path, flat_folder: Path) -> None:
    encoder = Run(run_copy).encoder
    encoder.preprocessing = None
    with pytest.raises(ValueError, match=r"no preprocessing.*preprocessing=\.\.\."):
        embed_items(encoder, flat_folder)


def _list_of(folder: Path, *lines: str) -> Path:
    path = folder / "list.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_list_gives_ids_labels_and_metadata(run_copy: Path, digit_folder: Path, tmp_path: Path, lam: Lam) -> None:
    first, second, third = (digit_folder / "0" / f"{number}.png" for number in range(3))
    shutil.copy(third, tmp_path / "here.png")
    lines = (f"7,{first},zero,Kyoto,", f"vase-17,{second},zero,,3", ",here.png,,Lima,4")
    listed = _list_of(tmp_path, "id,path,label,city,shelf", *lines)
    assert lam("index", run_copy, "--csv", listed, "--quiet").out == f"3 images: {run_copy / 'gallery'}\n"
    items = Run(run_copy).gallery.items
    assert [(item.id, item.label, item.path, json.loads(item.metadata)) for item in items] == [
        ("7", "zero", str(first), {"city": "Kyoto"}),
        ("vase-17", "zero", str(second), {"shelf": 3}),
        (str(file_id(third)), "", str(tmp_path / "here.png"), {"city": "Lima", "shelf": 4}),
    ]
    assert [item.contents for item in items] == [pack([file_id(path)]) for path in (first, second, third)]
    assert search(run_copy, second, k=1).items[0][0].id == "vase-17"


def test_images_of_one_identity_are_fused(run_copy: Path, digit_folder: Path, tmp_path: Path) -> None:
    """Fusion is by id; a repeated image counts once, and κ does not rise with the number of images."""
    paths = [digit_folder / "0" / f"{number}.png" for number in range(4)]
    shutil.copy(paths[0], tmp_path / "again.png")
    lines = (f"a,{paths[0]}", f"b,{paths[3]}", f"a,{paths[1]}", f"a,{paths[2]}", "a,again.png")
    made = index_images(run_copy, _list_of(tmp_path, "id,path", *lines), fuse=True, progress=False)
    assert [item.id for item in made.items] == ["a", "b"]
    encoder = Run(run_copy).encoder
    assert encoder.preprocessing is not None
    alone = Embeddings.concatenate([encoder.embed(encoder.preprocessing(path)[None]) for path in paths])
    expected = fuse_identities(alone, [0, 0, 0, 1]).embeddings
    torch.testing.assert_close(made.embeddings.mean, expected.mean)
    torch.testing.assert_close(made.embeddings.kappa, expected.kappa, rtol=1e-4, atol=0)
    assert float(made.embeddings.kappa[0]) <= float(alone.kappa[:3].max())
    fused = made.items[0]
    assert (fused.images, json.loads(fused.paths)) == (3, [str(path) for path in paths[:3]])
    assert fused.resultant == pytest.approx(float(expected.resultant[0]))
    assert fused.least_image_kappa == pytest.approx(float(alone.kappa[:3].min()), rel=1e-4)
    assert fused.contents == pack([file_id(path) for path in paths[:3]])
    assert (made.items[1].images, made.items[1].sums) == (1, None)
    assert [replace(item, thumbnail=None) for item in made.items] == list(Run(run_copy).gallery.items)


def test_folders_fuse_by_class(run_copy: Path, digit_folder: Path, lam: Lam) -> None:
    assert lam("index", run_copy, digit_folder, "--fuse", "--quiet").out.startswith("3 identities: ")
    found = search(run_copy, digit_folder / "1" / "0.png", k=9)
    assert {(item.label, item.images) for item in found.items[0]} == {("0", 8), ("1", 8), ("2", 8)}


@pytest.mark.long
def test_uncertain_images_are_told_and_skipped_where_that_is_asked_for(
    run_copy: Path, digit_folder: Path, monkeypatch: pytest.MonkeyPatch, lam: Lam
) -> None:
    assert index_images(run_copy, digit_folder, progress=False).uncertain == ()
    with pytest.raises(ValueError, match="no calibration: `lam calibrate "):
        index_images(run_copy, digit_folder, skip_uncertain=True, progress=False)
    lam("calibrate", run_copy, "--quiet", "--target-far=0.3", "--target-ood=0.3")
    flag = Run(run_copy).calibration.kappa_below
    made = index_images(run_copy, digit_folder, progress=False)
    kappa = {item.path: value for item, value in zip(made.items, made.embeddings.kappa.tolist(), strict=True)}
    assert dict(made.uncertain) == {path: value for path, value in kappa.items() if value < flag}
    middle = sorted(kappa.values())[5]
    monkeypatch.setattr(Calibration, "kappa_below", middle)
    made = index_images(run_copy, digit_folder, progress=False)
    assert (len(made), len(made.uncertain)) == (24, 5)
    assert sum(item.least_kappa < middle for item in made.items) == 5
    told = lam("index", run_copy, digit_folder, "--skip-uncertain", "--quiet").out.splitlines()
    assert told[0] == "uncertain, kappa below the flag, skipped: 5"
    assert {line.split()[1] for line in told[1:6]} == {path for path, _ in made.uncertain}
    assert told[6].startswith("19 images: ")
    assert len(Run(run_copy).gallery) == 19
    monkeypatch.setattr(Calibration, "kappa_below", 1e9)
    with pytest.raises(ValueError, match=r"no image.*kappa.*1e\+09.*24"):
        index_images(run_copy, digit_folder, skip_uncertain=True, progress=False)
    assert len(Run(run_copy).gallery) == 19


@pytest.mark.long
def test_a_calibration_of_another_encoder_flags_nothing(
    run_copy: Path, flat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["calibrate", str(run_copy), "--quiet", "--target-far=0.3", "--target-ood=0.3"]) == 0
    monkeypatch.setattr(Run, "fingerprint", "of another")
    with pytest.warns(UserWarning, match="another network, posterior.*flagged"):
        assert index_images(run_copy, flat_folder, progress=False).uncertain == ()
    with pytest.raises(ValueError, match="another network, posterior"):
        index_images(run_copy, flat_folder, skip_uncertain=True, progress=False)


def test_images_come_from_one_place(run_copy: Path, lam: Lam) -> None:
    for given in ([], ["somewhere", "--csv", "list.csv"]):
        said = lam("index", run_copy, *given, code=1).err
        assert "one of a folder, a table, or files" in said


def test_many_images_are_searched_at_once_and_answer_as_one_by_one(
    run_copy: Path, digit_folder: Path, lam: Lam
) -> None:
    images = [digit_folder / "2" / "3.png", digit_folder / "0"]
    found = search(run_copy, *images, k=3)
    assert [image.name for image in found.images] == ["3.png", *(f"{number}.png" for number in range(8))]
    assert found.hits.scores.shape == (9, 3)
    for row, image in enumerate(found.images):
        alone = search(run_copy, image, k=3)
        torch.testing.assert_close(alone.hits.scores[0], found.hits.scores[row], rtol=0, atol=1e-6)
        assert alone.items[0] == found.items[row]
    printed = lam("search", run_copy, *images, "-k2", "--quiet").out
    assert printed.count("image: ") == 9
    assert printed.count("query: kappa") == 9
    (digit_folder.parent / "empty").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="no images in .*empty"):
        search(run_copy, digit_folder.parent / "empty")


@pytest.mark.long
@pytest.mark.parametrize("calibrated", [False, True])
def test_what_is_found_is_written_with_its_decisions(calibrated: bool, run_copy: Path, digit_folder: Path) -> None:
    if calibrated:
        targets = ("--target-far=0.05", "--target-ood=0.05", "--target-miss=0.1")
        assert main(["calibrate", str(run_copy), "--quiet", *targets]) == 0
    written, lines = written_hits(run_copy, str(digit_folder), "-k3")
    found = search(run_copy, digit_folder, k=3)
    assert written["calibration"] == ("current" if calibrated else None)
    assert len(lines) == 3 * len(written["images"]) == 72
    for row, entry in enumerate(written["images"]):
        assert entry["image"] == str(found.images[row])
        assert entry["kappa"] == pytest.approx(float(found.queries.kappa[row]))
        assert [hit["rank"] for hit in entry["hits"]] == [1, 2, 3]
        assert [hit["label"] for hit in entry["hits"]] == [item.label for item in found.items[row]]
        decision = found.decisions.decision[row] if calibrated and found.decisions else None
        assert entry["decision"] == decision
        for line, hit in zip(lines[3 * row : 3 * row + 3], entry["hits"], strict=True):
            assert (line["image"], line["decision"], line["label"]) == (entry["image"], decision or "", hit["label"])
            assert float(line["score"]) == pytest.approx(hit["score"])
            for name in ANSWERED:
                assert bool(line[name]) == (entry[name] is not None) == calibrated
            if calibrated:
                assert entry["probability"] == pytest.approx(entry["known"] * entry["right_if_known"])
                if entry["decision"] != "abstain":
                    assert (entry["decision"] == "match") == (entry["statistic"] > entry["accept_above"])
            assert (line["p_new"], entry["p_in_gallery"]) == ("", None)  # no class of the gallery has one item
            assert line["calibration"] == ("current" if calibrated else "")
            assert hit["uncertain"] in ((True, False) if calibrated else (None,))
            assert (line["uncertain"], line["fused"]) == (str(hit["uncertain"]) if calibrated else "", "False")


@pytest.mark.long
def test_a_hit_says_whether_it_is_uncertain_and_whether_it_is_fused(
    run_copy: Path, digit_folder: Path, monkeypatch: pytest.MonkeyPatch, lam: Lam
) -> None:
    """The least κ of a hit's images decides, in print, CSV and JSON."""
    lam("calibrate", run_copy, "--quiet", "--target-far=0.3", "--target-ood=0.3")
    paths = [digit_folder / "0" / f"{number}.png" for number in range(4)]
    lines = (f"a,{paths[0]}", f"a,{paths[1]}", f"a,{paths[2]}", f"b,{paths[3]}")
    listed = _list_of(run_copy, "id,path", *lines)
    fused, alone = index_images(run_copy, listed, fuse=True, progress=False).items
    for is_uncertain in (True, False):
        kappa_below = fused.least_kappa + (alone.kappa - fused.least_kappa) * 0.5 if is_uncertain else 0.0
        monkeypatch.setattr(Calibration, "kappa_below", kappa_below)
        expected = {item.id: (item.least_kappa < kappa_below, item is fused) for item in (fused, alone)}
        assert any(uncertain for uncertain, _ in expected.values()) == is_uncertain
        found, lines = written_hits(run_copy, str(paths[0]))
        (image,) = found["images"]
        assert {hit["id"]: (hit["uncertain"], hit["fused"]) for hit in image["hits"]} == expected
        written = {line["id"]: (line["uncertain"], line["fused"]) for line in lines}
        assert written == {name: (str(uncertain), str(fused)) for name, (uncertain, fused) in expected.items()}
        printed = lam("search", run_copy, paths[0], "--quiet").out.splitlines()
        remarks = {line.partition(".png")[2] for line in printed if ".png" in line}
        words = {True: "uncertain, fused of 3 images", False: "fused of 3 images"}[expected["a"][0]]
        assert remarks == {f"  ({words})", "  (uncertain)" if expected["b"][0] else ""}


def test_what_is_found_is_written_as_csv_or_json_alone(run_copy: Path, digit_folder: Path, lam: Lam) -> None:
    said = lam("search", run_copy, digit_folder, "-o", run_copy / "found.txt", code=1).err
    assert ".csv or .json, got" in said
    said = lam("search", run_copy, digit_folder, "-o", run_copy / "no" / "found.csv", code=1).err
    assert "is no folder" in said


@pytest.mark.long
def test_embeddings_say_which_images_are_flagged(run_copy: Path, digit_folder: Path, lam: Lam) -> None:
    output = run_copy / "out.npz"
    command = ["embed", str(run_copy), str(digit_folder), "-o", str(output), "--quiet"]
    assert lam(*command).out == f"24 embeddings: {output}\n"
    with np.load(output, allow_pickle=False) as written:
        assert "flagged" not in written
    targets = ("--target-far=0.05", "--target-ood=0.4", "--target-miss=0.1")
    lam("calibrate", run_copy, "--quiet", "--flag=knn", *targets)
    told = lam(*command).out
    found = search(run_copy, digit_folder)
    assert found.decisions is not None
    expected = [decision == "abstain" for decision in found.decisions.decision]
    assert 0 < sum(expected) < 24
    assert told == f"24 embeddings, {sum(expected)} flagged as unlike known queries: {output}\n"
    with np.load(output, allow_pickle=False) as written:
        assert written["flagged"].tolist() == expected
    lam("index", run_copy, "--embeddings", output, "--quiet")
