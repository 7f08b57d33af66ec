"""What `lam index` wrote is known to the service by the ids of its list, with all that is known of it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import lam.runs.index
from lam.gallery.enrolment import content_id, named_id
from lam.gallery.item import Images, Item, packed
from lam.gallery.refusal import Refusal, full
from lam.gallery.store import FILE, Change, Fuse, ItemStore
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.fusion import fuse_identities
from lam.runs.index import index_folder, index_images, open_run, preprocessing_of, read_items, remove_items
from lam.service.gallery import FOLDER, Gallery
from lam.service.takeover import BY_NUMBER, FACT
from lam.utils.files import locked, sha256_of, write_generation, write_json

D = 3


@contextmanager
def opened(run: Path) -> Iterator[Gallery]:
    gallery = Gallery(run, D)
    try:
        yield gallery
    finally:
        gallery.close()


def index_list(run: Path, *lines: str, fuse: bool = False) -> None:
    listed = run.parent / "list.csv"
    listed.write_text("\n".join(("id,path,label,city", *lines)) + "\n", encoding="utf-8")
    index_images(run, listed=listed, fuse=fuse, progress=False)


def digits(folder: Path) -> list[Path]:
    return [folder / "0" / f"{number}.png" for number in range(8)]


def added(name: str) -> Item:
    return Item(name, np.array([1, 0, 0], np.float32).tobytes(), 9.0, "mine")


def rewritten(run: Path, change: dict[str, dict[str, object]]) -> None:
    """Let the run's items say otherwise, as an earlier version or another program would have written them."""
    (path,) = run.glob("items/*/items.json")
    items = json.loads(path.read_text(encoding="utf-8"))
    items = {number: {**item, **change.get(number, {})} for number, item in items.items()}
    write_generation(run / "items", lambda generation: write_json(generation / "items.json", items))


def taken_over_by_number(run: Path) -> None:
    """Make a store as it was while items were taken over under their numbers."""
    saved = Index.load(run / "index")
    with opened(run):
        pass
    store = ItemStore(run / FOLDER / FILE)
    names = store.ids_of_origin("index")
    numbered = [
        Item(str(number), vector.tobytes(), 9.0, "old", "{}", None, "index")
        for number, vector in zip(saved.ids.tolist(), saved._store.column("vectors"), strict=True)
    ]
    store.write([*names, *numbered], facts={BY_NUMBER: sha256_of(run / "index" / "MANIFEST.json")})
    store._writer.execute("DELETE FROM facts WHERE name = ?", (FACT,))
    store.close()


def test_items_of_a_list_have_its_ids_and_metadata(run_copy: Path, digit_folder: Path) -> None:
    first, second, third, *_ = digits(digit_folder)
    index_list(run_copy, f"vase-17,{first},vase,Kyoto", f"7,{second},,", f",{third},plate,Lima")
    saved = Index.load(run_copy / "index")
    with opened(run_copy) as gallery:
        found = {item.id: item for item in gallery.page(after="", limit=10)}
    assert found.keys() == {"vase-17", "7", str(content_id(third))}
    vase = found["vase-17"]
    assert (vase.label, json.loads(vase.metadata), vase.origin) == ("vase", {"city": "Kyoto"}, "index")
    assert vase.kappa == float(saved.kappa_of([named_id("vase-17")])[0])
    assert vase.thumbnail is not None
    assert vase.images == Images(contents=packed([content_id(first)]))
    assert found["7"].metadata == "{}"
    assert json.loads(found[str(content_id(third))].metadata) == {"city": "Lima"}


def test_what_was_fused_comes_with_its_images(run_copy: Path, digit_folder: Path) -> None:
    paths = digits(digit_folder)[:3]
    index_list(run_copy, *(f"a,{path},," for path in paths), f"b,{digits(digit_folder)[4]},,", fuse=True)
    encoder = open_run(run_copy)
    alone = encoder.embed(torch.stack([preprocessing_of(encoder)(path) for path in paths]))
    fused = fuse_identities(alone, [0, 0, 0]).embeddings
    with opened(run_copy) as gallery:
        item = gallery.get("a")
        hits, described = gallery.search(fused, 1)
    assert item is not None
    assert item.images.count == 3
    assert item.images.contents == packed(map(content_id, paths))
    assert item.images.resultant == pytest.approx(float(fused.resultant[0]))
    assert item.images.least_kappa == pytest.approx(float(alone.kappa.min()), rel=1e-4)
    assert item.images.sums is not None
    mass, roots, *product = np.frombuffer(item.images.sums)
    kappa = alone.kappa.double()
    assert (mass, roots) == pytest.approx((float(kappa.sum()), float(kappa.sqrt().sum())), rel=1e-4)
    expected = (kappa[:, None] * alone.mean.double()).sum(0).tolist()
    assert product == pytest.approx(expected, rel=1e-4, abs=1e-4 * mass)
    (key,) = hits.ids[0].tolist()
    what = described[key]
    assert (what.id, what.images, what.least_kappa) == ("a", 3, item.least_kappa)
    assert what.resultant == item.images.resultant


