"""Items that `lam index` puts into a gallery, beside items that a service adds, changes and deletes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lam.gallery.embed import preprocessing_of
from lam.gallery.item import Item, file_id, pack
from lam.gallery.local_index import LocalIndex
from lam.gallery.operations import Change, Fuse
from lam.gallery.refusal import Refusal, full
from lam.gallery.store import ItemStore
from lam.inputs import Preprocessing
from lam.retrieval.index.fusion import fuse_identities
from lam.runs.finished import Run
from lam.runs.index import index_images
from lam.vmf.embeddings import Embeddings
from tests.gallery.test_gallery import everything, opened
from tests.helpers import stored


def index_list(run: Path, *lines: str, fuse: bool = False) -> None:
    listed = run.parent / "list.csv"
    listed.write_text("\n".join(("id,path,label,city", *lines)) + "\n", encoding="utf-8")
    index_images(run, listed, fuse=fuse, progress=False)


def digits(folder: Path) -> list[Path]:
    return [folder / "0" / f"{number}.png" for number in range(8)]


def embedded(run: Path, *paths: Path) -> Embeddings:
    encoder = Run(run).encoder
    return encoder.embed(torch.stack([preprocessing_of(encoder, Preprocessing)(path) for path in paths]))


def added(name: str) -> Item:
    return Item(name, np.array([1, 0, 0], np.float32).tobytes(), 9.0, "mine")


def test_items_of_a_list_have_its_ids_and_metadata(run_copy: Path, digit_folder: Path) -> None:
    first, second, third, *_ = digits(digit_folder)
    index_list(run_copy, f"vase-17,{first},vase,Kyoto", f"7,{second},,", f",{third},plate,Lima")
    with opened(run_copy) as gallery:
        found = {item.id: item for item in stored(gallery)}
    assert found.keys() == {"vase-17", "7", str(file_id(third))}
    vase = found["vase-17"]
    assert (vase.label, json.loads(vase.metadata), vase.origin) == ("vase", {"city": "Kyoto"}, "index")
    assert vase.kappa == pytest.approx(float(embedded(run_copy, first).kappa[0]), rel=1e-4)
    assert vase.thumbnail is not None
    assert (vase.images, vase.contents, vase.paths) == (1, pack([file_id(first)]), json.dumps([str(first)]))
    assert found["7"].metadata == "{}"
    assert json.loads(found[str(file_id(third))].metadata) == {"city": "Lima"}


def test_what_was_fused_comes_with_its_images(run_copy: Path, digit_folder: Path) -> None:
    paths = digits(digit_folder)[:3]
    index_list(run_copy, *(f"a,{path},," for path in paths), f"b,{digits(digit_folder)[4]},,", fuse=True)
    alone = embedded(run_copy, *paths)
    fused = fuse_identities(alone, [0, 0, 0]).embeddings
    with opened(run_copy) as gallery:
        item = gallery.store.get("a")
        hits, described = gallery.search(fused, 1)
    assert item is not None
    assert item.images == 3
    assert item.contents == pack(map(file_id, paths))
    assert item.resultant == pytest.approx(float(fused.resultant[0]))
    assert item.least_image_kappa == pytest.approx(float(alone.kappa.min()), rel=1e-4)
    assert item.sums is not None
    mass, roots, *product = np.frombuffer(item.sums)
    kappa = alone.kappa.double()
    assert (mass, roots) == pytest.approx((float(kappa.sum()), float(kappa.sqrt().sum())), rel=1e-4)
    expected = (kappa[:, None] * alone.mean.double()).sum(0).tolist()
    assert product == pytest.approx(expected, rel=1e-4, abs=1e-4 * mass)
    (key,) = hits.ids[0].tolist()
    what = described[key]
    assert (what.id, what.images, what.least_kappa) == ("a", 3, item.least_kappa)
    assert what.resultant == item.resultant


def test_fusing_goes_on_from_what_the_index_fused(run_copy: Path, digit_folder: Path) -> None:
    paths = digits(digit_folder)[:4]
    index_list(run_copy, *(f"a,{path},," for path in paths[:3]), fuse=True)
    alone = embedded(run_copy, *paths)
    expected = fuse_identities(alone, [0] * 4).embeddings
    vector = alone.mean[3].numpy().tobytes()
    new = Item("a", vector, float(alone.kappa[3]), contents=pack([file_id(paths[3])]))
    again = Item("a", vector, 9.0, contents=pack([file_id(paths[1])]))
    with opened(run_copy) as gallery:
        gallery.write([Fuse(new), Fuse(again)])
        item = gallery.store.get("a")
        hits, _ = gallery.search(expected, 1)
    assert item is not None
    assert (item.images, item.origin) == (4, "service")
    assert item.kappa == pytest.approx(float(expected.kappa[0]), rel=1e-4)
    torch.testing.assert_close(torch.from_numpy(item.embedding.copy()), expected.mean[0], atol=1e-5, rtol=0)
    assert float(hits.scores[0, 0]) == pytest.approx(1)
    assert float(hits.kappa[0, 0]) == pytest.approx(item.kappa)
    with opened(run_copy) as gallery:
        assert gallery.store.get("a") == item
        gallery.write(["a"])
    assert len(Run(run_copy).gallery) == 0


def test_deleting_by_the_id_of_a_list_erases_the_item_everywhere(run_copy: Path, digit_folder: Path) -> None:
    first, second, *_ = digits(digit_folder)
    index_list(run_copy, f"vase-17,{first},vase,Kyoto", f"b,{second},,")
    vector = Run(run_copy).gallery.items[0].vector
    assert vector in everything(run_copy / "gallery")
    with opened(run_copy) as gallery:
        (change,) = gallery.write(["vase-17"])
        assert isinstance(change, Change)
        assert change.removed
        assert not [trace for trace in (b"vase-17", b"Kyoto", vector) if trace in everything(run_copy)]
    assert [item.id for item in Run(run_copy).gallery.items] == ["b"]
    with opened(run_copy) as gallery:
        assert [item.id for item in gallery.store.page(after="", limit=10).values()] == ["b"]


def test_an_item_that_was_changed_while_serving_can_be_deleted(run_copy: Path, digit_folder: Path) -> None:
    index_list(run_copy, f"a,{digits(digit_folder)[0]},,", f"b,{digits(digit_folder)[1]},,")
    with opened(run_copy) as gallery:
        gallery.write([added("a")])
        gallery.write(["a"])
    assert [item.id for item in Run(run_copy).gallery.items] == ["b"]


def test_a_new_list_replaces_the_items_of_the_old(run_copy: Path, digit_folder: Path) -> None:
    first, second, third, *_ = digits(digit_folder)
    index_list(run_copy, f"a,{first},old,", f"b,{second},old,", f"c,{third},old,")
    with opened(run_copy) as gallery:
        gallery.write([added("c"), added("mine")])
    index_list(run_copy, f"a,{second},new,", f"c,{third},new,", f"d,{first},new,")
    with opened(run_copy) as gallery:
        labels = {item.id: item.label for item in gallery.store.page(after="", limit=10).values()}
    assert labels == {"a": "new", "c": "mine", "d": "new", "mine": "mine"}


def test_the_same_items_again_keep_their_keys(run_copy: Path, digit_folder: Path) -> None:
    lines = [f"{number},{path},," for number, path in enumerate(digits(digit_folder))]
    index_list(run_copy, *lines)
    before = Run(run_copy).gallery
    index_list(run_copy, *lines[:-1], f"new,{digits(digit_folder)[0]},,")  # in other rows, κ could round otherwise
    after = Run(run_copy).gallery
    assert after.keys[:-1] == before.keys[:-1]
    assert after.keys[-1] > before.keys[-1]
    assert after.items[:-1] == before.items[:-1]


STEPS = {
    "before it is stored": (ItemStore, "write"),
    "before the index follows": (LocalIndex, "apply"),
    "before the log is erased": (ItemStore, "erase_log"),
}


@pytest.mark.parametrize("factory", ["Flat", "HNSW8"])
@pytest.mark.parametrize("step", STEPS)
def test_a_deletion_that_is_killed_is_whole_or_not_at_all(
    run_copy: Path, digit_folder: Path, tmp_path: Path, step: str, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the deletion is stored, the next start finishes it; otherwise, it has no effect."""
    index_images(run_copy, digit_folder, factory=factory, progress=False)
    gone, killed = Run(run_copy).gallery.items[7], tmp_path / "killed"

    def kill(*_: object) -> None:
        shutil.copytree(run_copy, killed)
        raise KeyboardInterrupt

    with opened(run_copy) as gallery, monkeypatch.context() as patched:
        patched.setattr(*STEPS[step], kill)
        with pytest.raises(KeyboardInterrupt):
            gallery.write([gone.id])
    left = 24 if step == "before it is stored" else 23
    for _ in range(2):
        with opened(killed) as gallery:
            assert (gallery.store.get(gone.id) is None, len(gallery)) == (left == 23, left)
            assert (gone.vector in everything(killed)) == (left == 24)
    assert len(Run(killed).gallery) == left


