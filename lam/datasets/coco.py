"""Classes of images from a COCO file with one category for each image; CVAT, Label Studio and Roboflow export it."""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lam.utils.checks import first_of
from lam.utils.tables import read_json

_PARTS = ("images", "annotations", "categories")


def coco_file(folder: Path) -> Path | None:
    """The COCO file in a folder or in its sub-folder `annotations`; None if there is no COCO file."""
    files = [path for where in (folder, folder / "annotations") for path in sorted(where.glob("[!.]*.json"))]
    found = [path for path in files if _read(path) is not None]
    if len(found) > 1:
        named = " and ".join(path.relative_to(folder).as_posix() for path in found)
        raise ValueError(f"{folder} has {named}: keep one, or give each split a folder with its own file and images")
    return found[0] if found else None


def coco_classes(file: Path, images: Iterable[Path]) -> dict[str, list[Path]]:
    """The images of each category. The path of each image must end with its `file_name` in the COCO file.

    Images without a category, or with several, are left out with a warning.
    """
    content, by_name = _read(file) or {}, defaultdict[str, list[Path]](list)
    for path in images:
        by_name[path.name].append(path)
    try:
        names = {category["id"]: str(category["name"]) for category in content["categories"]}
        listed = {image["id"]: str(image["file_name"]).replace("\\", "/") for image in content["images"]}
        labels: dict[Any, set[str]] = {number: set() for number in listed}
        for annotation in content["annotations"]:
            labels[annotation["image_id"]].add(names[annotation["category_id"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no COCO file, or is damaged ({error!r}): export it again") from None
    classes, missing = defaultdict[str, list[Path]](list), list[str]()
    for number, name in listed.items():
        candidates = by_name.get(name.rpartition("/")[2], [])
        found = [path for path in candidates if f"/{path.as_posix()}".endswith(f"/{name}")]
        if len(found) != 1:
            missing.append(name)
        elif len(labels[number]) == 1:
            classes[next(iter(labels[number]))] += found
    if missing:
        raise ValueError(
            f"{file}: {len(missing)} of {len(listed)} images are missing beside it, or have an ambiguous name: "
            f"{first_of(missing)}; export it with its images"
        )
    counts = [len(of_image) for of_image in labels.values()]
    if n_left_out := sum(count != 1 for count in counts):
        n_none = counts.count(0)
        warnings.warn(
            f"{file}: {n_none} image(s) have no category and {n_left_out - n_none} have several: these are left out",
            stacklevel=4,
        )
    if not classes:
        raise ValueError(f"{file}: all {len(listed)} images lack a category or have several: give each image one")
    return classes


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a COCO file; None for another file."""
    with suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict) and all(isinstance(content.get(part), list) for part in _PARTS):
            return content
    return None
