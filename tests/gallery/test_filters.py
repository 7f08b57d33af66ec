"""Filters on items: clauses and conditions of Qdrant's documentation, a slow twin in Python, and limits."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lam.gallery.filters import MAX_CONDITIONS, MAX_FILTER, MAX_LEVELS, MAX_VALUES, Filter
from lam.gallery.gallery import Gallery
from lam.gallery.item import Item, metadata_json
from lam.gallery.operations import Change, DeleteWhere
from lam.gallery.refusal import Refusal
from lam.gallery.store import ItemStore
from lam.vmf.embeddings import Embeddings

CITIES = [
    {"city": "London", "color": "green"},
    {"city": "London", "color": "red"},
    {"city": "London", "color": "blue"},
    {"city": "Berlin", "color": "red"},
    {"city": "Moscow", "color": "green"},
    {"city": "Moscow", "color": "blue"},
]
VARIED: list[dict[str, Any]] = [
    {"n": 1, "tags": ["a", "b"], "o": {"x": {"y": 2}}, "t": True, "é😀": "ü"},
    {"n": 2.5, "city": None, "t": False, "o.x": {"y": 2}, "o.x.y": 2},
    {"o.x": [2, "a"]},
    {"n": [5, 6], "city": ["Berlin"], "tags": []},
    {"n": "1", "o": "text", "t": 1, 'a"b': "'; --"},
    {"n": -(2**40), "o": {"x": [1, 2]}, "tags": ["b", 3, None]},
]
DATED: list[dict[str, Any]] = [
    {"on": "2026-02-28"},
    {"on": "2026-03-01T12:00:00Z"},
    {"on": ["1999-12-31", "2026-11-30"]},
    {"on": "yesterday"},
    {"on": 2026},
    {"on": "12.50"},
    {},
]


def key(field: str, **test: Any) -> dict[str, Any]:
    return {"key": field, **test}


def value(field: str, wanted: Any) -> dict[str, Any]:
    return key(field, match={"value": wanted})


def items_of(rows: list[dict[str, Any]]) -> list[Item]:
    vectors = torch.nn.functional.normalize(torch.randn(len(rows), 4, generator=torch.Generator().manual_seed(0)))
    return [
        Item(f"id{n}", vectors[n].numpy().tobytes(), 9.0, f"label{n % 2}", metadata_json(row))
        for n, row in enumerate(rows)
    ]


def passing(rows: list[dict[str, Any]], filter: dict[str, Any], tmp_path: Path) -> list[int]:
    """The numbers of the items that pass a filter."""
    store = ItemStore(tmp_path / "items.sqlite")
    try:
        if not len(store):
            store.write(items_of(rows))
        keys, _ = store.where(Filter.parse(json.dumps(filter)))
        return [int(store.items_of([number])[number].id[2:]) for number, _ in keys]
    finally:
        store.close()


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"must": []}, [0, 1, 2, 3, 4, 5]),
        ({"must": [value("city", "London"), value("color", "red")]}, [1]),
        ({"should": [value("city", "London"), value("color", "red")]}, [0, 1, 2, 3]),
        ({"must_not": [value("city", "London"), value("color", "red")]}, [4, 5]),
        ({"must": [value("city", "London")], "must_not": [value("color", "red")]}, [0, 2]),
        ({"must_not": [{"must": [value("city", "London"), value("color", "red")]}]}, [0, 2, 3, 4, 5]),
        ({"must": value("city", "Moscow")}, [4, 5]),
        ({"must": [key("color", match={"any": ["green", "blue"]})]}, [0, 2, 4, 5]),
        ({"must": [key("color", match={"except": ["green", "blue"]})]}, [1, 3]),
        ({"must": [{"has_id": ["id1", "id3", "id9"]}]}, [1, 3]),
        ({"must": [{"has_label": ["label1"]}], "should": [value("city", "Moscow")]}, [5]),
    ],
)
def test_clauses(filter: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    assert passing(CITIES, filter, tmp_path) == expected


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (value("n", 1), [0]),
        (value("n", "1"), [4]),
        (value("t", True), [0]),
        (value("t", 1), [4]),
        (value("tags", "b"), [0, 5]),
        (value("o.x.y", 2), [0, 1]),
        (value("o.x", 2), [2, 5]),
        (key("o.x", range={"gt": 1}), [2, 5]),
        ({"is_empty": {"key": "o.x"}}, [3, 4]),
        (value("o", "text"), [4]),
        (value("é😀", "ü"), [0]),
        (value('a"b', "'; --"), [4]),
        (value("missing", 1), []),
        (key("n", range={"gte": 1, "lt": 6}), [0, 1, 3]),
        (key("n", range={"gt": 1}), [1, 3]),
        (key("n", range={"lte": -1e9}), [5]),
        (key("n", match={"any": [1, 6, "1"]}), [0, 3, 4]),
        (key("n", match={"except": [1, 5]}), [1, 3, 4, 5]),
        ({"is_empty": {"key": "city"}}, [0, 1, 2, 4, 5]),
        ({"is_empty": {"key": "tags"}}, [1, 2, 3, 4]),
        ({"is_null": {"key": "city"}}, [1]),
    ],
)
def test_conditions_respect_types_lists_and_nested_names(
    condition: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    assert passing(VARIED, {"must": [condition]}, tmp_path) == expected
    others = [row for row in range(len(VARIED)) if row not in expected]
    assert passing(VARIED, {"must_not": [condition]}, tmp_path) == others


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"gte": "2026-03-01"}, [1, 2]),
        ({"lte": "2026-03-01"}, [0, 1, 2]),
        ({"gt": "2026-03-01"}, [2]),
        ({"gt": "2000-01-01", "lt": "2026-03-01"}, [0]),
        ({"gte": 2000}, [4]),
    ],
)
def test_a_range_of_dates_holds_whole_days(bounds: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    assert passing(DATED, {"must": [key("on", range=bounds)]}, tmp_path) == expected
    others = [row for row in range(len(DATED)) if row not in expected]
    assert passing(DATED, {"must_not": [key("on", range=bounds)]}, tmp_path) == others


def passes(row: dict[str, Any], number: int, filter: dict[str, Any]) -> bool:
    """The slow twin: one item against one filter."""
    if "has_id" in filter:
        return f"id{number}" in filter["has_id"]
    if "is_empty" in filter:
        return row.get(filter["is_empty"]["key"]) in (None, [])
    if "key" in filter:
        found = row.get(filter["key"])
        values = [found, *(found if isinstance(found, list) else [])]
        plain = [one for one in values if isinstance(one, str | int | float)]
        if "range" in filter:
            numbers = [one for one in plain if not isinstance(one, str | bool)]
            tests = {"gt": "__gt__", "gte": "__ge__", "lt": "__lt__", "lte": "__le__"}
            bounds = filter["range"].items()
            return any(all(getattr(float(one), tests[name])(float(bound)) for name, bound in bounds) for one in numbers)
        ((kind, wanted),) = filter["match"].items()

        def same(one: Any) -> bool:
            each = wanted if isinstance(wanted, list) else [wanted]
            kinds = [
                (isinstance(one, str), isinstance(one, bool)) == (isinstance(v, str), isinstance(v, bool)) for v in each
            ]
            return any(is_same and one == v for is_same, v in zip(kinds, each, strict=True))

        return any(same(one) != (kind == "except") for one in plain)
    must, should, must_not = (filter.get(clause, []) for clause in ("must", "should", "must_not"))
    return (
        all(passes(row, number, one) for one in must)
        and (not should or any(passes(row, number, one) for one in should))
        and not any(passes(row, number, one) for one in must_not)
    )


def drawn(random: random.Random, level: int = 0) -> dict[str, Any]:
    """A random filter."""
    values = [0, 1, 2, 1.5, "a", "b", True, False]
    if level == 0 or (level < 4 and random.random() < 0.4):
        clauses = random.sample(["must", "should", "must_not"], random.randint(1, 3))
        return {clause: [drawn(random, level + 1) for _ in range(random.randint(0, 2))] for clause in clauses}
    field = random.choice("xyz")
    return random.choice(
        [
            {"key": field, "match": {"value": random.choice(values)}},
            {"key": field, "match": {random.choice(["any", "except"]): random.sample(values, 2)}},
            {
                "key": field,
                "range": {random.choice(["gt", "gte"]): random.choice([0, 1]), "lt": random.choice([1.2, 2])},
            },
            {"is_empty": {"key": field}},
            {"has_id": ["id3", "id5"]},
        ]
    )


def test_random_filters_pass_what_a_slow_twin_passes(tmp_path: Path) -> None:
    chance = random.Random(0)
    values: list[Any] = [0, 1, 2, 1.5, "a", "b", True, False, None, [], ["a", 1], [2, None], {"x": 1}]
    rows = [{field: chance.choice(values) for field in "xyz" if chance.random() < 0.8} for _ in range(60)]
    store = ItemStore(tmp_path / "items.sqlite")
    store.write(items_of(rows))
    sizes = set()
    for _ in range(400):
        filter = drawn(chance)
        keys, _ = store.where(Filter.parse(json.dumps(filter)))
        expected = [n for n, row in enumerate(rows) if passes(row, n, filter)]
        assert [number - 1 for number, _ in keys] == expected, filter
        sizes.add(len(expected))
    store.close()
    assert len(sizes) > 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[1", "not valid JSON"),
        ("[" * 4000, "not valid JSON"),
        ('{"must": [{"key": "n", "range": {"gt": NaN}}]}', "not valid JSON"),
        ("[]", "an object with"),
        ('{"must": [], "must": []}', "a name twice"),
        ('{"filter": []}', "no clause 'filter'"),
        ('{"must": 1}', "conditions in must"),
        ('{"must": [1]}', "not an object"),
        ('{"must": [{}]}', "is empty"),
        ('{"must": [{"key": "a"}]}', "match and range"),
        ('{"must": [{"key": 1, "match": {"value": 1}}]}', "name of a"),
        ('{"must": [{"key": "a..b", "match": {"value": 1}}]}', "name of a"),
        ('{"must": [{"key": "a", "match": {"value": null}}]}', "only texts, numbers"),
        ('{"must": [{"key": "a", "match": {"any": []}}]}', "list with a"),
        ('{"must": [{"key": "a", "match": {"text": "b"}}]}', "value, any and except"),
        ('{"must": [{"key": "a", "match": {"value": "\\ud800"}}]}', "not valid"),
        ('{"must": [{"key": "\\ud800", "match": {"value": 1}}]}', "not valid"),
        ('{"must": [{"is_null": {"key": "a.\\u0000"}}]}', "zero character"),
        ('{"must": [{"key": "a", "match": {"value": "\\u0000"}}]}', "zero character"),
        ('{"must": [{"key": "a", "range": {"gt": "1"}}]}', "numbers in range"),
        ('{"must": [{"key": "a", "range": {"gt": "2026-3-1"}}]}', "numbers in range"),
        ('{"must": [{"key": "a", "range": {"gt": "2026-03-01", "lt": 3}}]}', "numbers in range"),
        ('{"must": [{"key": "a", "range": {"above": 1}}]}', "some of gt, gte, lt, lte"),
        ('{"must": [{"key": "a", "match": {"value": 1%s}}]}' % ("0" * 400), "too large"),
        ('{"must": [{"key": "a", "match": {"any": [1, 9223372036854775808]}}]}', "integers.*64 bits"),
        ('{"must": [{"key": "a", "range": {"gt": 1%s}}]}' % ("0" * 400), "too large"),
        ('{"must": [{"has_id": "a"}]}', "list of texts.*has_id"),
        ('{"must": [{"has_id": ["a"], "has_label": ["b"]}]}', "needs conditions"),
        ('{"must": [{"is_null": "a"}]}', "needs is_null as"),
        (" " * (MAX_FILTER + 1), f"has {MAX_FILTER + 1} characters"),
        ('{"must":[' * MAX_LEVELS + '{"must":[]}' + "]}" * MAX_LEVELS, f"more than {MAX_LEVELS} deep"),
        (json.dumps({"must": [{"must": []}] * (MAX_CONDITIONS + 1)}), f"more than {MAX_CONDITIONS} conditions"),
        (json.dumps({"must": [{"has_id": [str(n) for n in range(MAX_VALUES + 1)]}]}), f"more than {MAX_VALUES}"),
    ],
)
def test_what_is_no_filter_is_refused(text: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        Filter.parse(text)
    assert refused.value.status == 422
    assert refused.value.allowed["max_levels"] == MAX_LEVELS


def test_a_field_that_no_item_has_is_named(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    store.write(items_of(CITIES))
    filter = {"must": [value("colour", "red"), value("city", "London"), value("city.part", "Soho")]}
    assert store.where(Filter.parse(json.dumps(filter))) == ([], ("colour", "city.part"))
    assert store.where(Filter.parse(json.dumps({"must": [value("city", "Rome")]}))) == ([], ())
    store.close()


def test_a_range_names_a_field_that_holds_no_value_of_its_kind(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    store.write(items_of([{"price": "9.50"}, {"price": "12.50", "on": "2026-11-30", "n": [1]}]))

    def unknown(**field: Any) -> tuple[str, ...]:
        (name, bounds), *_ = field.items()
        rows, found = store.where(Filter.parse(json.dumps({"must": [key(name, range=bounds)]})))
        assert rows == []
        return found

    assert unknown(price={"gt": 1}) == ("price",)
    assert unknown(on={"gt": 1}) == ("on",)
    assert unknown(on={"gt": "2026-12-01"}) == unknown(n={"gt": 1}) == ()
    store.close()


def test_a_filter_that_takes_too_long_is_refused_and_undoes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    store.write(items_of(CITIES * 300))
    monkeypatch.setattr("lam.gallery.database._FILTER_SECONDS", -1.0)
    slow = Filter.parse(json.dumps({"must": [value("city", "London")]}))
    with pytest.raises(Refusal, match="took longer"):
        store.where(slow)
    with pytest.raises(Refusal, match="took longer"):
        store.page(after="", limit=1000, where=slow)
    deleted, refused = store.write(["id0", DeleteWhere(slow)])
    assert isinstance(deleted, Change)
    assert isinstance(refused, Refusal)
    assert len(store) == 1799
    assert store.check() == []
    store.close()


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    store = ItemStore(tmp_path / "items.sqlite")
    store.write(items_of([{"n": n, "part": n % 5} for n in range(200)]))
    store.close()
    opened = Gallery(tmp_path, 4)
    yield opened
    opened.close()


def queries(n: int = 3) -> Embeddings:
    mean = torch.nn.functional.normalize(torch.randn(n, 4, generator=torch.Generator().manual_seed(1)))
    one = torch.ones(n, dtype=torch.float64)
    return Embeddings(mean, one, one, one)


def test_a_filtered_search_is_a_search_of_the_items_that_pass(gallery: Gallery) -> None:
    part = gallery.matching(Filter.parse(json.dumps({"must": [value("part", 2)]})))
    assert len(part) == 40
    hits, infos = gallery.search(queries(), 50, part)
    everything, all_infos = gallery.search(queries(), 200)
    for row in range(3):
        ids = [infos[number].id for number in hits.ids[row].tolist()]
        expected = [
            all_infos[number].id for number in everything.ids[row].tolist() if int(all_infos[number].id[2:]) % 5 == 2
        ]
        assert ids == expected
    scores = dict(zip(everything.ids[0].tolist(), everything.scores[0].tolist(), strict=True))
    assert hits.scores[0].tolist() == [scores[number] for number in hits.ids[0].tolist()]


def test_items_of_a_filter_follow_changes(gallery: Gallery) -> None:
    where = Filter.parse(json.dumps({"must": [value("part", 2)]}))
    first = gallery.matching(where)
    assert gallery.matching(where) is first
    item = items_of([{"part": 2}])[0]
    gallery.write([Item("new", item.vector, 9.0, "", item.metadata), "id2"])
    ids = {info.id for info in gallery.search(queries(), 50, gallery.matching(where))[1].values()}
    assert len(gallery.matching(where)) == 40
    assert "new" in ids
    assert "id2" not in ids
    assert "id2" not in {info.id for info in gallery.search(queries(), 50, first)[1].values()}


def test_a_filtered_deletion_is_whole_and_survives_a_restart(gallery: Gallery, tmp_path: Path) -> None:
    (change,) = gallery.write([DeleteWhere(Filter.parse(json.dumps({"must": [key("n", range={"lt": 150})]})))])
    assert isinstance(change, Change)
    assert len(change.removed) == 150
    assert len(gallery) == 50
    gallery.close()
    again = Gallery(tmp_path, 4)
    assert sorted(int(info.id[2:]) for info in again.store.page(after="", limit=100).values()) == list(range(150, 200))
    again.close()


def test_a_filter_that_nothing_passes_finds_nothing(gallery: Gallery) -> None:
    part = gallery.matching(Filter.parse(json.dumps({"must": [value("none", 2)]})))
    assert part.unknown == ("none",)
    assert gallery.search(queries(), 5, part)[0].ids.shape == (3, 0)
