"""Folders of images, embedded, indexed and searched by a run."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lam.cli import main
from lam.gallery.enrolment import content_id, named_id
from lam.retrieval import Index, fuse_identities
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.files import load_calibration
from lam.runs import index as gallery
from lam.utils.files import CorruptFileError, read_json
from lam.vmf.embeddings import Embeddings


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
        encoder = gallery.open_run(run_copy)
        assert encoder.preprocessing is not None
        alone = encoder.embed(encoder.preprocessing(found["paths"][-1])[None])
        assert float(alone.kappa[0]) == pytest.approx(found["kappa"][-1], rel=1e-5)


def test_no_work_is_done_for_an_output_that_cannot_be(run_copy: Path, digit_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere to write out.npz to: make it first"):
        gallery.check_output(tmp_path / "nowhere" / "out.npz")
    with pytest.raises(ValueError, match="is a folder: give the path of the file to write"):
        gallery.check_output(tmp_path)
    assert main(["embed", str(tmp_path / "no run"), str(digit_folder), "-o", str(tmp_path / "a" / "b.npz")]) == 1


@pytest.mark.parametrize("factory", ["Flat", "HNSW32"])
def test_an_image_finds_itself(factory: str, run_copy: Path, digit_folder: Path) -> None:
    assert gallery.index_folder(run_copy, digit_folder, factory=factory, progress=False) == 24
    found = gallery.search(run_copy, digit_folder / "2" / "3.png", k=24)
    assert float(found.hits.scores[0, 0]) == pytest.approx(1)
    best = {item["path"] for item, score in zip(found.items[0], found.hits.scores[0], strict=True) if score > 1 - 1e-6}
    assert str((digit_folder / "2" / "3.png").resolve()) in best
    assert {item["label"] for item in found.items[0]} == {"0", "1", "2"}
    assert (found.hits.kappa > 0).all()
    assert found.hits.scores[0].diff().le(0).all()


def test_one_image_is_one_row_whatever_it_is_called(run_copy: Path, flat_folder: Path) -> None:
    shutil.copy(flat_folder / "0.png", flat_folder / "copy.png")
    assert gallery.index_folder(run_copy, flat_folder, progress=False) == 8
    found = gallery.search(run_copy, flat_folder / "0.png", k=100)
    assert found.hits.ids.shape == (1, 8)
    assert found.hits.ids.min() >= 0
    assert len({item["path"] for item in found.items[0]}) == 8
    first = found.hits.ids.sort().values
    assert gallery.index_folder(run_copy, flat_folder, progress=False) == 8
    assert torch.equal(gallery.search(run_copy, flat_folder / "0.png", k=100).hits.ids.sort().values, first)


def test_k_below_one_is_refused(run_copy: Path, flat_folder: Path) -> None:
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        gallery.search(run_copy, flat_folder / "0.png", k=0)


def test_what_is_no_image_is_named(run_copy: Path, flat_folder: Path) -> None:
    (flat_folder / "notes.png").write_text("milk, bread")
    for act in (
        lambda: gallery.index_folder(run_copy, flat_folder, progress=False),
        lambda: gallery.search(run_copy, flat_folder / "notes.png"),
    ):
        with pytest.raises(ValueError, match="notes.png is no image"):
            act()
    with pytest.raises(ValueError, match="there is no image .*missing.png"):
        gallery.search(run_copy, flat_folder / "missing.png")


@pytest.mark.parametrize(
    "order", ["RUN FOLDER --factory HNSW32", "RUN --factory HNSW32 FOLDER", "--factory HNSW32 RUN FOLDER"]
)
def test_options_stand_wherever_they_are_written(run_copy: Path, flat_folder: Path, order: str) -> None:
    given = [{"RUN": str(run_copy), "FOLDER": str(flat_folder)}.get(word, word) for word in order.split()]
    assert main(["index", "--quiet", *given]) == 0
    index = Index.load(run_copy / "index")
    assert (len(index), index.factory) == (8, "HNSW32")


def test_a_refused_index_leaves_the_old_one(run_copy: Path, flat_folder: Path) -> None:
    before = gallery.search(run_copy, flat_folder / "0.png").items
    with pytest.raises(ValueError, match="factory must be a FAISS factory string .* got 'Nonsense'"):
        gallery.index_folder(run_copy, flat_folder, factory="Nonsense", progress=False)
    with pytest.raises(ValueError, match="FAISS cannot train on 8 embeddings"):
        gallery.index_folder(run_copy, flat_folder, factory="IVF20,Flat", progress=False)
    with pytest.raises(ValueError, match="there is no folder"):
        gallery.index_folder(run_copy, flat_folder / "missing", progress=False)
    assert gallery.search(run_copy, flat_folder / "0.png").items == before


def test_whichever_index_a_crash_leaves_finds_its_items(
    run_copy: Path, flat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gallery.search(run_copy, flat_folder / "0.png").items
    with monkeypatch.context() as patch:
        patch.setattr("lam.retrieval.index.faiss_index.Index.save", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            gallery.index_folder(run_copy, flat_folder, progress=False)
    assert gallery.search(run_copy, flat_folder / "0.png").items == before
    gallery.index_folder(run_copy, flat_folder, progress=False)
    (path,) = run_copy.glob("items/*/items.json")
    assert len(read_json(path)) == 8


def test_a_new_index_repairs_lost_items(run_copy: Path, flat_folder: Path) -> None:
    shutil.rmtree(run_copy / "items")
    with pytest.raises(CorruptFileError, match="items/MANIFEST.json is missing"):
        gallery.search(run_copy, flat_folder / "0.png")
    gallery.index_folder(run_copy, flat_folder, progress=False)
    assert gallery.search(run_copy, flat_folder / "0.png", k=1).items[0][0]["label"] == "flat"


def test_items_of_another_index_are_refused(run_copy: Path, flat_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_copy / "items", tmp_path / "items")
    gallery.index_folder(run_copy, flat_folder, progress=False)
    shutil.rmtree(run_copy / "items")
    shutil.copytree(tmp_path / "items", run_copy / "items")
    with pytest.raises(CorruptFileError, match="items.json does not know id .*: run `lam index` again"):
        gallery.search(run_copy, flat_folder / "0.png")


def test_images_of_another_shape_are_made_to_fit(run_copy: Path, tmp_path: Path) -> None:
    Image.new("RGBA", (300, 20), (200, 10, 10, 128)).save(tmp_path / "wide.png")
    assert len(gallery.search(run_copy, tmp_path / "wide.png", k=2).items[0]) == 2


def test_an_encoder_that_knows_no_preprocessing_is_refused(run_copy: Path, flat_folder: Path) -> None:
    encoder = gallery.open_run(run_copy)
    encoder.preprocessing = None
    with pytest.raises(ValueError, match=r"how an image becomes an input: fit it with preprocessing=\.\.\."):
        gallery.embed_folder(encoder, flat_folder)


def _list_of(folder: Path, *lines: str) -> Path:
    path = folder / "list.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_list_gives_ids_labels_and_metadata(
    run_copy: Path, digit_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (digit_folder / "0" / f"{number}.png" for number in range(3))
    shutil.copy(third, tmp_path / "here.png")
    lines = (f"7,{first},zero,Kyoto,", f"vase-17,{second},zero,,3", ",here.png,,Lima,4")
    listed = _list_of(tmp_path, "id,path,label,city,shelf", *lines)
    assert main(["index", str(run_copy), "--csv", str(listed), "--quiet"]) == 0
    assert capsys.readouterr().out == f"3 images: {run_copy / 'index'}\n"
    items = gallery.read_items(run_copy, [7, named_id("vase-17"), content_id(third)])
    assert items == [
        {
            "label": "zero",
            "path": str(first),
            "id": "7",
            "contents": [content_id(first)],
            "metadata": {"city": "Kyoto"},
        },
        {
            "label": "zero",
            "path": str(second),
            "id": "vase-17",
            "contents": [content_id(second)],
            "metadata": {"shelf": "3"},
        },
        {"label": "", "path": str(tmp_path / "here.png"), "metadata": {"city": "Lima", "shelf": "4"}},
    ]
    assert gallery.search(run_copy, second, k=1).items[0][0]["id"] == "vase-17"


def test_images_of_one_identity_are_fused(run_copy: Path, digit_folder: Path, tmp_path: Path) -> None:
    """By id, the same image counted once, with a κ that the number of images alone does not raise."""
    paths = [digit_folder / "0" / f"{number}.png" for number in range(4)]
    shutil.copy(paths[0], tmp_path / "again.png")
    lines = (f"a,{paths[0]}", f"b,{paths[3]}", f"a,{paths[1]}", f"a,{paths[2]}", "a,again.png")
    made = gallery.index_images(run_copy, listed=_list_of(tmp_path, "id,path", *lines), fuse=True, progress=False)
    assert made.ids.tolist() == [named_id("a"), named_id("b")]
    encoder = gallery.open_run(run_copy)
    assert encoder.preprocessing is not None
    alone = Embeddings.concatenate([encoder.embed(encoder.preprocessing(path)[None]) for path in paths])
    expected = fuse_identities(alone, [0, 0, 0, 1]).embeddings
    torch.testing.assert_close(made.embeddings.mean, expected.mean)
    torch.testing.assert_close(made.embeddings.kappa, expected.kappa, rtol=1e-4, atol=0)
    assert float(made.embeddings.kappa[0]) <= float(alone.kappa[:3].max())
    fused = made.items[0]["fused"]
    assert (fused["images"], fused["paths"]) == (3, [str(path) for path in paths[:3]])
    assert fused["resultant"] == pytest.approx(float(expected.resultant[0]))
    assert fused["kappa"] == pytest.approx(alone.kappa[:3].tolist(), rel=1e-4)
    assert made.items[0]["contents"] == [content_id(path) for path in paths[:3]]
    assert "fused" not in made.items[1]
    assert len(Index.load(run_copy / "index")) == 2


def test_folders_fuse_by_class(run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(run_copy), str(digit_folder), "--fuse", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("3 identities: ")
    found = gallery.search(run_copy, digit_folder / "1" / "0.png", k=9)
    assert {(item["label"], item["fused"]["images"]) for item in found.items[0]} == {("0", 8), ("1", 8), ("2", 8)}


def test_poor_images_are_told_and_skipped_where_that_is_asked_for(
    run_copy: Path, digit_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gallery.index_images(run_copy, folder=digit_folder, progress=False).poor == ()
    with pytest.raises(ValueError, match="has no calibration: `lam calibrate .*` makes one"):
        gallery.index_images(run_copy, folder=digit_folder, skip_poor=True, progress=False)
    assert main(["calibrate", str(run_copy), "--quiet", "--target-far=0.3", "--target-ood=0.3"]) == 0
    flag = load_calibration(run_copy).kappa_below
    made = gallery.index_images(run_copy, folder=digit_folder, progress=False)
    kappa = {item["path"]: value for item, value in zip(made.items, made.embeddings.kappa.tolist(), strict=True)}
    assert dict(made.poor) == {path: value for path, value in kappa.items() if value < flag}
    middle = sorted(kappa.values())[5]
    monkeypatch.setattr(Calibration, "kappa_below", middle)
    made = gallery.index_images(run_copy, folder=digit_folder, progress=False)
    assert (len(made), len(made.poor)) == (24, 5)
    assert sum("poor" in item for item in made.items) == 5
    capsys.readouterr()
    assert main(["index", str(run_copy), str(digit_folder), "--skip-poor", "--quiet"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "poor, kappa below the flag, skipped: 5"
    assert {line.split()[1] for line in told[1:6]} == {path for path, _ in made.poor}
    assert told[6].startswith("19 images: ")
    assert len(Index.load(run_copy / "index")) == 19
    monkeypatch.setattr(Calibration, "kappa_below", 1e9)
    with pytest.raises(ValueError, match=r"no image is left: kappa is below the flag 1e\+09 for all 24"):
        gallery.index_images(run_copy, folder=digit_folder, skip_poor=True, progress=False)
    assert len(Index.load(run_copy / "index")) == 19


def test_a_calibration_of_another_encoder_flags_nothing(
    run_copy: Path, flat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["calibrate", str(run_copy), "--quiet", "--target-far=0.3", "--target-ood=0.3"]) == 0
    monkeypatch.setattr("lam.retrieval.decisions.files.fingerprint", lambda _: "of another")
    with pytest.warns(UserWarning, match="is of another network, posterior or .*; nothing is flagged"):
        assert gallery.index_images(run_copy, folder=flat_folder, progress=False).poor == ()
    with pytest.raises(ValueError, match="is of another network, posterior or preprocessing"):
        gallery.index_images(run_copy, folder=flat_folder, skip_poor=True, progress=False)


def test_images_come_from_one_place(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["somewhere", "--csv", "list.csv"]):
        assert main(["index", str(run_copy), *given]) == 1
        assert "give the images to index as one of a folder, a CSV file, or files of" in capsys.readouterr().err


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_many_images_are_searched_at_once_and_answer_as_one_by_one(
    run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [digit_folder / "2" / "3.png", digit_folder / "0"]
    found = gallery.search(run_copy, *images, k=3)
    assert [image.name for image in found.images] == ["3.png", *(f"{number}.png" for number in range(8))]
    assert found.hits.scores.shape == (9, 3)
    for row, image in enumerate(found.images):
        alone = gallery.search(run_copy, image, k=3)
        torch.testing.assert_close(alone.hits.scores[0], found.hits.scores[row], rtol=0, atol=1e-6)
        assert alone.items[0] == found.items[row]
    assert main(["search", str(run_copy), *map(str, images), "-k2", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("image: ") == 9
    assert printed.count("query: kappa") == 9
    (digit_folder.parent / "empty").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="there is no image to search for: give files, or folders that hold some"):
        gallery.search(run_copy, digit_folder.parent / "empty")


@pytest.mark.parametrize("calibrated", [False, True])
def test_what_is_found_is_written_with_its_decisions(calibrated: bool, run_copy: Path, digit_folder: Path) -> None:
    if calibrated:
        targets = ("--target-far=0.05", "--target-ood=0.05", "--target-miss=0.1")
        assert main(["calibrate", str(run_copy), "--quiet", *targets]) == 0
    command = ["search", str(run_copy), str(digit_folder), "-k3", "--quiet"]
    assert main([*command, "-o", str(run_copy / "found.csv")]) == 0
    assert main([*command, "-o", str(run_copy / "found.json")]) == 0
    found = gallery.search(run_copy, digit_folder, k=3)
    with (run_copy / "found.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    written = read_json(run_copy / "found.json")
    assert written["calibration"] == ("current" if calibrated else None)
    assert len(lines) == 3 * len(written["images"]) == 72
    for row, entry in enumerate(written["images"]):
        assert entry["image"] == str(found.images[row])
        assert entry["kappa"] == pytest.approx(float(found.queries.kappa[row]))
        assert [hit["rank"] for hit in entry["hits"]] == [1, 2, 3]
        assert [hit["label"] for hit in entry["hits"]] == [item["label"] for item in found.items[row]]
        decision = found.decisions.decision[row] if calibrated and found.decisions else None
        assert entry["decision"] == decision
        for line, hit in zip(lines[3 * row : 3 * row + 3], entry["hits"], strict=True):
            assert (line["image"], line["decision"], line["label"]) == (entry["image"], decision or "", hit["label"])
            assert float(line["score"]) == pytest.approx(hit["score"])
            assert bool(line["probability"]) == calibrated


def test_what_is_found_is_written_as_csv_or_json_alone(
    run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", str(run_copy), str(digit_folder), "-o", str(run_copy / "found.txt")]) == 1
    assert "what is found can be written as .csv or .json, got" in capsys.readouterr().err
    assert main(["search", str(run_copy), str(digit_folder), "-o", str(run_copy / "no" / "found.csv")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_embeddings_say_which_images_are_flagged(
    run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run_copy / "out.npz"
    command = ["embed", str(run_copy), str(digit_folder), "-o", str(output), "--quiet"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"24 embeddings: {output}\n"
    with np.load(output, allow_pickle=False) as written:
        assert "flagged" not in written
    targets = ("--target-far=0.05", "--target-ood=0.4", "--target-miss=0.1")
    assert main(["calibrate", str(run_copy), "--quiet", "--flag=combined", *targets]) == 0
    capsys.readouterr()
    assert main(command) == 0
    found = gallery.search(run_copy, digit_folder)
    assert found.decisions is not None
    expected = [decision == "abstain" for decision in found.decisions.decision]
    assert 0 < sum(expected) < 24
    assert capsys.readouterr().out == f"24 embeddings, {sum(expected)} flagged: {output}\n"
    with np.load(output, allow_pickle=False) as written:
        assert written["flagged"].tolist() == expected
    assert main(["index", str(run_copy), "--embeddings", str(output), "--quiet"]) == 0
