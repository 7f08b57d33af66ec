"""An empty store, for the tests of galleries."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lam.gallery.store import FILE, ItemStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ItemStore]:
    with closing(ItemStore(tmp_path / FILE)) as opened:
        yield opened
