"""The user's images: a folder with a sub-folder for each class, or a folder of images only.

The layout is root/class/image.jpg, or root/{train, validation, test}/class/image.jpg with split names in any case.
If root contains only one folder, like an unpacked archive, that folder is read instead. If root or a split contains a
COCO file, the file's categories are the classes. Without classes, or with a single class, no two images match.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unicodedata import normalize

from jaxtyping import Float, Int64
from torch import Tensor

from lam.datasets.base import Dataset, ImageOptions, MissingDataError, Preview, labels_of
from lam.datasets.splits import PARTS, Splits, carve_missing, note_like_names
from lam.inputs.decoding import THUMBNAIL_SIDE, thumbnail_of_file
from lam.inputs.preprocessing import Preprocessing
from lam.utils.checks import first_of
from lam.utils.notes import Note
from lam.utils.tables import read_json

_SUFFIXES = frozenset(  # suffixes of the formats that `open_image` reads
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm")
) | {".avif", ".heic", ".heif", ".hif"}
_SYSTEM = frozenset(
    (
        *("@eadir", "@tmp", "@recycle", "#recycle", "$recycle.bin", "recycler", "trashbox", "__macosx"),
        *("#snapshot", "~snapshot", "@recently-snapshot", "lost+found", "lost.dir"),
        *("system volume information", "network trash folder", "temporary items", "found.000", "__pycache__"),
        *("thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "icon\r"),
    )
)
"""Lower-case names of files and folders that file managers, network drives and archives create."""
_OF_SYSTEM = "are of the system"  # a reason for leaving files out

_COCO_LISTS = ("images", "annotations", "categories")


class FolderImages(Dataset):
    """Images on disk, decoded and preprocessed whenever they are read.

    Args:
        paths: N image files.
        labels, name, classes, preprocessing, per_item: as for `Dataset`.

    Raises:
        ValueError: If paths and labels differ in number. Reading an item raises this error if its file is not an image.
    """

    paths: tuple[Path, ...]

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Int64[Tensor, " N"],
        *,
        name: str,
        classes: Sequence[str],
        preprocessing: Preprocessing,
        **per_item: Any,
    ) -> None:
        per_item = {"paths": tuple(paths), **per_item}
        super().__init__(labels, name=name, classes=classes, preprocessing=preprocessing, **per_item)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "C H W"], int | Tensor]:
        return self.preprocessing(self.paths[index]), int(self.labels[index])

    @property
    def names(self) -> Sequence[str]:
        """The last two components of every path, so that the folder may be moved."""
        return ["/".join(path.parts[-2:]) for path in self.paths]

    @property
    def files(self) -> Sequence[Path]:
        return self.paths

    def preview(self, index: int, *, side: int = THUMBNAIL_SIDE) -> Preview:
        path = str(self.paths[index])
        return Preview(path, thumbnail_of_file(path, side))


def splits(
    *, root: str | Path, seed: int = 0, preprocessing: ImageOptions = None, validation: float = 0.2, test: float = 0.2
) -> Splits:
    """Read a folder of images in three disjoint splits; see `lam.datasets.load`.

    The splits are the folders `train` (or `training`), `validation` (or `val`, `valid`, `dev`) and `test` (or
    `testing`, `eval`). Missing splits get the fractions `validation` and `test` of the training images; see
    `lam.datasets.splits.carve_missing`. Without classes, or with a single class, the label of each image is its path.
    """
    root, preprocessing = _resolved(root), Preprocessing.of(preprocessing)
    if folders := _part_folders(root):
        _warn_beside(root, "belong to no split", defaultdict(list))
    folders = folders or {"train": root}
    if "train" not in folders:
        raise ValueError(f"{root} has {', '.join(folders)} but no folder train: put the training images into one")
    classes = {part: _classes(folder) for part, folder in folders.items()}
    names = sorted({name for of_part in classes.values() for name in of_part})
    if "" in names and len(names) > 1:
        flat = ", ".join(part for part, of_part in classes.items() if "" in of_part)
        raise MissingDataError(f"{root}: {flat} has no class folders, but other splits have: put each class into one")
    is_labelled = len(names) > 1
    note_like_names(names, root)
    if not is_labelled:  # each image is a class, by its path
        for part, of_part in classes.items():
            paths = [path for files in of_part.values() for path in files]
            classes[part] = {_as_utf8(path.relative_to(root).as_posix()): [path] for path in paths}
        names = sorted(name for of_part in classes.values() for name in of_part)
    parts = {part: _images(of_part, names, preprocessing) for part, of_part in classes.items()}
    parts = carve_missing(parts, validation=validation, test=test, seed=seed, source=root)
    return Splits(**parts, gallery="classes" if is_labelled else "identities")


def read(*, root: str | Path, preprocessing: Preprocessing, labelled: bool = False) -> FolderImages:
    """Read all images of a folder, or only its split `test` if it has splits.

    Labels are the names of sub-folders or COCO categories. A missing label is empty, or an error if `labelled`. Splits
    without `test` are an error.
    """
    root = _resolved(root)
    if (parts := _part_folders(root)) and "test" not in parts:  # the splits would be read as classes
        raise MissingDataError(f"{root} has the splits {', '.join(parts)}, but no folder test: give one of them")
    root = parts.get("test", root)
    classes = _classes(root)
    if labelled and "" in classes:
        raise MissingDataError(f"{root} has no class folders: put the images of each class into a folder")
    return _images(classes, sorted(classes), preprocessing)


def ood_items(*, root: str | Path, like: Dataset) -> FolderImages:
    """All images of a folder, with the preprocessing of `like`, or ImageNet's if `like` holds no images; see `read`."""
    preprocessing = like.preprocessing if isinstance(like.preprocessing, Preprocessing) else Preprocessing.imagenet()
    return read(root=root, preprocessing=preprocessing)


