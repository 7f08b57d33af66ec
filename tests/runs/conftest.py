"""The command line, for the tests of runs."""

from collections.abc import Callable

import pytest

from lam.cli import main

Lam = Callable[..., "pytest.CaptureResult[str]"]


@pytest.fixture
def lam(capsys: pytest.CaptureFixture[str]) -> Lam:
    """Run a command of `lam`, which must exit with `code`, and return the output of this command alone."""

    def done(*words: object, code: int = 0) -> "pytest.CaptureResult[str]":
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        return capsys.readouterr()

    return done
