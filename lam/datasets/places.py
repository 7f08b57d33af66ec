"""The user's photographs of places: a folder of images and a table of their positions.

The table is places.csv in the folder. Its first line names the columns; all columns except these are ignored:

    path                    image file, relative to the folder
    x, y                    position in metres, or
    easting, northing       position in metres, or
    lat, lon                position in degrees
    role                    optional: query or database; without it every image is both
    area (or city)          optional: images of two areas never match; each area has its own coordinates
    split                   optional: train, validation (or val, valid, dev) or test (or eval)
    angle                   optional: compass angle in degrees, empty if unknown; read with angles=True

Tests use generated files.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64, Real
from torch import Tensor

from lam.datasets.base import ImageOptions, MissingDataError, Preview, labels_of, top_up
from lam.datasets.folder import FolderImages
from lam.datasets.published import SIZE, check_present
from lam.datasets.splits import PARTS, Splits
from lam.inputs.decoding import THUMBNAIL_SIDE
from lam.inputs.preprocessing import Preprocessing
from lam.utils.checks import check_share, is_real
from lam.utils.tables import Table, file_of

AREA_DISTANCE = 1e7
"""Least distance in metres between places in two areas."""

CELL = 7.0
"""Side in metres of the cells that group places. Places in one cell are less than 10 m apart."""

_NEAREST = 4  # number of database images that `limit` draws with each query

_METRES = (("x", "y"), ("easting", "northing"))
_DEGREES = ("lat", "lon")
_EQUATOR, _FLATTENING = 6378137.0, 1 / 298.257223563  # WGS 84


class PlaceImages(FolderImages):
    """N photographs with positions; an item is an image and its target (see `targets`).

    Attributes:
        labels: (N,) areas.
        positions: (N, X + 1) in metres; the last coordinate is 1e7 m times the label, so areas are far from each other.
        angles: (N,) compass angles in degrees, NaN if unknown; or None.

    Args:
        paths: N image files.
        labels: (N,) int64, areas.
        positions: (N, X) in metres, in the coordinate system of their area.
        name, preprocessing, is_query: as for `Dataset`; items that are not queries are the database.
        classes: names of the areas.
        angles: (N,) compass angles in degrees, also outside [0, 360).
        metadata: N mappings of further values by name, such as lat and lon; a gallery keeps them.

    Raises:
        ValueError: If arguments differ in length, a position is not finite, or an angle is infinite.
    """

    positions: Float64[Tensor, "N _"]
    angles: Float64[Tensor, " N"] | None
    metadata: tuple[Mapping[str, Any], ...]

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Int64[Tensor, " N"],
        positions: Real[Tensor, "N X"],
        *,
        name: str,
        classes: Sequence[str],
        preprocessing: Preprocessing,
        angles: Real[Tensor, " N"] | None = None,
        is_query: Bool[Tensor, " N"] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        per_item: Any = {"positions": positions, "angles": angles, "is_query": is_query}
        per_item["metadata"] = ({},) * len(paths) if metadata is None else tuple(metadata)
        super().__init__(paths, labels, name=name, classes=classes, preprocessing=preprocessing, **per_item)
        _check(self.paths, positions, angles)
        area = labels.double()[:, None] * AREA_DISTANCE
        self.positions = torch.cat([positions.double(), area], 1)
        self.angles = None if angles is None else angles.double()

    @property
    def targets(self) -> Float64[Tensor, "N _"]:
        """Positions for `lam.pairs.Relation`; the last column is the angles, if there are any."""
        return self.positions if self.angles is None else torch.cat([self.positions, self.angles[:, None]], 1)

    @property
    def groups(self) -> Int64[Tensor, " N"]:
        """The grid cell (N,) of each place. Batches of one cell hold matches; random batches hold hardly any match."""
        return (self.positions / CELL).floor().long().unique(dim=0, return_inverse=True)[1]

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "C H W"], Tensor]:
        target = self.positions[index]
        if self.angles is not None:
            target = torch.cat([target, self.angles[index, None]])
        return self.preprocessing(self.paths[index]), target

    def preview(self, index: int, *, side: int = THUMBNAIL_SIDE) -> Preview:
        return replace(super().preview(index, side=side), metadata=self.metadata[index])

    def _draw(self, n: int, seed: int) -> Int64[Tensor, " n"]:
        """Random queries with their nearest database images, so that most queries have matches."""
        from scipy.spatial import KDTree

        generator = torch.Generator().manual_seed(seed)
        everything = torch.arange(len(self))
        queries = everything if self.is_query is None else everything[self.is_query]
        database = everything if self.is_query is None else everything[~self.is_query]
        if min(len(queries), len(database)) == 0:
            return top_up([], n, len(self), generator)
        anchors = queries[torch.randperm(len(queries), generator=generator)[:n]]
        tree = KDTree(self.positions[database].numpy())
        ranks = list(range(1, min(_NEAREST, len(database)) + 1))
        _, near = tree.query(self.positions[anchors].numpy(), k=ranks)  # pyright: ignore[reportArgumentType]
        groups = torch.cat([anchors[:, None], database[torch.as_tensor(near)]], 1)
        return top_up(groups.flatten().tolist(), n, len(self), generator)


def _check(paths: Sequence[Path], positions: Tensor, angles: Tensor | None) -> None:
    if positions.ndim != 2 or not is_real(positions):
        raise ValueError(f"positions must be numbers of shape (N, X), got {positions.dtype} {tuple(positions.shape)}")
    checks = [(positions, ~positions.isfinite().all(1), "positions must be finite")]
    checks += [] if angles is None else [(angles, angles.isinf(), "angles must be degrees, or NaN if unknown")]
    for values, is_invalid, rule in checks:
        for index in is_invalid.nonzero().flatten().tolist():
            raise ValueError(f"{rule}, got {values[index].tolist()} for {paths[index]}")


def splits(
    *,
    root: str | Path,
    csv: str = "places.csv",
    preprocessing: ImageOptions = None,
    validation: float = 0.2,
    test: float = 0.2,
    angles: bool = False,
    allow_missing: bool = False,
) -> Splits:
    """Photographs of places in three splits, as in the column `split`, at 227 pixels; see `lam.datasets.load`.

    Without this column, each area is cut across its longest side into strips for training, validation and testing, in
    this order. Then only few places are in two splits.

    Args:
        csv: the table, relative to the folder `root`; see `Table.read`.
        validation, test: fractions of the images of each area, if there is no column `split`.
        angles: whether to read the column `angle`; it becomes the last column of the targets.
        allow_missing: whether missing images are left out with a warning.
    """
    preprocessing = Preprocessing.of(preprocessing, SIZE)
    root = Path(root).expanduser()
    table = _table(root, csv)
    columns, positions = _positions(table)
    paths = [file_of(root, path) for path in table.columns["path"]]
    area = ["everywhere"] * len(paths)
    name = next((name for name in ("area", "city") if name in table), None)
    if name is not None and any(table.columns[name]):
        table.check(name, bool, "not be empty", advice="images without one would match no image of an area")
        area = table.columns[name]
    names = sorted(set(area))
    labels = labels_of(area, names)
    if "split" in table:
        numbers = {name: number for number, names_of_part in enumerate(PARTS.values()) for name in names_of_part}
        table.check_choices("split", tuple(numbers))
        part = torch.tensor([numbers[name.lower()] for name in table.columns["split"]])
    else:
        part = _strips(positions, labels, validation=validation, test=test)
    is_query = None
    if "role" in table:
        table.check_choices("role", ("query", "database"))
        is_query = torch.tensor([role.lower() == "query" for role in table.columns["role"]])
    if angles and "angle" not in table:
        raise ValueError(f"{table.path} has no column angle; leave out angles=True")
    present = check_present(paths, annotated_in=table.path, allow_missing=allow_missing)
    places = PlaceImages(
        paths,
        labels,
        positions,
        name="places",
        classes=names,
        preprocessing=preprocessing,
        angles=table.numbers("angle", unknown=True) if angles else None,
        is_query=is_query,
        metadata=[dict(zip(columns, row, strict=True)) for row in _numbers(table, columns).tolist()],
    )
    parts: dict[str, Any] = {}
    for number, name in enumerate(PARTS):
        rows = ((part == number) & present).nonzero().flatten()
        if len(rows) == 0:
            raise ValueError(f"{table.path} leaves no image for {name}: add images, or a column split")
        parts[name] = places.subset(rows)
    return Splits(**parts, gallery="identities")


def _table(root: Path, csv: str) -> Table:
    path = root / csv
    if not path.is_file():
        raise MissingDataError(
            f"places: {path} is missing: write a line for each image there, after a line of column names: path, and x "
            "and y in metres or lat and lon in degrees"
        )
    table = Table.read(path, needed=("path",))
    paths = table.columns["path"]
    if not paths:
        raise ValueError(f"{path} names no image: write a line for each image")
    name, times = Counter(paths).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{path} must name each image once, got {name} {times} times")
    return table


def _numbers(table: Table, columns: Sequence[str]) -> Float64[Tensor, "N 2"]:
    return torch.stack([table.numbers(name) for name in columns], 1)


def _positions(table: Table) -> tuple[Sequence[str], Float64[Tensor, "N X"]]:
    """The columns that hold positions, and the positions in metres."""
    for names in _METRES:
        if all(name in table for name in names):
            return names, _numbers(table, names)
    if not all(name in table for name in _DEGREES):
        raise ValueError(
            f"{table.path} has no positions: it needs the columns x and y, or easting and northing, in metres, or lat "
            f"and lon in degrees; it has {', '.join(table.columns)}"
        )
    degrees = _numbers(table, _DEGREES)
    for name, limit in zip(_DEGREES, (90, 180), strict=True):
        table.check(name, lambda text, limit=limit: abs(float(text)) <= limit, f"be from -{limit} to {limit} degrees")
    if len(nowhere := (degrees == 0).all(1).nonzero()):
        raise ValueError(
            f"{table.path}: lat and lon are both 0 in {len(nowhere)} rows, such as {table.unit} "
            f"{table.lines[int(nowhere[0])]}: cameras write this for an unknown position; leave these images out"
        )
    return _DEGREES, earth_centred(degrees)


def earth_centred(degrees: Float64[Tensor, "N 2"]) -> Float64[Tensor, "N 3"]:
    """Coordinates of latitudes φ and longitudes λ on the WGS 84 ellipsoid, in metres from the centre of the earth.

    x = ν cos φ cos λ, y = ν cos φ sin λ, z = (1 − e²) ν sin φ with ν = a / √(1 − e² sin² φ), equatorial radius a and
    eccentricity e. Distances are straight lines: at 10 km, they are 1 mm shorter than along the ground.

    Source: National Imagery and Mapping Agency (2000), TR8350.2, Department of Defense World Geodetic System 1984,
        equation 4-14, at height 0.

    Example:
        >>> equator = earth_centred(torch.tensor([[0.0, 0.0], [0.0, 0.001]], dtype=torch.float64))
        >>> round(float((equator[1] - equator[0]).norm()), 3)
        111.319
    """
    latitude, longitude = degrees.deg2rad().T
    e_square = _FLATTENING * (2 - _FLATTENING)
    radius = _EQUATOR / (1 - e_square * latitude.sin() ** 2).sqrt()
    across = radius * latitude.cos()
    up = (1 - e_square) * radius * latitude.sin()
    return torch.stack([across * longitude.cos(), across * longitude.sin(), up], 1)


def _strips(
    positions: Float64[Tensor, "N X"], labels: Int64[Tensor, " N"], *, validation: float, test: float
) -> Int64[Tensor, " N"]:
    check_share("validation", validation)
    check_share("test", test)
    if validation + test >= 1:
        raise ValueError(f"validation and test must have a sum below 1, got {validation} and {test}")
    bounds = torch.tensor([1 - validation - test, 1 - test], dtype=torch.float64)
    part = torch.empty_like(labels)
    for area in labels.unique():
        members = (labels == area).nonzero().flatten()
        extent = positions[members].max(0).values - positions[members].min(0).values
        along = positions[members, int(extent.argmax())].argsort(stable=True)
        place = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
        part[members[along]] = torch.searchsorted(bounds, place)
    return part
