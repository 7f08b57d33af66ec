"""Mapillary Street-Level Sequences (MSLS): 1.6 million photographs of 30 cities, in the layout of their authors.

    train_val/<city>/{query, database}/
        postprocessed.csv       key, easting, northing (metres, in the city's UTM zone)
        raw.csv                 key, pano, ca (compass angle in degrees)
        subtask_index.csv       key and a column for each subtask: all, s2w, w2s, o2n, n2o, d2n, n2d
        images/<key>.jpg

Single images are retrieved, not sequences (seq_info.csv). Panoramas are left out, as in the authors' code. Positions
in the authors' test cities (`UNPUBLISHED`) are not published. So `TEST` holds the authors' validation cities, as in
most papers, and `VALIDATION` holds two of their training cities. Tests use generated files in this layout, not the
original files.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Literal, get_args

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lam.datasets.base import ImageOptions
from lam.datasets.places import PlaceImages
from lam.datasets.published import SIZE, Source, check_present
from lam.datasets.splits import Splits
from lam.inputs.preprocessing import Preprocessing
from lam.utils.checks import check_choice
from lam.utils.tables import Table

Subtask = Literal["all", "s2w", "w2s", "o2n", "n2o", "d2n", "n2d"]

TRAIN = (
    "trondheim", "london", "boston", "melbourne", "amsterdam", "helsinki", "tokyo", "toronto", "saopaulo", "moscow",
    "paris", "bangkok", "budapest", "austin", "berlin", "ottawa", "phoenix", "goa", "nairobi", "manila",
)  # fmt: skip
VALIDATION = ("zurich", "amman")
TEST = ("cph", "sf")
UNPUBLISHED = ("miami", "athens", "buenosaires", "stockholm", "bengaluru", "kampala")

_ROLES = ("query", "database")
_SUBTASKS = "subtask_index.csv"  # not needed for training
_FILES = ("postprocessed.csv", "raw.csv", _SUBTASKS, "images")
_SOURCE = Source(
    "msls",
    "Unpack metadata.zip and images_vol_1.zip to images_vol_6.zip there, from https://www.mapillary.com/dataset/places "
    "(free, after registration), or name the existing cities with train_cities, validation_cities, test_cities.",
)


def splits(
    *,
    root: str | Path | None = None,
    preprocessing: ImageOptions = None,
    train_cities: Sequence[str] = TRAIN,
    validation_cities: Sequence[str] = VALIDATION,
    test_cities: Sequence[str] = TEST,
    subtask: Subtask = "all",
    angles: bool = False,
    allow_missing: bool = False,
) -> Splits:
    """Photographs of places, divided into queries and a database in each city, at 227 pixels; see `lam.datasets.load`.

    Source: F. Warburg, S. Hauberg, M. Lopez-Antequera, P. Gargallo, Y. Kuang and J. Civera (2020); cities as in the
        authors' mapillary_sls, except that zurich and amman, two of its 22 training cities, are held out.

    Args:
        root: folder of train_val; $LAM_DATA/msls by default.
        train_cities, validation_cities, test_cities: cities of each split.
        subtask: the subtask that selects validation and test images; training uses all images, as in the authors' code.
        angles: whether to read the compass angle `ca`; it becomes the last column of the targets.
        allow_missing: whether missing images are left out with a warning.
    """
    preprocessing = Preprocessing.of(preprocessing, SIZE)
    parts = {"train": train_cities, "validation": validation_cities, "test": test_cities}
    _check(parts, subtask)
    cities = [city for part in parts.values() for city in part]
    top = _SOURCE.roots(root)[0] / "train_val"
    files = [(city, top / city / role / name) for city in cities for role in _ROLES for name in _FILES]
    needed = [file for city, file in files if file.name != _SUBTASKS or city not in train_cities]
    if missing := [file for file in needed if not file.exists()]:
        raise _SOURCE.missing(missing)
    places: dict[str, PlaceImages] = {}
    for part, part_cities in parts.items():
        part_subtask = None if part == "train" else subtask
        options = {"angles": angles, "allow_missing": allow_missing}
        rows = [_read(top / city / role, part_subtask, **options) for city in part_cities for role in _ROLES]
        paths, positions, compass = zip(*rows, strict=True)
        counts = torch.tensor([len(of_folder) for of_folder in paths])
        labels = torch.tensor([cities.index(city) for city in part_cities for _ in _ROLES])
        places[part] = PlaceImages(
            [path for of_folder in paths for path in of_folder],
            labels.repeat_interleave(counts),
            torch.cat(positions),
            name="msls",
            classes=cities,
            preprocessing=preprocessing,
            angles=torch.cat(compass) if angles else None,
            is_query=torch.tensor([role == "query" for _ in part_cities for role in _ROLES]).repeat_interleave(counts),
        )
    return Splits(places["train"], places["validation"], places["test"], gallery="identities")


def _read(
    folder: Path, subtask: str | None, *, angles: bool, allow_missing: bool
) -> tuple[list[Path], Float64[Tensor, "N 2"], Float64[Tensor, " N"]]:
    """Images, positions and angles (NaN if not read) from a city's folder `query` or `database`."""
    table = Table.read(folder / "postprocessed.csv", needed=("key", "easting", "northing"))
    raw = Table.read(folder / "raw.csv", needed=("key", "pano", *(("ca",) if angles else ())))
    keys = table.columns["key"]
    raw_rows = _rows_of(raw, keys)
    selected = ~raw.booleans("pano")[raw_rows]
    if subtask is not None:
        index = Table.read(folder / _SUBTASKS, needed=("key", subtask))
        selected &= index.booleans(subtask)[_rows_of(index, keys)]
    rows = selected.nonzero().flatten()
    paths = [folder / "images" / f"{keys[row]}.jpg" for row in rows.tolist()]
    present = check_present(paths, annotated_in=table.path, allow_missing=allow_missing)
    rows = rows[present]
    positions = torch.stack([table.numbers("easting"), table.numbers("northing")], 1)
    compass = raw.numbers("ca", unknown=True)[raw_rows] if angles else positions.new_full((len(keys),), torch.nan)
    return list(compress(paths, present.tolist())), positions[rows], compass[rows]


def _rows_of(table: Table, keys: Sequence[str]) -> Int64[Tensor, " N"]:
    """The row of each key."""
    rows = {key: row for row, key in enumerate(table.columns["key"])}
    if unknown := [key for key in keys if key not in rows]:
        raise ValueError(
            f"{table.path} lacks {len(unknown)} of {len(keys)} images, the first {unknown[0]}; get it again"
        )
    return torch.tensor([rows[key] for key in keys], dtype=torch.int64)


def _check(parts: Mapping[str, Sequence[str]], subtask: str) -> None:
    check_choice("subtask", subtask, get_args(Subtask))
    cities = [city for part in parts.values() for city in part]
    for name, part in parts.items():
        if isinstance(part, str) or not part:
            raise ValueError(f"{name}_cities must be a list of cities, got {part!r}")
        if unpublished := [city for city in part if city in UNPUBLISHED]:
            raise ValueError(
                f"{name}_cities: the positions of {', '.join(unpublished)} are not published, so metrics are unknown; "
                "use other cities"
            )
    if repeated := sorted({city for city in cities if cities.count(city) > 1}):
        raise ValueError(f"a city must be in only one split, got {', '.join(repeated)} twice")
