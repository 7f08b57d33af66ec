"""Images fused one after the other, against fusion at once; errors of fusion; and traces on disk."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lam.gallery import operations
from lam.gallery.item import Item, pack
from lam.gallery.operations import Fuse, fuse
from lam.gallery.refusal import Refusal
from lam.gallery.store import ItemStore
from lam.retrieval.index.fusion import FusedIdentities, fuse_identities
from lam.vmf.embeddings import Embeddings


def images(count: int, dimension: int, seed: int = 0, spread: float = 1.0) -> list[Item]:
    """Images of one identity, with κ over three decades."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.eye(1, dimension) + spread * torch.randn(count, dimension, generator=generator)
    mean = torch.nn.functional.normalize(mean, dim=1)
    kappa = 10 ** (3 * torch.rand(count, generator=generator, dtype=torch.float64))
    rows = enumerate(zip(mean, kappa.tolist(), strict=True))
    return [image(vector.numpy(), value, row) for row, (vector, value) in rows]


def image(vector: np.ndarray, kappa: float, content: int = 0, **fields: object) -> Item:
    packed_vector = vector.astype(np.float32).tobytes()
    return Item("it", packed_vector, kappa, **{"contents": pack([content]), **fields})


def at_once(given: list[Item]) -> FusedIdentities:
    kappa = torch.tensor([item.kappa for item in given], dtype=torch.float64)
    mean = torch.from_numpy(np.stack([item.embedding for item in given]))
    return fuse_identities(Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa)), [0] * len(given))


def assert_same(item: Item, given: list[Item]) -> None:
    expected = at_once(given).embeddings
    torch.testing.assert_close(torch.from_numpy(item.embedding.copy()), expected.mean[0])
    assert item.kappa == pytest.approx(float(expected.kappa), rel=1e-6)
    assert item.resultant == pytest.approx(float(expected.resultant), rel=1e-6)
    assert item.images == len(given)
    assert item.least_kappa == pytest.approx(min(item.kappa, *(one.kappa for one in given)))


@pytest.mark.long
@pytest.mark.parametrize("dimension", [2, 3, 64, 512])
@pytest.mark.parametrize("spread", [0.05, 1.0, 30.0])
def test_one_after_the_other_is_as_all_at_once(dimension: int, spread: float) -> None:
    given = images(20, dimension, spread=spread)
    draw = np.random.default_rng(0)
    for _ in range(5):
        order = [given[row] for row in draw.permutation(len(given))]
        fused = order[0]
        for count, each in enumerate(order[1:], 2):
            fused = fuse(fused, each)
            assert_same(fused, order[:count])
            assert fused.kappa <= max(one.kappa for one in order[:count]) * (1 + 1e-9)


def test_the_same_image_counts_once() -> None:
    first, second, third = images(3, 4)
    fused = fuse(fuse(first, second), third)
    for again in (first, second, third):
        assert fuse(fused, again) is fused
    assert fuse(first, replace(second, contents=first.contents)) is first


def test_an_item_that_is_known_by_its_content_holds_that_image() -> None:
    before = replace(images(1, 4)[0], id="77", contents=b"")  # an item of a run's test split, without contents
    same, other = replace(images(2, 4)[1], contents=pack([77])), images(3, 4)[2]
    assert fuse(before, same) is before
    fused = fuse(before, other)
    assert fused.images == 2
    assert fuse(fused, same) is fused
    replaced = replace(before, contents=pack([5]))  # the id still names the earlier image
    assert fuse(replaced, same).images == 2


def test_images_that_cancel_are_as_unsure_as_can_be_and_can_go_on() -> None:
    up, down, right = (image(np.array(vector), 5.0, number) for number, vector in enumerate(([0, 1], [0, -1], [1, 0])))
    cancelled = fuse(up, down)
    assert (cancelled.kappa, cancelled.resultant, cancelled.embedding.tolist()) == (0, 0, [0, 1])
    assert_same(cancelled, [up, down])
    assert_same(fuse(cancelled, right), [up, down, right])


def test_what_is_of_the_item_stays() -> None:
    first, second, third = images(3, 4)
    first = replace(first, label="vase", metadata='{"shelf": 3}', origin="index")
    fused = fuse(first, replace(second, label="vase", thumbnail=b"picture"))
    assert (fused.id, fused.label, fused.metadata, fused.thumbnail) == ("it", "vase", '{"shelf": 3}', b"picture")
    assert fused.origin == "service"  # so that a new index does not replace it
    assert fuse(fused, replace(third, metadata=first.metadata, thumbnail=b"other")).thumbnail == b"picture"


@pytest.mark.parametrize(
    ("known", "given", "match"),
    [
        ({"label": "vase"}, {"label": "plate"}, "has 'vase', this image 'plate'"),
        ({}, {"label": "plate"}, "has '', this image 'plate'"),
        ({"metadata": '{"a": 1}'}, {"metadata": '{"a": 2}'}, "other metadata"),
        ({"images": 10_000, "resultant": 0.9}, {}, "10000 images"),
    ],
)
def test_what_cannot_be_fused_is_refused(known: dict[str, object], given: dict[str, object], match: str) -> None:
    first, second = images(2, 4)
    with pytest.raises(Refusal, match=match) as refused:
        fuse(replace(first, **known), replace(second, **given))
    assert refused.value.status == 409
    assert refused.value.allowed


def test_what_is_fused_is_durable_counted_and_checked(tmp_path: Path) -> None:
    given, path = images(6, 16), tmp_path / "items.sqlite"
    store = ItemStore(path)
    other = replace(given[1], label="other")
    first, refusal, second, kept = store.write([Fuse(given[0]), Fuse(other), Fuse(given[1]), Fuse(given[0])])
    assert isinstance(refusal, Refusal)
    assert "one label" in str(refusal)
    assert (first.created, second.created, second.removed) == (True, False, (first.key,))
    assert (kept.key, kept.removed, kept.item) == (second.key, (), second.item)
    store.write([Fuse(given[2]), Fuse(given[3])])
    store.close()
    store = ItemStore(path)
    assert store.check() == []
    assert len(store) == 1
    store.write([Fuse(given[4]), "it", Fuse(given[5])])  # a deletion in between begins anew
    assert store.get("it") == given[5]
    store.write([Fuse(given[0])])
    assert_same(store.get("it") or given[0], [given[5], given[0]])
    assert store.check() == []
    store.close()


def test_deleting_erases_every_image_of_an_item(tmp_path: Path) -> None:
    given = images(4, 16)
    store = ItemStore(tmp_path / "items.sqlite")
    traces, known = set(), None
    for each in given:
        (change,) = store.write([Fuse(each)])
        known = change.item
        assert known is not None
        traces |= {each.vector, known.vector, (known.sums or b"x" * 99)[16:], each.contents + b"\0"}
    traces = {trace for trace in traces if len(trace) > 16} | {known.contents}
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert known.contents in written
    assert (known.sums or b"")[16:] in written
    store.write(["it"])
    assert store.erase_log() == ""
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not [trace for trace in traces if trace in written]
    store.close()


def test_the_limit_is_of_images_not_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_IMAGES", 2)
    first, second, third = images(3, 4)
    fused = fuse(first, second)
    assert fuse(fused, second) is fused
    with pytest.raises(Refusal, match="has 2 images"):
        fuse(fused, third)


def test_metadata_without_content_is_none_given() -> None:
    first, second = images(2, 4)
    known = replace(first, metadata=json.dumps({"a": 1}))
    assert fuse(known, replace(second, metadata=json.dumps({}))).metadata == known.metadata
