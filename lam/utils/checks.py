"""Checks of arguments, with one wording for all of lam; each raises a `ValueError`."""

import inspect
import math
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_tensor(name: str, values: Any) -> None:
    """Require a tensor, not an array or a list."""
    if not isinstance(values, Tensor):
        # torch cannot read a table, and an array of a table may be read-only
        tensor = f"tensor({name}.to_numpy())" if hasattr(values, "to_numpy") else f"as_tensor({name})"
        raise ValueError(f"{name} must be a tensor, got {type(values).__name__}: give torch.{tensor}")


def is_real(values: Tensor) -> bool:
    """Whether a tensor holds integers or floating-point numbers, not complex numbers or booleans."""
    return not values.is_complex() and values.dtype != torch.bool


def check_finite(name: str, values: Tensor) -> None:
    """Require finite numbers (N, ...); the error names the first row with another value."""
    check_tensor(name, values)
    if not values.isfinite().all():
        place = (~values.isfinite()).nonzero()[0]
        raise ValueError(f"{name} must be finite, got {float(values[tuple(place)])} at index {int(place[0])}")


def check_no_nan(name: str, values: Tensor) -> None:
    """Require numbers that can be sorted: infinities, but no NaN. The error names the first row with NaN."""
    check_tensor(name, values)
    if values.isnan().any():
        raise ValueError(f"{name} must not hold NaN, got one at index {_first(values.isnan())}")


def check_distributions(name: str, rows: Tensor) -> None:
    """Require rows of probabilities; the error names the first row with a negative value or a sum that is not 1."""
    wrong = (~((rows >= 0).all(1) & ((rows.sum(1) - 1).abs() < 1e-3))).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise ValueError(f"{name} must be at least 0 and add up to 1, got {rows[row].tolist()} at row {row}")


def positive_integer(name: str, value: Any) -> int:
    """A Python or NumPy integer of at least 1, as an `int`."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return number


def integers(name: str, values: Any) -> Tensor:
    """A tensor, an array or a sequence of integers as an int64 tensor on the CPU; floats and booleans are rejected."""
    if isinstance(values, Tensor) and values.dtype == torch.uint64:
        values = values.numpy(force=True)
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {values.dtype}")
        return values.detach().cpu().long()
    array = np.asarray(values)
    if array.dtype.kind == "u" or (array.dtype.kind != "i" and array is not values):  # lists beyond int64 change type
        for value in np.asarray(values, dtype=object).flat:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} must be from -2⁶³ to 2⁶³ - 1, got {value}")
    if array.size and array.dtype.kind not in "iu":  # an empty list becomes an array of floats
        raise ValueError(f"{name} must be integers, got {array.dtype.name} in {type(values).__name__}")
    return torch.from_numpy(array.astype(np.int64))


def booleans(name: str, values: Tensor) -> Tensor:
    """A tensor of booleans, or of the numbers 0 and 1, as booleans.

    Without this step, `~values` of integers would be −1 and −2, and `scores[values]` would take items 0 and 1.
    """
    check_tensor(name, values)
    truth = values.bool()
    if (wrong := truth != values).any():
        raise ValueError(f"{name} must be booleans, or 0 and 1, got {values[wrong][0].item()}")
    return truth


def check_length(name: str, values: Tensor, reference: str, length: int) -> None:
    """Require one value for each of `length` items; `reference` names the items."""
    check_tensor(name, values)
    if values.shape != (length,):
        actual = tuple(values.shape)
        raise ValueError(f"{name} must have shape ({length},), one value for each of {reference}, got {actual}")


def unit_tolerance(dtype: torch.dtype, *, least: float = 1e-4) -> float:
    """Greatest deviation of a unit vector's length or its square from 1: `least`, or more if `dtype` rounds more."""
    return max(least, 2 * torch.finfo(dtype).eps)


def unit_rows(name: str, vectors: Tensor) -> Tensor:
    """Rows (..., N, D) scaled to length one in float64; the error names the first row that is not finite or all zero.

    Float32 rows would have length one only to within 6e-8; cosines in a tight cluster can differ by less.
    """
    check_tensor(name, vectors)
    if vectors.ndim < 2:
        raise ValueError(
            f"{name} must be rows, (N, D), got shape {tuple(vectors.shape)}: give {name}[None] for one row"
        )
    rows = vectors.double()
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if not (norm.isfinite().all() and norm.all()):
        flat, length = rows.flatten(0, -2), norm.flatten()
        index = _first(~(length.isfinite() & (length > 0)))
        row = index % vectors.shape[-2]
        got = reprlib.repr(flat[index].tolist())  # its first six numbers
        column = "" if not (wrong := ~flat[index].isfinite()).any() else f", column {_first(wrong)}"
        raise ValueError(f"{name} must be finite and not all zero, got {got} at index {row}{column}")
    return rows / norm


def _first(mask: Tensor) -> int:
    return int(mask.nonzero()[0, 0])


def check_number(name: str, value: Any) -> None:
    """Require a number: strings and booleans are rejected, None passes."""
    if isinstance(value, bool) or (value is not None and not hasattr(value, "__float__")):
        raise ValueError(f"{name} must be a number, got {value!r}")


def check_at_least(name: str, value: int | float | None, least: int | float) -> None:
    """Require a finite number of at least `least`, an integer if `least` is an integer; None passes."""
    check_number(name, value)
    if value is not None and not least <= value < math.inf:
        raise ValueError(f"{name} must be at least {least:g}, got {value}")
    if isinstance(least, int) and not (value is None or hasattr(value, "__index__")):
        raise ValueError(f"{name} must be an integer, got {value}")


def check_positive(name: str, value: int | float | None) -> None:
    """Require a positive, finite number; None passes."""
    check_number(name, value)
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def check_margin(margin: float | None) -> None:
    """Require a margin in (0, 2]; None passes."""
    check_number("margin", margin)
    if margin is not None and not 0 < margin <= 2:
        raise ValueError(f"margin must be in (0, 2], the distances on the unit sphere, got {margin}")


def check_share(name: str, value: float) -> None:
    """Require a number in (0, 1)."""
    check_number(name, value)
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie in (0, 1), got {value}")


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Require one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_names(name: str, names: Sequence[str]) -> None:
    """Require a tuple of words; a single word would count as its letters."""
    if isinstance(names, str):
        raise ValueError(f"{name} must be a tuple of words, got {names!r}: give ({names!r},)")


def first_of(items: Sequence[object], n: int = 5) -> str:
    """The first n items as text, for an error."""
    return ", ".join(map(str, items[:n])) + (", ..." if len(items) > n else "")


def layers_without(unusable: Collection[str], paths: Collection[str]) -> str:
    """Advice for an error: the usable layers among `paths`, or the last layer if all are unusable."""
    usable = [path for path in paths if path not in unusable]
    return f"leave it out, with layers={usable}" if usable else 'use layers="last"'


def check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for the first option with another type than the annotation of the function's argument.

    The function itself checks options whose type is a choice of words.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # a tenth of a second to import

    parameters = inspect.signature(function).parameters
    for option, value in options.items():
        kind = parameters[option].annotation if option in parameters else ""
        if kind is inspect.Parameter.empty or isinstance(kind, str):
            continue
        try:
            TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            if problem["type"] != "literal_error":
                raise ValueError(f"option {option} of {name}: {problem['msg']}, got {value!r}") from None