def test_fusing_goes_on_from_what_the_index_fused(run_copy: Path, digit_folder: Path) -> None:
    paths = digits(digit_folder)[:4]
    index_list(run_copy, *(f"a,{path},," for path in paths[:3]), fuse=True)
    encoder = open_run(run_copy)
    alone = encoder.embed(torch.stack([preprocessing_of(encoder)(path) for path in paths]))
    expected = fuse_identities(alone, [0] * 4).embeddings
    vector = alone.mean[3].numpy().tobytes()
    new = Item("a", vector, float(alone.kappa[3]), images=Images(contents=packed([content_id(paths[3])])))
    again = Item("a", vector, 9.0, images=Images(contents=packed([content_id(paths[1])])))
    with opened(run_copy) as gallery:
        gallery.write([Fuse(new), Fuse(again)])
        item = gallery.get("a")
        hits, _ = gallery.search(expected, 1)
    assert item is not None
    assert (item.images.count, item.origin) == (4, "service")
    assert item.kappa == pytest.approx(float(expected.kappa[0]), rel=1e-4)
    torch.testing.assert_close(torch.from_numpy(item.embedding.copy()), expected.mean[0], atol=1e-5, rtol=0)
    assert float(hits.scores[0, 0]) == pytest.approx(1)
    assert float(hits.kappa[0, 0]) == pytest.approx(item.kappa)
    with opened(run_copy) as gallery:
        assert gallery.get("a") == item
        gallery.write(["a"])
    assert len(Index.load(run_copy / "index")) == 0


def test_what_an_earlier_index_did_not_keep_is_not_made_up(run_copy: Path, digit_folder: Path) -> None:
    index_list(run_copy, *(f"a,{path},," for path in digits(digit_folder)[:3]), fuse=True)
    rewritten(run_copy, {str(named_id("a")): {"contents": [], "poor": 1.5, "fused": {"images": 3, "resultant": 0.5}}})
    with opened(run_copy) as gallery:
        item = gallery.get("a")
    assert item is not None
    assert item.images == Images(3, 0.5, 1.5)
    assert item.least_kappa == min(1.5, item.kappa)


def test_deleting_by_the_id_of_a_list_erases_the_item_everywhere(run_copy: Path, digit_folder: Path) -> None:
    first, second, *_ = digits(digit_folder)
    index_list(run_copy, f"vase-17,{first},vase,Kyoto", f"b,{second},,")
    vector = Index.load(run_copy / "index")._store.column("vectors")[0].tobytes()
    with opened(run_copy) as gallery:
        (change,) = gallery.write(["vase-17"])
        assert isinstance(change, Change)
        assert change.removed
        for path in run_copy.rglob("*"):
            assert not path.is_file() or not {b"vase-17", b"Kyoto", vector} & _found(path, b"vase-17", b"Kyoto", vector)
    assert Index.load(run_copy / "index").ids.tolist() == [named_id("b")]
    with opened(run_copy) as gallery:
        assert [item.id for item in gallery.page(after="", limit=10)] == ["b"]


def _found(path: Path, *traces: bytes) -> set[bytes]:
    content = path.read_bytes()
    return {trace for trace in traces if trace in content}


def test_an_item_under_the_number_of_another_takes_nothing_with_it(run_copy: Path, digit_folder: Path) -> None:
    index_list(run_copy, f"vase-17,{digits(digit_folder)[0]},vase,Kyoto")
    number = str(named_id("vase-17"))
    with opened(run_copy) as gallery:
        gallery.write([added(number), added("vase-18")])
        gallery.write([number, "vase-18", "nobody", "007"])
        assert gallery.get("vase-17") is not None
    assert Index.load(run_copy / "index").ids.tolist() == [int(number)]
    assert read_items(run_copy, [int(number)])[0]["id"] == "vase-17"
    with opened(run_copy) as gallery:
        assert len(gallery) == 1


def test_an_item_that_was_changed_while_serving_is_erased_from_the_index_too(
    run_copy: Path, digit_folder: Path
) -> None:
    index_list(run_copy, f"a,{digits(digit_folder)[0]},,", f"b,{digits(digit_folder)[1]},,")
    with opened(run_copy) as gallery:
        gallery.write([added("a")])
        gallery.write(["a"])
    assert Index.load(run_copy / "index").ids.tolist() == [named_id("b")]


