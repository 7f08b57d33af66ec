"""Curvatures of losses by name."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from lam.hessians.losses.base import Curvature
from lam.hessians.losses.contrastive import ContrastiveCurvature
from lam.hessians.losses.cross_entropies import AnInfoNCECurvature, InfoNCECurvature, SupConCurvature, VarConCurvature
from lam.utils.registry import check_class, enter

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
    for name, cls in CURVATURES.items():
        if cls is type(curvature):
            return {"name": name, **asdict(record)}
    raise ValueError(f"{type(curvature).__name__} has no name: register it with lam.hessians.register")


def from_settings(settings: Mapping[str, Any]) -> Curvature:
    """The curvature from the result of `to_settings`; an unknown name or setting raises a `ValueError`."""
    name, options = settings.get("name"), {key: value for key, value in settings.items() if key != "name"}
    if name not in CURVATURES:
        known = ", ".join(CURVATURES)
        raise ValueError(f"curvature must be one of {known}, got {name!r}: register it with lam.hessians.register")
    cls: Any = CURVATURES[name]
    allowed = [field.name for field in fields(cls)]
    for key in options:
        if key not in allowed:
            raise ValueError(f"curvature {name} has no setting {key!r}: it has {', '.join(allowed)}")
    return cls(**options)
