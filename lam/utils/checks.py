"""Checks of arguments that every room makes, in one wording; what they refuse is a `ValueError`."""

import inspect
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_finite(name: str, values: Tensor) -> None:
    """Refuse NaN and infinities in (N, ...) rows of numbers, naming the first row that holds one."""
    if not values.isfinite().all():
        places = (~values.isfinite()).nonzero()
        first = float(values[tuple(places[0])])
        raise ValueError(f"{name} must be finite, got {first} at index {int(places[0, 0])}")


def check_no_nan(name: str, values: Tensor) -> None:
    """Refuse NaN, naming where the first one stands; infinities have an order and may pass."""
    if values.isnan().any():
        raise ValueError(f"{name} must not hold NaN, got one at index {_first(values.isnan())}")


def positive_integer(name: str, value: Any) -> int:
    """A count as an `int`, also one of NumPy; what is no integer of at least 1 is refused."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return number


def integers(name: str, values: Any) -> Tensor:
    """A tensor, an array or a sequence of integers as an int64 tensor on the CPU.

    Floats, booleans and what int64 does not hold are refused.
    """
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {values.dtype}")
        return values.detach().cpu().long()
    array = np.asarray(values)
    if array.dtype.kind == "u" or (array.dtype.kind != "i" and array is not values):  # lists beyond int64 change type
        for value in np.asarray(values, dtype=object).flat:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} must be from -2⁶³ to 2⁶³ - 1, got {value}")
    if array.size and array.dtype.kind not in "iu":  # an empty list has no type of its own
        raise ValueError(f"{name} must be integers, got {array.dtype.name} in {type(values).__name__}")
    return torch.from_numpy(array.astype(np.int64))


def check_length(name: str, values: Tensor, reference: str, length: int) -> None:
    """Refuse anything but one value for each of `length` items, naming both shapes."""
    if values.shape != (length,):
        shape = tuple(values.shape)
        raise ValueError(f"{name} must have shape ({length},), one value for each of {reference}, got {shape}")


def unit_rows(name: str, vectors: Tensor) -> Tensor:
    """Rows scaled to length one in float64; what has no direction is refused.

    Float32 rows are of length one only to 6e-8, more than separates near neighbours of a tight cluster.

    Args:
        name: what the vectors are called in errors.
        vectors: (..., N, D) finite, non-zero rows.

    Returns:
        (..., N, D) float64 unit rows.

    Raises:
        ValueError: naming the first row that is not finite or all zero.
    """
    rows = vectors.double()
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if not (norm.isfinite().all() and norm.all()):
        flat = rows.flatten(0, -2)
        index = _first(~(flat.isfinite().all(1) & flat.any(1)))
        row = index % vectors.shape[-2]
        raise ValueError(f"{name} must be finite and not all zero, got {flat[index].tolist()} at index {row}")
    return rows / norm


def _first(mask: Tensor) -> int:
    return int(mask.nonzero()[0, 0])


def check_number(name: str, value: Any) -> None:
    """Refuse what no number can be read from without parsing, such as a text, and a boolean; None stands."""
    if isinstance(value, bool) or (value is not None and not hasattr(value, "__float__")):
        raise ValueError(f"{name} must be a number, got {value!r}")


def check_at_least(name: str, value: int | float | None, least: int | float) -> None:
    """Refuse a number below the least or not finite, and a fraction where the least is an integer; None stands."""
    check_number(name, value)
    if value is not None and not least <= value < math.inf:
        raise ValueError(f"{name} must be at least {least:g}, got {value}")
    if isinstance(least, int) and not (value is None or hasattr(value, "__index__")):
        raise ValueError(f"{name} must be an integer, got {value}")


def check_positive(name: str, value: int | float | None) -> None:
    """Refuse a number that is not positive and finite; None is no number and stands."""
    check_number(name, value)
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def check_margin(margin: float | None) -> None:
    """Refuse a margin outside (0, 2]; None stands."""
    check_number("margin", margin)
    if margin is not None and not 0 < margin <= 2:
        raise ValueError(f"margin must be in (0, 2], the distances on the unit sphere, got {margin}")


def check_share(name: str, value: float) -> None:
    """Refuse what lies outside (0, 1), as does NaN."""
    check_number(name, value)
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie in (0, 1), got {value}")


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Refuse a choice that is not allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def layers_without(unusable: Collection[str], paths: Collection[str]) -> str:
    """Advice for an error: which of these layers to name instead, or the last where none is left."""
    usable = [path for path in paths if path not in unusable]
    return f"leave it out, with layers={usable}" if usable else 'use layers="last"'


def check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse values of other types than the arguments of a function have, `name` in the error: why it failed.

    Which of several words an argument may be is left to the function.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # a quarter of a second to import

    parameters = inspect.signature(function).parameters
    kinds = {option: parameters[option].annotation for option in options if option in parameters}
    for option, kind in kinds.items():
        if kind is inspect.Parameter.empty or isinstance(kind, str):
            continue
        try:
            TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(
                options[option], strict=True
            )
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            if problem["type"] != "literal_error":
                raise ValueError(f"option {option} of {name}: {problem['msg']}, got {options[option]!r}") from None