def image_files(folder: Path) -> list[Path]:
    """All visible images below a folder, sorted by name; a warning counts the other files."""
    left_out = defaultdict[str, list[Path]](list)
    files = _image_files(folder, left_out)
    _warn_left_out(folder, left_out)
    return files


def _resolved(root: str | Path) -> Path:
    root = Path(root).expanduser()
    if not root.is_dir():
        what = f"{root} is a file" if root.is_file() else f"there is no folder {root}"
        raise MissingDataError(f"{what}; give a folder of images, with a sub-folder for each class")
    return _unwrapped(root.resolve())


def _unwrapped(root: Path) -> Path:
    """The folder that holds the classes or splits: the root, or its only sub-folder, at any depth."""
    inner = list(_folders(root))
    if len(inner) != 1 or _part_folders(root) or coco_file(root) or not any(_folders(inner[0])):
        return root
    if any(_is_image(path) for folder in (root, inner[0]) for path in folder.iterdir()):
        return root
    others = [path for path in root.rglob("*") if inner[0] not in path.parents and _is_of_system(path, root)]
    n_beside = sum(path.is_file() for path in others)
    beside = f", and {n_beside} file(s) of the system" if n_beside else ""
    note = f"{root} holds only the folder {inner[0].name}{beside}: its folders are read as classes or splits"
    warnings.warn(note, Note, stacklevel=4)
    return _unwrapped(inner[0])


def _folders(folder: Path) -> Iterator[Path]:
    folders = (path for path in sorted(folder.iterdir()) if path.is_dir())
    return (path for path in folders if not (path.name.startswith(".") or _is_of_system(path, folder)))


def _part_folders(root: Path) -> dict[str, Path]:
    """The folder of each split; empty if the folders are classes."""
    allowed = {name: part for part, names in PARTS.items() for name in names}
    folders = [(allowed.get(folder.name.lower(), ""), folder) for folder in _folders(root)]
    # A class may be named "train": this folder is a split only if it contains classes, or all other folders are splits.
    found = [part for part, folder in folders if part and any(_folders(folder))]
    named = [part for part, _ in folders]
    if len(named) > 1 and "train" in named and all(named):
        found = named
    if not found or ("train" not in found and len(found) < len(folders)):
        return {}
    if unknown := [folder.name for part, folder in folders if not part]:
        raise ValueError(f"{root} has a folder train, so others must be {', '.join(allowed)}, got {', '.join(unknown)}")
    for part in found:
        if len(same := [folder.name for of, folder in folders if of == part]) > 1:
            raise ValueError(f"{root} has both {' and '.join(same)}; keep one of them")
    return dict(folders)