def raising(error: BaseException) -> Callable[..., object]:
    return lambda *_, **__: (_ for _ in ()).throw(error)


def test_a_deletion_that_cannot_be_stored_says_so(run_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(run_copy) as gallery:
        with monkeypatch.context() as patched:
            patched.setattr(ItemStore, "write", raising(full("no room")))
            with pytest.raises(Refusal, match="nothing was changed"):
                gallery.write(["7", added("new")])
        assert (gallery.store.get("7") is None, gallery.store.get("new")) == (False, None)
        assert not isinstance(gallery.write(["7"])[0], Refusal)


@pytest.mark.parametrize("left", ["log", "cache"])
def test_what_is_left_of_a_deletion_is_told_to_deletions_alone(
    run_copy: Path, digit_folder: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_images(run_copy, digit_folder, factory="HNSW8", progress=False)
    gone = Run(run_copy).gallery.items[7]
    with opened(run_copy) as gallery:
        with monkeypatch.context() as patched:
            if left == "log":
                patched.setattr(ItemStore, "erase_log", lambda _: "a reader of the database keeps its log")
            else:
                patched.setattr(shutil, "rmtree", lambda *_, **__: None)
            for _ in range(2):
                change, refused = gallery.write([added("new"), gone.id])
                assert isinstance(change, Change)
                assert isinstance(refused, Refusal)
                assert (refused.status, refused.headers) == (503, {"Retry-After": "1"})
                said = {"log": "keeps its log", "cache": "cache of the"}
                assert said[left] in refused.error
        assert gallery.store.get(gone.id) is None
        assert gallery.write([gone.id]) == [Change()]
        assert gone.vector not in everything(run_copy)
