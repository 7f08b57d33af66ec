"""Helpers of several test files."""

import inspect
from collections.abc import Callable
from typing import Any

from lam.gallery.gallery import Gallery
from lam.gallery.item import Item


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without the type checks of test runs, so that its own errors can be seen."""
    return inspect.unwrap(function)


def stored(gallery: Gallery, *, limit: int = 100) -> list[Item]:
    """The first items of a gallery, by id."""
    items = [gallery.get(info.id) for info in gallery.page(after="", limit=limit)]
    return [item for item in items if item is not None]
