"""Sentences that ship with Python and scikit-learn: what functions of the standard library do, by module; and, out of
distribution, sentences about flowers, wine and patients.
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import torch

from lam.datasets.base import Dataset, Splits, carve_missing
from lam.datasets.texts import Texts, preprocessing_like

_MODULES = (
    *("argparse", "ast", "asyncio", "calendar", "collections", "csv", "datetime", "decimal", "email.message"),
    *("fractions", "functools", "gzip", "heapq", "html", "http.client", "imaplib", "inspect", "ipaddress"),
    *("json", "logging", "mailbox", "math", "multiprocessing.pool", "os", "pathlib", "random", "re", "shutil"),
    *("smtplib", "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile"),
    *("threading", "time", "unittest", "urllib.request", "uuid", "xml.dom.minidom", "zipfile"),
)
_DESCRIBED = ("load_breast_cancer", "load_diabetes", "load_iris", "load_linnerud", "load_wine")
_LEAST, _LONGEST, _WORDS, _PER_MODULE = 20, 300, 4, 10


def splits(*, seed: int = 0, validation: float = 0.2, test: float = 0.2) -> Splits:
    """The first sentence of the docstring of each public function and class of some modules of the standard library.

    The label is the module, the metadata is the name; modules with fewer than ten such sentences are left out. What
    there is depends on the version of Python.

    Args:
        seed: of the split.
        validation: fraction of the sentences for validation.
        test: fraction of the sentences for testing.

    Raises:
        ValueError: If a fraction is not within 0 and 1, or together they leave nothing to train on.

    Example:
        >>> "math" in splits().train.classes
        True
    """
    seen: set[str] = set()
    found: dict[str, dict[str, str]] = {}
    for name in _MODULES:
        sentences = {text: what for text, what in _documented(import_module(name)).items() if text not in seen}
        if len(sentences) >= _PER_MODULE:
            found[name] = sentences
            seen |= sentences.keys()
    rows = [(text, number, what) for number, of_one in enumerate(found.values()) for text, what in of_one.items()]
    texts = Texts(
        [text for text, _, _ in rows],
        torch.tensor([number for _, number, _ in rows]),
        name="docstrings",
        classes=list(found),
        metadata=[{"name": what} for _, _, what in rows],
    )
    return Splits.of(carve_missing({"train": texts}, validation=validation, test=test, seed=seed, source="docstrings"))


def descriptions(*, like: Dataset) -> Texts:
    """Sentences of scikit-learn's descriptions of its data sets of flowers, wine and patients."""
    from sklearn import datasets  # heavy, and needed here alone

    texts, labels = list[str](), list[int]()
    for number, name in enumerate(_DESCRIBED):
        sentences = _sentences(getattr(datasets, name)().DESCR)
        texts += sentences
        labels += [number] * len(sentences)
    classes = [name.removeprefix("load_") for name in _DESCRIBED]
    return Texts(
        texts, torch.tensor(labels), name="descriptions", classes=classes, preprocessing=preprocessing_like(like)
    )


def _documented(module: ModuleType) -> dict[str, str]:
    """The first sentence of what a module documents, each once, with the name of what it is about."""
    found: dict[str, str] = {}
    for name, member in _members(module):
        sentence = next(iter(_sentences(inspect.getdoc(member) or "")), None)
        if sentence is not None:
            found.setdefault(sentence, name)
    return found


def _members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public functions and classes that a module defines, and the methods of the classes.

    What other packages add while a program runs is of a module of theirs, and left out.
    """

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
    """The sentences of plain paragraphs: no signatures, tables or headings."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", plain):
            fits = _LEAST <= len(sentence) <= _LONGEST and len(re.findall(r"[A-Za-z]{2,}", sentence)) >= _WORDS
            if fits and sentence.endswith(".") and not re.search(r"->|[=:|*_]{2}|^\W", sentence):
                found.append(sentence)
    return found
