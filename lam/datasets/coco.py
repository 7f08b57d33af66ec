"""Labels of images in a COCO file, as CVAT, Label Studio and Roboflow export it: one category an image."""

import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lam.utils.tables import read_json

_PARTS = ("images", "annotations", "categories")
_SHOWN = 5


def coco_file(folder: Path) -> Path | None:
    """The COCO file in a folder, or in its folder `annotations`; None where there is none.

    Raises:
        ValueError: for several.
    """
    files = [path for where in (folder, folder / "annotations") for path in sorted(where.glob("[!.]*.json"))]
    found = [path for path in files if _read(path) is not None]
    if len(found) > 1:
        named = " and ".join(path.relative_to(folder).as_posix() for path in found)
        raise ValueError(f"{folder} has {named}: keep one, or give each part a folder with its own file and images")
    return found[0] if found else None


def coco_classes(file: Path, images: Iterable[Path]) -> dict[str, list[Path]]:
    """The images of each category. Those without a category, or with several, are left out with a warning.

    Args:
        file: as `coco_file` finds it.
        images: that its names may stand for, which are looked up by the end of their paths.

    Raises:
        ValueError: for a file that is damaged, images that are not there, or no image with one category.
    """
    content, by_name = _read(file) or {}, dict[str, list[Path]]()
    for path in images:
        by_name.setdefault(path.name, []).append(path)
    try:
        names = {category["id"]: str(category["name"]) for category in content["categories"]}
        listed = {image["id"]: str(image["file_name"]).replace("\\", "/") for image in content["images"]}
        labels: dict[Any, set[str]] = {number: set() for number in listed}
        for annotation in content["annotations"]:
            labels[annotation["image_id"]].add(names[annotation["category_id"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no COCO file, or is damaged ({error!r}): export it again") from None
    found = {number: _found(name, by_name) for number, name in listed.items()}
    if missing := [listed[number] for number, path in found.items() if path is None]:
        more = ", ..." if len(missing) > _SHOWN else ""
        raise ValueError(
            f"{file}: {len(missing)} of {len(listed)} images are not beside it, or there is more than one of the name: "
            f"{', '.join(missing[:_SHOWN])}{more}; export it with its images"
        )
    classes: dict[str, list[Path]] = {}
    for number, path in found.items():
        if path is not None and len(labels[number]) == 1:
            classes.setdefault(next(iter(labels[number])), []).append(path)
    n_none, n_several = (sum(map(wrong, labels.values())) for wrong in (lambda of: not of, lambda of: len(of) > 1))
    if n_none or n_several:
        warnings.warn(
            f"{file}: {n_none} image(s) have no category and {n_several} have several: these are left out", stacklevel=4
        )
    if not classes:
        raise ValueError(f"{file}: none of {len(listed)} images has one category")
    return classes


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a COCO file; None of any other."""
    with suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict) and all(isinstance(content.get(part), list) for part in _PARTS):
            return content
    return None


def _found(name: str, by_name: dict[str, list[Path]]) -> Path | None:
    """The one image whose path ends in a name."""
    paths = [path for path in by_name.get(name.rpartition("/")[2], []) if f"/{path.as_posix()}".endswith(f"/{name}")]
    return paths[0] if len(paths) == 1 else None
