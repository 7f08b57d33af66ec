"""`Filter`: conditions on ids, labels and metadata of items, in Qdrant's syntax, compiled to SQL.

A filter is an object with lists of conditions. An item passes if all conditions in `must` hold, at least one in
`should` holds, and no condition in `must_not` holds. A condition is another filter, or one of

    {"key": FIELD, "match": {"value": V}}       equal to V: a text, a number or a boolean
    {"key": FIELD, "match": {"any": [V, ...]}}    equal to one of these values
    {"key": FIELD, "match": {"except": [V, ...]}}   a value different from all of these
    {"key": FIELD, "range": {"gte": A, "lt": B}}  in the range (gt, gte, lt, lte): a number between numbers, or a text
                                                  that begins with a date between dates, such as "2026-11-30"
    {"is_empty": {"key": FIELD}}                missing, null or []
    {"is_null": {"key": FIELD}}                 null
    {"has_id": [ID, ...]}, {"has_label": [LABEL, ...]}

A dot in FIELD separates names of nested objects; FIELD may also be one outer name with dots. A list matches if one of
its elements matches. A value matches only values of its own type. SQLite rounds integers beyond 64 bits, so `match`
refuses them, and `range` compares them rounded. Names and values are parameters of the SQL, never parts of its text.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lam.gallery.item import normalize_label
from lam.gallery.refusal import Refusal

MAX_FILTER, MAX_LEVELS, MAX_CONDITIONS, MAX_VALUES = 4096, 8, 64, 256
_MAX_NESTED = 8  # names in a field
_CLAUSES = ("must", "should", "must_not")
_BOUNDS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_CONDITIONS = ("key", "is_empty", "is_null", "has_id", "has_label")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DATE_GLOB, _DATE_LENGTH = "-".join(["[0-9]" * 4, "[0-9]" * 2, "[0-9]" * 2]), 10
ALLOWED = {
    "clauses": list(_CLAUSES),
    "conditions": ["key with match or range", *_CONDITIONS[1:]],
    "match": ["value", "any", "except"],
    "range": list(_BOUNDS),
    "max_characters": MAX_FILTER,
    "max_levels": MAX_LEVELS,
    "max_conditions": MAX_CONDITIONS,
    "max_values": MAX_VALUES,
}


@dataclass(frozen=True)
class Sql:
    """An SQL expression about a row of `items`, and its parameters."""

    text: str
    parameters: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Filter:
    """A filter in canonical form.

    Attributes:
        text: the filter as JSON with sorted names; equal filters have equal texts.
        sql: condition on a row, true if the row passes.
        fields: for each field in the filter, a condition that is true if the row has the field. For a range, the value
            must also have the type of the bounds, a number or a date.

    Example:
        >>> filter = Filter.parse('{"must": [{"key": "year", "range": {"gte": 1900}}]}')
        >>> list(filter.fields), filter.sql.parameters
        (['year'], ('year', 1900, 1900))
    """

    text: str
    sql: Sql = field(compare=False)
    fields: Mapping[str, Sql] = field(compare=False)

    @classmethod
    def parse(cls, text: str) -> "Filter":
        """Parse a filter in JSON; an invalid or too large filter is refused with 422."""
        _require(len(text) <= MAX_FILTER, f"has {len(text)} characters")
        try:
            content = json.loads(text, object_pairs_hook=_once_each, parse_constant=int)  # int("NaN") raises
            canonical = json.dumps(content, sort_keys=True)
            canonical.encode()
        except (ValueError, RecursionError):
            _refuse("is not valid JSON")
        compiler = _Compiler()
        return cls(canonical, compiler.filter(content, 1), compiler.fields)

    @property
    def passes_all(self) -> bool:
        """Whether the filter has no condition."""
        return not self.sql.parameters


class _Compiler:
    """Compiles filters, and counts their conditions and values."""

    def __init__(self) -> None:
        self.fields: dict[str, Sql] = {}
        self._conditions = self._values = 0

    def filter(self, content: Any, level: int) -> Sql:
        _require(level <= MAX_LEVELS, f"is nested more than {MAX_LEVELS} deep")
        _require(isinstance(content, dict), "must be an object with must, should or must_not")
        unknown = [clause for clause in content if clause not in _CLAUSES]
        _require(not unknown, f"has no clause {''.join(unknown[:1])[:80]!r}")
        parts: list[Sql] = []
        for clause in _CLAUSES:
            conditions = content.get(clause, [])
            conditions = [conditions] if isinstance(conditions, dict) else conditions
            _require(isinstance(conditions, list), f"needs a list of conditions in {clause}")
            compiled = [self._condition(condition, level) for condition in conditions]
            if clause == "should":
                parts += [_joined(" OR ", compiled)] if compiled else []
            else:
                parts += compiled if clause == "must" else [Sql(f"NOT {one.text}", one.parameters) for one in compiled]
        return _joined(" AND ", parts) if parts else Sql("1")

    def _condition(self, content: Any, level: int) -> Sql:
        self._conditions += 1
        _require(self._conditions <= MAX_CONDITIONS, f"has more than {MAX_CONDITIONS} conditions")
        _require(isinstance(content, dict) and len(content) > 0, "has a condition that is empty, or is not an object")
        if content.keys() & set(_CLAUSES):
            return self.filter(content, level + 1)
        kinds = content.keys() & set(_CONDITIONS)
        _require(len(kinds) == 1, f"needs conditions with one of {', '.join(_CONDITIONS)}")
        (kind,) = kinds
        _require(kind == "key" or len(content) == 1, f"has other names besides {kind} in one condition")
        value = content[kind]
        match kind:
            case "has_id":
                return _in("id", self._texts(kind, value))
            case "has_label":
                return _in("label", [normalize_label(label) for label in self._texts(kind, value)])
            case "is_null" | "is_empty":
                _require(isinstance(value, dict) and value.keys() == {"key"}, f'needs {kind} as {{"key": FIELD}}')
                tables, named = self._field(value["key"])
                if kind == "is_null":
                    return Sql(f"EXISTS ({tables} AND v.type = 'null')", named)
                there = "v.type <> 'null' AND NOT (v.type = 'array' AND v.value = '[]')"
                return Sql(f"NOT EXISTS ({tables} AND {there})", named)
            case _:
                return self._of_field(content)

    def _of_field(self, content: dict[str, Any]) -> Sql:
        tables, named = self._field(content["key"])
        rest = content.keys() - {"key"}
        _require(len(rest) == 1 and rest <= {"match", "range"}, "needs one of match and range besides key")
        elements = "json_each(CASE WHEN v.type = 'array' THEN v.value ELSE '[]' END) AS e"

        def in_field(test: Callable[[str], Sql]) -> Sql:
            whole, element = test("v"), test("e")
            text = f"EXISTS ({tables} AND ({whole.text} OR EXISTS (SELECT 1 FROM {elements} WHERE {element.text})))"
            return Sql(text, (*named, *whole.parameters, *element.parameters))

        if "match" in content:
            return in_field(lambda name: self._match(content["match"], name))
        self.fields[content["key"]] = in_field(lambda name: Sql(_kind_of(content["range"], name)))
        return in_field(lambda name: self._range(content["range"], name))

    def _field(self, key: Any) -> tuple[str, tuple[str, ...]]:
        """The beginning of an SQL query that selects the value of a field as `v`, and the query's parameters."""
        names = key.split(".") if isinstance(key, str) else []
        is_name = all(names) and 1 <= len(names) <= _MAX_NESTED
        _require(is_name, f"needs the name of a field as key, with at most {_MAX_NESTED} parts between dots")
        _text(key)
        outer = [f"p{level}" for level in range(len(names) - 1)]
        within = [f"CASE WHEN {one}.type = 'object' THEN {one}.value ELSE '{{}}' END" for one in outer]
        tables = zip(["items.metadata", *within], [*outer, "v"], strict=True)
        sources = ", ".join(f"json_each({values}) AS {name}" for values, name in tables)
        place = f"FROM {sources} WHERE {' AND '.join(f'{name}.key = ?' for name in [*outer, 'v'])}"
        if outer:
            columns, names = "SELECT v.type, v.value, v.atom", [*names, key]
            whole = f"{columns} FROM json_each(items.metadata) AS v WHERE v.key = ?"
            place = f"FROM ({columns} {place} UNION ALL {whole}) AS v WHERE 1"
        text = f"SELECT 1 {place}"
        self.fields.setdefault(key, Sql(f"EXISTS ({text})", tuple(names)))
        return text, tuple(names)

    def _match(self, content: Any, name: str) -> Sql:
        is_one = isinstance(content, dict) and len(content) == 1 and content.keys() <= {"value", "any", "except"}
        _require(is_one, "needs one of value, any and except in match")
        ((kind, values),) = content.items()
        if kind == "value":
            values = [values]
        _require(isinstance(values, list) and len(values) > 0, f"needs a list with a value in match: {kind}")
        self._count(values)
        texts = [_text(value) for value in values if isinstance(value, str)]
        numbers = [value for value in values if _is_number(value)]
        _require(all(map(_is_exact, numbers)), "holds too large a number: keep integers beyond 64 bits as texts")
        booleans = [str(value).lower() for value in values if isinstance(value, bool)]
        are_known = len(texts) + len(numbers) + len(booleans) == len(values)
        _require(are_known, "matches only texts, numbers and booleans: use is_null or is_empty for other values")
        parts: list[Sql] = []
        if texts:
            parts.append(_joined(" AND ", [Sql(f"{name}.type = 'text'"), _in(f"{name}.atom", texts)]))
        if numbers:
            parts.append(_joined(" AND ", [Sql(f"{name}.type IN ('integer', 'real')"), _in(f"{name}.atom", numbers)]))
        if booleans:
            parts.append(_in(f"{name}.type", booleans))
        found = _joined(" OR ", parts)
        if kind != "except":
            return found
        return Sql(f"({name}.type NOT IN ('null', 'array', 'object') AND NOT {found.text})", found.parameters)

    def _range(self, content: dict[str, Any], name: str) -> Sql:
        self._count(list(content))
        found, bounds = f"{name}.atom", list(content.values())
        if isinstance(bounds[0], str):
            found = f"substr({found}, 1, {_DATE_LENGTH})"
        else:
            bounds = list(map(_number, bounds))
        tests = " AND ".join(f"{found} {_BOUNDS[bound]} ?" for bound in content)
        return Sql(f"({_kind_of(content, name)} AND {tests})", tuple(bounds))

    def _texts(self, kind: str, values: Any) -> list[str]:
        are_texts = isinstance(values, list) and values and all(isinstance(value, str) for value in values)
        _require(are_texts, f"needs a list of texts in {kind}")
        self._count(2 * values)
        return [_text(value) for value in values]

    def _count(self, values: list[Any]) -> None:
        self._values += len(values)
        # values of a field are compiled twice, for lists
        _require(self._values <= 2 * MAX_VALUES, f"has more than {MAX_VALUES} values")


