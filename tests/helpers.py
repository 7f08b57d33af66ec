"""What several test files need."""

import inspect
from collections.abc import Callable
from typing import Any


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function without the type checks of test runs, so that its own errors can be seen."""
    return inspect.unwrap(function)