def test_a_new_list_replaces_the_items_of_the_old(run_copy: Path, digit_folder: Path) -> None:
    first, second, third, *_ = digits(digit_folder)
    index_list(run_copy, f"a,{first},old,", f"b,{second},old,", f"c,{third},old,")
    with opened(run_copy) as gallery:
        gallery.write([added("c"), added("mine")])
    index_list(run_copy, f"a,{second},new,", f"c,{third},new,", f"d,{first},new,")
    with opened(run_copy) as gallery:
        labels = {item.id: item.label for item in gallery.page(after="", limit=10)}
    assert labels == {"a": "new", "c": "mine", "d": "new", "mine": "mine"}


def test_an_index_that_was_made_anew_meanwhile_is_still_taken_over(run_copy: Path, digit_folder: Path) -> None:
    first, second, *_ = digits(digit_folder)
    index_list(run_copy, f"a,{first},old,", f"b,{second},old,")
    with opened(run_copy) as gallery:
        index_list(run_copy, f"a,{first},new,", f"b,{second},new,")
        gallery.write(["a"])
    assert Index.load(run_copy / "index").ids.tolist() == [named_id("b")]
    with opened(run_copy) as gallery:
        assert [(item.id, item.label) for item in gallery.page(after="", limit=10)] == [("b", "new")]


def test_what_the_index_holds_is_erased_once_nobody_writes_to_it(run_copy: Path) -> None:
    """Meanwhile items are put, and what the index does not hold is deleted, as ever, also in the same batch."""
    with opened(run_copy) as gallery:
        gallery.write([added("mine"), added("yours")])
        with locked(run_copy):
            gallery.write(["mine"])
            for operations in (["7", added("new"), "yours"], ["7"]):
                refused, *changes = gallery.write(operations)
                assert isinstance(refused, Refusal)
                assert (refused.kind, refused.after) == ("busy", 1)
                assert "is deleted and is not found again, but the run's index may still hold it" in refused.error
                assert not [change for change in changes if isinstance(change, Refusal)]
        assert gallery.get("new") is not None
        assert [gallery.get(name) for name in ("mine", "yours", "7")] == [None] * 3
        assert gallery.write(["7"]) == [Change()]
    assert 7 not in Index.load(run_copy / "index").ids


def test_the_next_start_erases_what_was_left_in_the_index(run_copy: Path) -> None:
    with opened(run_copy) as gallery, locked(run_copy):
        assert isinstance(gallery.write(["7"])[0], Refusal)
    with locked(run_copy), opened(run_copy) as gallery:
        assert gallery.get("7") is None
    assert 7 in Index.load(run_copy / "index").ids
    with opened(run_copy) as gallery:
        assert (gallery.get("7"), len(gallery)) == (None, 59)
    assert 7 not in Index.load(run_copy / "index").ids


def test_what_was_left_in_the_index_does_not_come_back_with_a_new_one(run_copy: Path, digit_folder: Path) -> None:
    first, second, *_ = digits(digit_folder)
    index_list(run_copy, f"a,{first},,", f"b,{second},,")
    with opened(run_copy) as gallery, locked(run_copy):
        assert isinstance(gallery.write(["a"])[0], Refusal)
    index_list(run_copy, f"a,{second},,", f"c,{first},,")
    with locked(run_copy), opened(run_copy) as gallery:
        assert [item.id for item in gallery.page(after="", limit=10)] == ["c"]
    with opened(run_copy) as gallery:
        assert [item.id for item in gallery.page(after="", limit=10)] == ["c"]


STEPS = {
    "before it is stored": (ItemStore, "write", 0),
    "before the index is read": (lam.runs.index, "_read_all", 1),
    "before the index is written": (Index, "save", 0),
    "before its old files are deleted": (shutil, "rmtree", 1),
    "before what its items are is written": (lam.runs.index, "_write_items", 0),
    "before their old file is deleted": (shutil, "rmtree", 2),
    "before the store knows": (ItemStore, "write", 1),
    "before the log is erased": (ItemStore, "erase_log", 0),
}


def interrupt(patched: pytest.MonkeyPatch, step: str, action: Callable[[], object]) -> None:
    """Do something in place of one call, after so many that are let through."""
    where, name, passing = STEPS[step]
    call, calls = getattr(where, name), count()
    patched.setattr(where, name, lambda *a, **k: action() if next(calls) == passing else call(*a, **k))


def raising(error: BaseException) -> Callable[[], object]:
    return lambda: (_ for _ in ()).throw(error)