def _kind_of(content: Any, name: str) -> str:
    """Condition that a value has the kind of the bounds of a range: a number or a date."""
    are_bounds = isinstance(content, dict) and set() < content.keys() <= _BOUNDS.keys()
    _require(are_bounds, f"needs some of {', '.join(_BOUNDS)} in range")
    bounds = content.values()
    if all(map(_is_number, bounds)):
        return f"{name}.type IN ('integer', 'real')"
    _require(all(map(_is_date, bounds)), 'needs numbers in range, or dates such as "2026-11-30"')
    return f"{name}.type = 'text' AND {name}.atom GLOB '{_DATE_GLOB}*'"


def _refuse(what: str) -> NoReturn:
    raise Refusal(422, f"the filter {what}", allowed=ALLOWED)


def _require(holds: object, problem: str) -> None:
    if not holds:
        _refuse(problem)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    _require(len(content) == len(pairs), "has a name twice in one object")
    return content


def _text(value: str) -> str:
    """A text that SQLite can compare: valid Unicode without a zero character, where SQLite ends texts."""
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse("holds a text that is not valid Unicode")
    _require("\0" not in value, "holds a zero character")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_date(value: object) -> bool:
    return isinstance(value, str) and _DATE.fullmatch(value) is not None


def _is_exact(value: int | float) -> bool:
    """Whether SQLite compares the number as it is; it rounds integers of JSON beyond 64 bits to floats."""
    return isinstance(value, float) or -(2**63) <= value < 2**63


def _number(value: int | float) -> int | float:
    """A number that SQLite can compare; a JSON integer beyond 64 bits becomes a float."""
    try:
        return value if _is_exact(value) else float(value)
    except OverflowError:
        _refuse("holds a number that is too large")


def _in(column: str, values: list[Any]) -> Sql:
    return Sql(f"{column} IN ({', '.join('?' * len(values))})", tuple(values))


def _joined(word: str, parts: list[Sql]) -> Sql:
    text = word.join(part.text for part in parts)
    return Sql(f"({text})", tuple(value for part in parts for value in part.parameters))
