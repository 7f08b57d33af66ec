"""Public data for `real.py`: images and texts, their classes, and further facts.

Published data sets are in the folder `data`, each in the folder of its name. Emoji come from npm, stamps and
descriptions of packages from Debian. The repository holds none of these data. Missing data raise `MissingError`.
"""

import io
import json
import pkgutil
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from PIL import Image
from real_networks import MissingError, package
from torch import Tensor

from lam.datasets import docstrings as standard_library
from lam.datasets import intents
from lam.datasets.base import MissingDataError
from lam.datasets.small_images import SmallImages, fashionmnist, mnist
from lam.datasets.splits import Splits
from lam.inputs.decoding import to_mode

EMOJI_VERSION = "16.0.0"
MAKERS = ("google", "twitter")
SPLITS = ("train", "validation", "test")
STAMPS = Path("/usr/share/tuxpaint/stamps")
_SIDE = 224
_LEAST_STAMPS = 5
_LEAST_PACKAGES, _MOST_PACKAGES = 100, 300
_LIBRARIES = "fastapi", "matplotlib", "numpy", "pandas", "PIL", "pydantic", "scipy", "sklearn", "torch", "transformers"
_LEAST_SENTENCES, _MOST_SENTENCES, _MOST_SMALL = 16, 100, 200


