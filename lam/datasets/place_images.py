"""Photographs of places: image files with positions in metres. Places in different areas never match."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64, Real
from torch import Tensor

from lam.datasets.base import top_up
from lam.datasets.folder import FolderImages
from lam.inputs.preprocessing import Preprocessing
from lam.utils.checks import is_real

AREA_DISTANCE = 1e7
"""Least distance in metres between places in two areas."""

CELL = 7.0
"""Side in metres of the cells that group places. Places in one cell are less than 10 m apart."""

_NEAREST = 4  # number of database images that `limit` draws with each query


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

    Raises:
        ValueError: If arguments differ in length, a position is not finite, or an angle is infinite.
    """

    positions: Float64[Tensor, "N _"]
    angles: Float64[Tensor, " N"] | None

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
    ) -> None:
        per_item: Any = {"positions": positions, "angles": angles, "is_query": is_query}
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
