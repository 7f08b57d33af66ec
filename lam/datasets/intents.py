"""CLINC150 and BANKING77: questions to an assistant or a bank, by intent; CLINC150 has out-of-scope questions, too.

Source: Larson et al. (2019), "An evaluation dataset for intent classification and out-of-scope prediction"; Casanueva
et al. (2020), "Efficient intent detection with dual sentence encoders".
"""

from pathlib import Path
from typing import Any, Literal

from lam.datasets.base import Dataset, labels_of
from lam.datasets.published import Source
from lam.datasets.splits import Splits, carve, fraction_of
from lam.datasets.texts import Columns, Texts, preprocessing_like, read
from lam.inputs.preprocessing import TextPreprocessing
from lam.utils.checks import check_choice
from lam.utils.tables import read_json

_FILE, _FILES = "data_full.json", ("train.csv", "test.csv")
_CLINC150 = Source("clinc150", f"Get {_FILE} of the repository clinc/oos-eval; it may be gzipped.", compressed=True)
_BANKING77 = Source(
    "banking77",
    f"Get {' and '.join(_FILES)} of the repository PolyAI-LDN/task-specific-datasets; they may be gzipped.",
    compressed=True,
)
Part = Literal["train", "validation", "test"]
_PARTS = {"train": "train", "validation": "val", "test": "test"}


def clinc150(*, root: str | Path | None = None) -> Splits:
    """The 150 intents of CLINC150 in the published splits; `root`, by default $LAM_DATA/clinc150, has the file."""
    path, content = _clinc150(root)
    classes = sorted({label for _, label in _pairs(path, content, "train")})
    train, validation, test = (_texts(_pairs(path, content, key), classes, path) for key in _PARTS.values())
    return Splits(train, validation, test)


def clinc150_oos(*, root: str | Path | None = None, part: Part = "test", like: Dataset | None = None) -> Texts:
    """The out-of-scope questions of CLINC150: 1,000 in `test`, 100 in each of the other two splits."""
    check_choice("part", part, _PARTS)
    path, content = _clinc150(root)
    pairs = _pairs(path, content, f"oos_{_PARTS[part]}")
    preprocessing = None if like is None else preprocessing_like(like)
    return _texts(pairs, ["oos"], path, name="clinc150_oos", preprocessing=preprocessing)


def banking77(*, root: str | Path | None = None, seed: int = 0, validation: float = 0.1) -> Splits:
    """The 77 intents of BANKING77; `root`, by default $LAM_DATA/banking77, has train.csv and test.csv.

    `validation` is the fraction of the published training split for validation, drawn by the seed.
    """
    folder = _BANKING77.folder(root, needed=_FILES)
    options: Any = {"columns": Columns("text", "category"), "labelled": True, "name": "banking77"}
    files = [_BANKING77.file(folder, name) for name in _FILES]
    train, test = (read(root=file, preprocessing=TextPreprocessing(), **options) for file in files)
    held_out, train = carve(train, (fraction_of(len(train), validation, name="validation"),), seed=seed)
    return Splits(train=train, validation=held_out, test=test)


def _clinc150(root: str | Path | None) -> tuple[Path, dict[str, Any]]:
    path = _CLINC150.file(_CLINC150.folder(root, needed=[_FILE]), _FILE)
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object of lists, such as train; get it again")
    return path, content


def _pairs(path: Path, content: dict[str, Any], key: str) -> list[tuple[str, str]]:
    rows = content.get(key)
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 2 and all(isinstance(value, str) for value in row) for row in rows
    ):
        raise ValueError(f"{path} must have {key}, a list of pairs of a text and its intent; get it again")
    return [(text, label) for text, label in rows]


def _texts(
    pairs: list[tuple[str, str]], classes: list[str], path: Path, name: str = "clinc150", **options: Any
) -> Texts:
    if strange := sorted({label for _, label in pairs} - set(classes)):
        raise ValueError(f"{path} has {', '.join(strange[:3])} without a training text of this intent; get it again")
    labels = labels_of((label for _, label in pairs), classes)
    return Texts([text for text, _ in pairs], labels, name=name, classes=classes, **options)
