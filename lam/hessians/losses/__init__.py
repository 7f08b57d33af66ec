"""Curvatures of losses by name."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from lam.hessians.losses.base import Curvature
from lam.hessians.losses.contrastive import ContrastiveCurvature
from lam.hessians.losses.cross_entropies import AnInfoNCECurvature, InfoNCECurvature, SupConCurvature, VarConCurvature
from lam.utils.registry import check_class, enter, find, name_of

__all__ = ["from_settings", "to_settings"]  # `lam.hessians` exports the other names

CURVATURES: dict[str, type[Curvature]] = {
    "contrastive": ContrastiveCurvature,
    "supcon": SupConCurvature,
    "infonce": InfoNCECurvature,
    "varcon": VarConCurvature,
    "aninfonce": AnInfoNCECurvature,
}
"""Curvatures by their names in files; see `register`."""


def register(name: str, cls: type[Curvature]) -> None:
    """Register the curvature of another loss, so that encoders with this curvature can be saved and loaded.

    Args:
        name: name of the curvature in files.
        cls: a frozen dataclass derived from `Curvature`, with numbers, strings or booleans as fields.

    Raises:
        ValueError: if another class has the name, or if `cls` is not a dataclass derived from `Curvature`.
    """
    check_class("curvature", cls, Curvature, record=True)
    enter(CURVATURES, "curvature", name, cls)


def to_settings(curvature: Curvature) -> dict[str, Any]:
    """Name and settings of a curvature, as JSON; a class that is not registered raises a `ValueError`."""
    record: Any = curvature
    return {"name": name_of(CURVATURES, type(curvature), "lam.hessians.CURVATURES"), **asdict(record)}


def from_settings(settings: Mapping[str, Any]) -> Curvature:
    """The curvature from the result of `to_settings`; an unknown name or setting raises a `ValueError`."""
    options: dict[str, Any] = dict(settings)
    name = options.pop("name", None)
    cls = find(CURVATURES, "curvature", name, "lam.hessians.register")
    allowed = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
    for key in options:
        if key not in allowed:
            raise ValueError(f"curvature {name} has no setting {key!r}: it has {', '.join(allowed)}")
    return cls(**options)
