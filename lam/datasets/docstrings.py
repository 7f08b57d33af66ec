"""Docstring sentences of Python's standard library; and, as OOD set, sentences about scikit-learn's data sets."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from lam.datasets.base import Dataset, labels_of
from lam.datasets.splits import Splits, carve_missing
from lam.datasets.texts import Texts, preprocessing_like

_MODULES = (
    *("argparse", "ast", "asyncio", "calendar", "collections", "csv", "datetime", "decimal", "email.message"),
    *("fractions", "functools", "gzip", "heapq", "html", "http.client", "imaplib", "inspect", "ipaddress"),
    *("json", "logging", "mailbox", "math", "multiprocessing.pool", "os", "pathlib", "random", "re", "shutil"),
    *("smtplib", "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile"),
    *("threading", "time", "unittest", "urllib.request", "uuid", "xml.dom.minidom", "zipfile"),
)
_DESCRIBED = ("breast_cancer", "diabetes", "iris", "linnerud", "wine")
_LEAST, _LONGEST, _WORDS, _PER_MODULE = 20, 300, 4, 10


def splits(*, seed: int = 0, validation: float = 0.2, test: float = 0.2) -> Splits:
    """The first docstring sentence of public functions, classes and methods in the standard library.

    The label is the module; the metadata hold the member's name. Modules with fewer than ten sentences are left out.
    The sentences depend on the version of Python. `validation` and `test` are fractions of the sentences.
    """
    seen: set[str] = set()
    found: dict[str, dict[str, str]] = {}
    for name in _MODULES:
        sentences = {text: member for text, member in _documented(import_module(name)).items() if text not in seen}
        if len(sentences) >= _PER_MODULE:
            found[name] = sentences
            seen |= sentences.keys()
    rows = [(text, module, member) for module, sentences in found.items() for text, member in sentences.items()]
    texts = Texts(
        [text for text, _, _ in rows],
        labels_of((module for _, module, _ in rows), found),
        name="docstrings",
        classes=list(found),
        metadata=[{"name": member} for _, _, member in rows],
    )
    return Splits(**carve_missing({"train": texts}, validation=validation, test=test, seed=seed, source="docstrings"))


def descriptions(*, like: Dataset) -> Texts:
    """Sentences about five data sets in scikit-learn, for example on flowers and wine."""
    from sklearn import datasets  # heavy, and needed only here

    found = {name: _sentences(getattr(datasets, f"load_{name}")().DESCR) for name in _DESCRIBED}
    labels = labels_of((name for name, texts in found.items() for _ in texts), _DESCRIBED)
    common: Any = {"classes": _DESCRIBED, "preprocessing": preprocessing_like(like)}
    return Texts([text for texts in found.values() for text in texts], labels, name="descriptions", **common)


def _documented(module: ModuleType) -> dict[str, str]:
    """Maps the first docstring sentence of each member of a module to the member's name."""
    found: dict[str, str] = {}
    for name, member in _members(module):
        for sentence in _sentences(inspect.getdoc(member) or "")[:1]:
            found.setdefault(sentence, name)
    return found


def _members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public functions, classes and methods of a module, without members that other packages add at run time."""

    def is_own(name: str, member: object, *, default: str | None) -> bool:
        origin = (getattr(member, "__module__", None) or default or "").lstrip("_").partition(".")[0]
        return not name.startswith("_") and callable(member) and origin == module.__name__.partition(".")[0]

    for name, member in sorted(vars(module).items()):
        if is_own(name, member, default=None):
            yield f"{module.__name__}.{name}", member
            for method, function in sorted(vars(member).items()) if inspect.isclass(member) else ():
                if is_own(method, function, default=module.__name__):
                    yield f"{module.__name__}.{name}.{method}", function


def _sentences(text: str) -> list[str]:
    """The sentences of plain paragraphs, without signatures, tables and headings."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", plain):
            fits = _LEAST <= len(sentence) <= _LONGEST and len(re.findall(r"[A-Za-z]{2,}", sentence)) >= _WORDS
            if fits and sentence.endswith(".") and not re.search(r"->|[=:|*_]{2}|^\W", sentence):
                found.append(sentence)
    return found