def _classes(folder: Path) -> dict[str, list[Path]]:
    left_out = defaultdict[str, list[Path]](list)
    if (labels := coco_file(folder)) is not None:
        return coco_classes(labels, _image_files(folder, left_out))
    classes = defaultdict[str, list[Path]](list)
    for path in _folders(folder):  # a Mac may write an accented letter as two characters
        classes[normalize("NFC", path.name).strip()] += _image_files(path, left_out)
    if not classes:
        if not (files := image_files(folder)):
            raise MissingDataError(f"{folder} has no images; allowed: {', '.join(sorted(_SUFFIXES))}")
        return {"": files}
    for name in classes:
        if _as_utf8(name) != name:
            raise ValueError(f"{folder} has a folder {name!r} with a name that is not in UTF-8: rename it")
    if "" in classes:
        raise ValueError(f"{folder} has a folder whose name is blank: rename it to the class of its images")
    _warn_beside(folder, "belong to no class", left_out)
    _warn_merged(folder, classes)
    if empty := [name for name, files in classes.items() if not files]:
        raise ValueError(f"{folder}: no images in {', '.join(empty)}; allowed: {', '.join(sorted(_SUFFIXES))}")
    return classes


def _as_utf8(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _image_files(folder: Path, left_out: dict[str, list[Path]], paths: Iterable[Path] | None = None) -> list[Path]:
    """The images among `paths`, by default all below a folder; others are added to `left_out`, by reason."""
    images: list[Path] = []
    for path in sorted(folder.rglob("*")) if paths is None else paths:
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            if _is_image(path):  # not a hidden file, so it lies in a hidden folder
                left_out["lie in hidden folders"].append(path)
            continue
        if _is_of_system(path, folder):
            if path.is_file():
                left_out[_OF_SYSTEM].append(path)
        elif path.is_symlink() and not path.is_file():
            left_out["are links to folders or to nothing"].append(path)
        elif _is_image(path):
            images.append(path)
        elif path.is_file():
            left_out["do not have the suffix of an image"].append(path)
    return images


def _is_of_system(path: Path, folder: Path) -> bool:
    """Whether a path below `folder` is a file of the system, or lies in a folder of the system."""
    parts = path.relative_to(folder).parts
    return any(part.lower() in _SYSTEM or part.upper().startswith("SYNOPHOTO_THUMB_") for part in parts)


def _is_image(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")


def _warn_beside(folder: Path, reason: str, left_out: dict[str, list[Path]]) -> None:
    """Warn of the files that are `left_out`, and of files beside the classes or splits in a folder."""
    beside = list(folder.iterdir())
    rest = {path for path in beside if path.is_dir()} - {*_folders(folder)}  # hidden, or of the system
    beside += [file for path in rest for file in path.rglob("*")]
    strays = _image_files(folder, left_out, [path for path in sorted(beside) if not path.is_dir()])
    _warn_left_out(folder, {reason: strays} | left_out)


def _warn_left_out(folder: Path, left_out: Mapping[str, Sequence[Path]]) -> None:
    reasons: list[str] = []
    for reason, files in left_out.items():
        names = [file.relative_to(folder).as_posix() for file in files]
        names = [name if name.isprintable() else repr(name) for name in names]  # a terminal obeys control characters
        if names:
            reasons.append(f"{len(names)} file(s) {reason} and are left out: {first_of(names)}")
    if reasons:
        warnings.warn(f"{folder}: {'; '.join(reasons)}", Note, stacklevel=3)


def _warn_merged(folder: Path, classes: Mapping[str, Sequence[Path]]) -> None:
    """Warn of classes with images in several sub-folders: these may be the real classes, or train and test."""
    merged: list[str] = []
    for name, files in classes.items():
        inner = {parts[1] for path in files if len(parts := path.relative_to(folder).parts) > 2}
        if len(inner) > 1:
            merged.append(f"{name} ({first_of(sorted(inner))})")
    if merged:
        told = first_of(merged, 3)
        note = f"{folder}: {len(merged)} of {len(classes)} classes hold several sub-folders with images: "
        note += told if told.isprintable() else repr(told)
        warnings.warn(
            f"{note}; each is read as one class, so move sub-folders up if they are classes", Note, stacklevel=3
        )


def _images(classes: Mapping[str, Sequence[Path]], names: list[str], preprocessing: Preprocessing) -> FolderImages:
    paths = [path for files in classes.values() for path in files]
    labels = labels_of((label for label, files in classes.items() for _ in files), names)
    return FolderImages(paths, labels, name="folder", classes=names, preprocessing=preprocessing)


def coco_file(folder: Path) -> Path | None:
    """The COCO file in a folder or its sub-folder `annotations`, as CVAT and Roboflow export it; None without one."""
    files = [path for where in (folder, folder / "annotations") for path in sorted(where.glob("[!.]*.json"))]
    found = [path for path in files if _read_coco(path) is not None]
    if len(found) > 1:
        named = " and ".join(path.relative_to(folder).as_posix() for path in found)
        raise ValueError(f"{folder} has {named}: keep one, or give each split a folder with its own file and images")
    return found[0] if found else None


def coco_classes(file: Path, images: Iterable[Path]) -> dict[str, list[Path]]:
    """The images of each category. The path of each image must end with its `file_name` in the COCO file.

    Images that are not listed, or have no category or several, are left out with a warning.
    """
    content, by_name = _read_coco(file) or {}, defaultdict[str, list[Path]](list)
    for path in images:  # a Mac may write an accented letter as two characters
        by_name[normalize("NFC", path.name)].append(path)
    try:
        names = {each["id"]: normalize("NFC", str(each["name"])).strip() for each in content["categories"]}
        files = {image["id"]: str(image["file_name"]).replace("\\", "/") for image in content["images"]}
        listed = {number: normalize("NFC", name) for number, name in files.items()}
        labels: dict[Any, set[str]] = {number: set() for number in listed}
        for annotation in content["annotations"]:
            labels[annotation["image_id"]].add(names[annotation["category_id"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a COCO file, or is damaged ({error!r}): export it again") from None
    classes, missing = defaultdict[str, list[Path]](list), list[str]()
    for number, name in listed.items():
        candidates = by_name.get(name.rpartition("/")[2], [])
        found = [path for path in candidates if normalize("NFC", f"/{path.as_posix()}").endswith(f"/{name}")]
        if len(found) != 1:
            missing.append(name)
        elif len(labels[number]) == 1:
            classes[next(iter(labels[number]))] += found
    if missing:
        raise ValueError(
            f"{file}: {len(missing)} of {len(listed)} images are missing beside it, or have an ambiguous name: "
            f"{first_of(missing)}; export it with its images"
        )
    counts, unlisted = [len(of_image) for of_image in labels.values()], sum(map(len, by_name.values())) - len(listed)
    several = sum(count > 1 for count in counts)
    reasons = [f"{unlisted} image(s) are not listed"] * (unlisted > 0)
    if several or 0 in counts:
        reasons.append(f"{counts.count(0)} image(s) have no category and {several} have several")
    if reasons:
        warnings.warn(f"{file}: {', '.join(reasons)}: these are left out", stacklevel=4)
    if not classes:
        raise ValueError(f"{file}: all {len(listed)} images lack a category or have several: give each image one")
    return classes


def _read_coco(path: Path) -> dict[str, Any] | None:
    """The content of a COCO file; None for another file."""
    with suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict) and all(isinstance(content.get(part), list) for part in _COCO_LISTS):
            return content
    return None
