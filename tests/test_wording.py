"""The wording of errors is free: a test matches the facts that an error must carry, not its sentence."""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONGEST = 3
"""Plain words in a row that a test may match."""
MESSAGE = re.compile(r"refused\(|\['error'\]|\.(err|error|stderr|complaint)\b|\w+\.value\)")
"""An error's message in a comparison."""


def expected(tree: ast.AST) -> Iterator[ast.expr]:
    """Values of `match=`, and what a test compares with an error's message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "match":
            yield node.value
        elif isinstance(node, ast.Compare) and MESSAGE.search(ast.unparse(node)):
            sides = [node.left, *node.comparators]
            yield from (side for side in sides if isinstance(side, ast.Constant | ast.JoinedStr | ast.Name))


def tables(tree: ast.AST) -> Iterator[tuple[list[str], list[ast.expr]]]:
    """Names and the rows of their values: assignments, loops over literals and parametrized tests."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield [ast.unparse(node.targets[0])], [node.value]
        elif isinstance(node, ast.For):
            names = [ast.unparse(name) for name in getattr(node.target, "elts", [node.target])]
            yield names, getattr(node.iter, "elts", [])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".parametrize"):
            columns = ast.literal_eval(node.args[0])
            names = re.findall(r"\w+", columns) if isinstance(columns, str) else list(columns)
            rows = getattr(node.args[1], "elts", [])
            yield names, [getattr(getattr(row, "value", row), "elt", row) for row in rows]


def sentences(source: str) -> list[tuple[int, str]]:
    """Lines and texts of expected messages with more plain words in a row than allowed."""
    tree = ast.parse(source)
    values = list(expected(tree))
    wanted = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
    for names, rows in tables(tree):
        for row in rows:
            cells = [row] if len(names) == 1 else getattr(row, "elts", getattr(row, "args", []))
            values += [cell for name, cell in zip(names, cells, strict=False) if name in wanted]
    texts = {
        (node.lineno, node.value)
        for value in values
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return [
        (line, text)
        for line, text in sorted(texts)
        if any(plain and len(list(words)) > LONGEST for plain, words in groupby(text.split(" "), str.isalpha))
    ]


@pytest.mark.parametrize("room", sorted({path.parent for path in TESTS.rglob("*.py")}), ids=lambda path: path.name)
def test_no_test_matches_a_sentence(room: Path) -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {text}"
        for path in sorted(room.glob("*.py"))
        for line, text in sentences(path.read_text(encoding="utf-8"))
    ]
    assert not found, "match the name, the value, the place or the advice, joined by .*:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "raises(ValueError, match={})",
        "raises(ValueError, match=f'{name}: ' + {})",
        "said = {}\nraises(ValueError, match=said)",
        "for size, said in [(1, {})]: raises(ValueError, match=said)",
        "@mark.parametrize('size, said', [(1, {})])\ndef test(): raises(ValueError, match=said)",
        "@mark.parametrize('said', [{}])\ndef test(): assert said in lam().err",
        "assert refused(answer, 422) == {}",
    ],
)
def test_a_sentence_is_found_wherever_it_stands(source: str) -> None:
    assert sentences(source.replace("{}", "'the size must be positive'"))
    assert not sentences(source.replace("{}", "'size.*positive.*-1 at index 3'"))