@pytest.mark.parametrize("step", STEPS)
def test_a_deletion_that_is_killed_is_whole_or_not_at_all(
    run_copy: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is stored the next start finishes it; without that it has not been."""
    vector, killed = vector_of(run_copy, 7), tmp_path / "killed"

    def kill() -> None:
        shutil.copytree(run_copy, killed)
        raise KeyboardInterrupt

    with opened(run_copy) as gallery, monkeypatch.context() as patched:
        interrupt(patched, step, kill)
        with pytest.raises(KeyboardInterrupt):
            gallery.write(["7"])
    left = 60 if step == "before it is stored" else 59
    for _ in range(2):
        with opened(killed) as gallery:
            assert (gallery.get("7") is None, len(gallery)) == (left == 59, left)
            assert (vector in everything(killed)) == (left == 60)
    assert len(Index.load(killed / "index")) == left


@pytest.mark.parametrize("step", list(STEPS)[:-1])
def test_a_deletion_that_fails_says_what_is_so(run_copy: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 507 where nothing was changed, and 503 for as long as something is left to erase."""
    vector, before = vector_of(run_copy, 7), sha256_of(run_copy / "index" / "MANIFEST.json")
    with opened(run_copy) as gallery:
        with monkeypatch.context() as patched:
            interrupt(patched, step, raising(full("no room") if "store" in step else OSError("no room")))
            if step == "before it is stored":
                with pytest.raises(Refusal, match="nothing was changed"):
                    gallery.write(["7", added("new")])
                assert sha256_of(run_copy / "index" / "MANIFEST.json") == before
            else:
                refused, change = gallery.write(["7", added("new")])
                assert isinstance(refused, Refusal)
                assert isinstance(change, Change)
                assert (refused.kind, change.created) == ("busy", True)
        stored = step != "before it is stored"
        assert (gallery.get("7") is None, gallery.get("new") is not None) == (stored, stored)
    with opened(run_copy) as gallery:
        assert (gallery.get("7") is None, len(gallery)) == (stored, 60)
        assert not isinstance(gallery.write(["7"])[0], Refusal)
        assert vector not in everything(run_copy)


def test_a_log_that_a_reader_keeps_is_told_to_deletions_alone(run_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(run_copy) as gallery:
        with monkeypatch.context() as patched:
            patched.setattr(ItemStore, "erase_log", lambda _: False)
            change, refused = gallery.write([added("new"), "7"])
        assert isinstance(change, Change)
        assert isinstance(refused, Refusal)
        assert (refused.kind, change.created) == ("busy", True)
        assert "a reader of the database keeps its log, which still holds it" in refused.error


def vector_of(run: Path, number: int) -> bytes:
    index = Index.load(run / "index")
    return index._store.column("vectors")[index.ids.numpy() == number].tobytes()


def everything(run: Path) -> bytes:
    return b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


def test_a_store_that_knows_items_by_number_goes_on_with_them(run_copy: Path, digit_folder: Path) -> None:
    first, second, third, *_ = digits(digit_folder)
    index_list(run_copy, f"vase,{first},,", f"plate,{second},,", f"5,{third},,")
    taken_over_by_number(run_copy)
    vase, plate = str(named_id("vase")), str(named_id("plate"))
    for left in ({vase, plate, "5"}, {plate, "5"}):
        with opened(run_copy) as gallery:
            assert {item.id for item in gallery.page(after="", limit=10)} == left
            gallery.write([vase])
            gallery.write(["vase"])  # which this store does not know
    assert set(Index.load(run_copy / "index").ids.tolist()) == {int(plate), 5}
    index_list(run_copy, f"vase,{first},,", f"plate,{second},,")
    with opened(run_copy) as gallery:
        assert {item.id for item in gallery.page(after="", limit=10)} == {"vase", "plate"}
        gallery.write(["vase"])
    assert Index.load(run_copy / "index").ids.tolist() == [named_id("plate")]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"id": "shelf/3"}, r"0.png cannot be served under id 'shelf/3': the id is not one .* 1 to 128 letters"),
        ({"label": "x" * 1025}, "cannot be served under id 'a': the label has 1025 characters; .* at most 1024"),
        ({"metadata": {"text": "x" * 20_000}}, "metadata has 20012 characters; .*change it in the list and run `lam"),
    ],
)
def test_what_cannot_be_served_stops_the_start(
    run_copy: Path, digit_folder: Path, wrong: dict[str, object], match: str
) -> None:
    index_list(run_copy, f"a,{digits(digit_folder)[0]},,")
    rewritten(run_copy, {str(named_id("a")): wrong})
    with pytest.raises(ValueError, match=match):
        Gallery(run_copy, D)


def test_the_index_is_not_touched_where_it_cannot_be_said_what_it_holds(run_copy: Path, digit_folder: Path) -> None:
    index_folder(run_copy, digit_folder, progress=False)
    kept = Index.load(run_copy / "index").ids.tolist()
    shutil.rmtree(run_copy / "items")
    with pytest.raises(ValueError, match=r"items/MANIFEST.json is missing"):
        remove_items(run_copy, [str(kept[0])])
    assert Index.load(run_copy / "index").ids.tolist() == kept