@dataclass(frozen=True)
class Items:
    """N labelled images or texts.

    Args:
        items: square RGB images, or texts.
        labels: (N,) positions in `classes`; -1 for an item of no class.
        classes: C names.
        licence: of the items.
        ids: further numbers of each item, by name: `split` (a position in `SPLITS`), `maker`, `category`, `alphabet`.
        names: what the numbers of `ids` mean, by the same name.
    """

    items: list[Image.Image] | list[str]
    labels: Int64[Tensor, " N"]
    classes: list[str]
    licence: str
    ids: dict[str, Int64[Tensor, " N"]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """Where data are: `data` has a folder for each published data set, `packages` the archives that npm fetches."""

    data: Path
    packages: Path
    stamps: Path = STAMPS

    def file(self, *parts: str) -> Path:
        """A file of the data folder; a missing one raises `MissingError`."""
        if not (path := self.data.joinpath(*parts)).exists():
            raise MissingError(f"{path} is missing: give --data, a folder that has it")
        return path


def faces(places: Places) -> Items:
    """The ORL faces: 20 people, ten photographs each, padded with black to a square as face-api pads them."""
    images, people = list[Image.Image](), list[str]()
    with tarfile.open(places.file("faces", "faces.tar.gz")) as archive:
        for name, content in _members(archive, ".pgm"):
            images.append(_padded(content, "black"))
            people.append(Path(name).parent.name)
    classes = sorted(set(people), key=lambda person: int(person.removeprefix("s")))
    return Items(images, _numbers(people, classes), classes, "AT&T Laboratories Cambridge, The ORL Database of Faces")


def stamps(places: Places) -> Items:
    """Pictures of Debian's tuxpaint-stamps-default; the class is the folder at the top.

    Drawings for the mirror image of a stamp (`_mirror`) are left out, as they show the same thing once more; so are
    kinds with fewer than five pictures, and vector graphics, sounds and texts.
    """
    if not places.stamps.is_dir():
        raise MissingError(f"{places.stamps} is missing: apt-get install tuxpaint-stamps-default")
    paths = [path for path in sorted(places.stamps.rglob("*.png")) if not path.stem.endswith("_mirror")]
    kinds = [path.relative_to(places.stamps).parts[0] for path in paths]
    counts = Counter(kinds)
    classes = sorted(kind for kind in counts if counts[kind] >= _LEAST_STAMPS)
    chosen = [(path, kind) for path, kind in zip(paths, kinds, strict=True) if kind in classes]
    return Items(
        [_padded(path.read_bytes()) for path, _ in chosen],
        _numbers([kind for _, kind in chosen], classes),
        classes,
        "GPL-2, Bill Kendrick and others (tuxpaint-stamps)",
    )


def emoji(places: Places) -> Items:
    """The same emoji by Google and by Twitter, 64 pixels wide; the class is the emoji, `maker` who drew it."""
    archives = {maker: package(f"emoji-datasource-{maker}", EMOJI_VERSION, places.packages) for maker in MAKERS}
    drawn: dict[str, dict[str, Image.Image]] = {}
    entries: list[Any] = []
    for maker, path in archives.items():
        with tarfile.open(path) as archive:
            drawn[maker] = {
                Path(name).name: _padded(content) for name, content in _members(archive, ".png", below=f"{maker}/64")
            }
            listed: Any = archive.extractfile("package/emoji.json")
            entries = json.load(listed)
    both = [entry for entry in entries if all(entry["image"] in drawn[maker] for maker in MAKERS)]
    categories = sorted({entry["category"] for entry in both})
    category = _numbers([entry["category"] for entry in both], categories)
    return Items(
        [drawn[maker][entry["image"]] for maker in MAKERS for entry in both],
        torch.arange(len(both)).repeat(2),
        [entry["short_name"] for entry in both],
        "Google: Apache-2.0 (noto-emoji); Twitter: CC BY 4.0 (twemoji)",
        ids={"maker": torch.arange(2).repeat_interleave(len(both)), "category": category.repeat(2)},
        names={"maker": list(MAKERS), "category": categories},
    )


def cifar10(places: Places) -> Items:
    """CIFAR-10 as JPEG files `SPLIT/CLASS/NAME.jpg`: 300 a class of the training split, the whole of the others."""
    images, classes, splits = list[Image.Image](), list[str](), list[int]()
    with tarfile.open(places.file("cifar10", "images.tar")) as archive:
        for name, content in _members(archive, ".jpg"):
            split, kind = Path(name).parts[-3:-1]
            images.append(_padded(content))
            classes.append(kind)
            splits.append(SPLITS.index(split))
    names = sorted(set(classes))
    found = Items(images, _numbers(classes, names), names, "Krizhevsky (2009), no licence stated", *_splits(splits))
    return _few(found, {0: 300})


def omniglot(places: Places) -> Items:
    """Characters of five alphabets, 20 drawings each; the class is the character, `alphabet` where it is from."""
    images, characters = list[Image.Image](), list[str]()
    with zipfile.ZipFile(places.file("omniglot", "images_background_small1.zip")) as archive:
        for name in sorted(name for name in archive.namelist() if name.endswith(".png") and "__MACOSX" not in name):
            images.append(_padded(archive.read(name)))
            characters.append("/".join(Path(name).parts[-3:-1]))
    classes = sorted(set(characters))
    alphabets = sorted({name.split("/")[0] for name in classes})
    alphabet = _numbers([name.split("/")[0] for name in characters], alphabets)
    licence = "MIT, Lake et al. (2015), brendenlake/omniglot"
    return Items(
        images, _numbers(characters, classes), classes, licence, {"alphabet": alphabet}, {"alphabet": alphabets}
    )


def clinc150(places: Places) -> Items:
    """CLINC150: 60 questions of each intent, from three splits in their proportions; −1 for questions out of scope."""
    root = places.data / "clinc150"
    texts, labels, classes, parts = _all_of(intents.clinc150(root=root))
    for number, part in enumerate(SPLITS):
        strange: Any = intents.clinc150_oos(root=root, part=part)  # type: ignore[arg-type]
        texts += strange.texts
        parts += [number] * len(strange)
    labels = torch.cat([labels, torch.full((len(texts) - len(labels),), -1)])
    licence = "CC BY 3.0, Larson et al. (2019), clinc/oos-eval"
    return _few(Items(texts, labels, classes, licence, *_splits(parts)), {0: 40, 1: 8, 2: 12})


def banking77(places: Places) -> Items:
    """BANKING77: of each intent at most 40 questions of the training split and 20 of the test split."""
    texts, labels, classes, parts = _all_of(intents.banking77(root=places.data / "banking77"))
    published = [2 * (part == 2) for part in parts]  # lam's validation split comes from the training part
    licence = "CC BY 4.0, Casanueva et al. (2020)"
    return _few(Items(texts, labels, classes, licence, *_splits(published)), {0: 40, 2: 20})


def docstrings(places: Places) -> Items:
    """First sentences of docstrings of Python's standard library; the class is the module."""
    texts, labels, classes, _ = _all_of(standard_library.splits())
    return Items(texts, labels, classes, "Python Software Foundation License 2.0")


def debian(places: Places) -> Items:
    """Short descriptions of Debian's packages; the class is the section.

    At most 300 of each section with 100 or more. A repeated description counts for the first section that has it.
    """
    if shutil.which("apt-cache") is None:
        raise MissingError("apt-cache is missing: this needs Debian and its package lists")
    listed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    return described(listed)


def described(listed: str, *, least: int = _LEAST_PACKAGES, most: int = _MOST_PACKAGES) -> Items:
    """The packages of a Debian list in its control format, by section."""
    found: dict[str, str] = {}
    for entry in listed.split("\n\n"):
        section = re.search(r"^Section: (?:[^/\n]+/)?(\S+)$", entry, re.MULTILINE)
        text = re.search(r"^Description(?:-en)?: (.+)$", entry, re.MULTILINE)
        if section and text and len(text[1].split()) >= 3:
            found.setdefault(text[1].strip(), section[1])
    described = _large_classes(found, "of the packages, by their maintainers in Debian", least=least, most=most)
    if not described.items:
        raise MissingError(f"no section has {least} described packages: run apt-get update")
    return described


def libraries(places: Places) -> Items:
    """First sentences of docstrings in ten Python libraries; the class is the module, directly below its library.

    At most 100 of each module with 16 or more. A repeated sentence counts for the first module that has it.
    """
    found: dict[str, str] = {}
    for library in _LIBRARIES:
        try:
            names = [module.name for module in pkgutil.iter_modules(import_module(library).__path__)]
        except ImportError as error:
            raise MissingError(f"{library} is missing: pip install {library}") from error
        for name in sorted(name for name in names if not name.startswith("_") and "test" not in name):
            try:
                module = import_module(f"{library}.{name}")
            except Exception:  # a module may need what is not installed, or another system
                continue
            for sentence in standard_library._documented(module):
                found.setdefault(sentence, f"{library}.{name}")
    return _large_classes(found, "of the libraries", least=_LEAST_SENTENCES, most=_MOST_SENTENCES)


def clothes(places: Places) -> Items:
    """FashionMNIST: 200 images of each class of the test split, enlarged."""
    return _small(fashionmnist, places, "fashionmnist", "MIT, Xiao et al. (2017), zalandoresearch/fashion-mnist")


def digits(places: Places) -> Items:
    """MNIST: 200 images of each class of the test split, enlarged."""
    return _small(mnist, places, "mnist", "CC BY-SA 3.0, LeCun, Cortes and Burges (1998)")


DATA: dict[str, Callable[[Places], Items]] = {
    "faces": faces,
    "stamps": stamps,
    "clinc150": clinc150,
    "banking77": banking77,
    "docstrings": docstrings,
    "debian": debian,
    "emoji": emoji,
    "cifar10": cifar10,
    "omniglot": omniglot,
    "libraries": libraries,
    "clothes": clothes,
    "digits": digits,
}


def load(name: str, places: Places) -> Items:
    """The items of a data set by name; `MissingError` if they are missing."""
    try:
        return DATA[name](places)
    except MissingDataError as error:
        raise MissingError(str(error)) from error


def _small(source: SmallImages, places: Places, name: str, licence: str) -> Items:
    """The first images of each class in a published test split, in colour and as large as the network's input."""
    root = places.data / name
    published = source.test_images(root=root if root.exists() else None)
    by_class = [(published.labels == c).nonzero()[:_MOST_SMALL, 0] for c in range(len(published.classes))]
    rows = torch.cat(by_class).tolist()
    large = [published.picture(row).convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC) for row in rows]
    return Items(large, published.labels[rows], list(published.classes), licence)


def _all_of(splits: Splits) -> tuple[list[str], Tensor, list[str], list[int]]:
    """Texts, labels and classes of three splits, joined, and the split of each text."""
    parts: list[Any] = [splits.train, splits.validation, splits.test]
    texts = [text for part in parts for text in part.texts]
    numbers = [number for number, part in enumerate(parts) for _ in range(len(part))]
    return texts, torch.cat([part.targets for part in parts]), list(parts[0].classes), numbers


def _members(archive: tarfile.TarFile, suffix: str, *, below: str = "") -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of an archive with a suffix, sorted as numbers sort."""

    def natural(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]

    names = [name for name in archive.getnames() if name.endswith(suffix) and f"{below}/" in name]
    for name in sorted(names, key=natural):
        file: Any = archive.extractfile(name)
        yield name, file.read()


def _padded(content: bytes, colour: str = "white") -> Image.Image:
    """An image in the middle of a square of one colour, at most 224 pixels wide; transparency is laid on white."""
    image = to_mode(Image.open(io.BytesIO(content)), "RGB")
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (max(image.size), max(image.size)), colour)
    square.paste(image, ((square.width - image.width) // 2, (square.height - image.height) // 2))
    return square


def _numbers(values: list[str], classes: list[str]) -> Int64[Tensor, " N"]:
    numbers = {name: number for number, name in enumerate(classes)}
    return torch.tensor([numbers[value] for value in values])


def _splits(numbers: list[int]) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    return {"split": torch.tensor(numbers)}, {"split": list(SPLITS)}


def _large_classes(found: Mapping[str, str], licence: str, *, least: int, most: int) -> Items:
    """Texts with their classes, of the classes with at least `least` texts, and at most `most` of each."""
    counts = Counter(found.values())
    classes = sorted(name for name in counts if counts[name] >= least)
    chosen = {text: name for text, name in found.items() if name in classes}
    whole = Items([*chosen], _numbers([*chosen.values()], classes), classes, licence, *_splits([0] * len(chosen)))
    return replace(_few(whole, {0: most}), ids={}, names={})


def _few(items: Items, most: Mapping[int, int]) -> Items:
    """At most `most` items of each class in a split, drawn by seed 0; all items of splits without a limit."""
    kept: list[int] = []
    counts: Counter[tuple[int, int]] = Counter()
    for index in torch.randperm(len(items.labels), generator=torch.Generator().manual_seed(0)).tolist():
        label, split = int(items.labels[index]), int(items.ids["split"][index])
        counts[label, split] += 1
        if label < 0 or counts[label, split] <= most.get(split, len(items.labels)):
            kept.append(index)
    rows = torch.tensor(sorted(kept), dtype=torch.long)
    ids = {name: values[rows] for name, values in items.ids.items()}
    chosen: Any = [items.items[row] for row in rows.tolist()]
    return Items(chosen, items.labels[rows], items.classes, items.licence, ids, items.names)
