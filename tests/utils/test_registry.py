"""Errors for mistakes in an extension, at its registration or at its first use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lam
from lam import datasets, hessians, losses, methods
from lam.encoders import load as encoders
from lam.pairs import Pairs
from tests.encoders.small import fit

pytestmark = pytest.mark.usefixtures("as_in_production")


class Unmarked(hessians.Curvature):
    """A curvature without @dataclass."""

    temperature: float = 0.1

    def diagonal(self, n: Tensor, r: Tensor, pairs: Pairs) -> Tensor:
        return torch.ones(len(n), 1, n.shape[1])


@dataclass(frozen=True)
class Answering(hessians.Curvature):
    """A curvature with a given result."""

    result: Any = "a word"
    average: bool = True

    def diagonal(self, n: Tensor, r: Tensor, pairs: Pairs) -> Tensor:
        return self.result


class Half(methods.Deterministic):
    """A method with a field, but without @dataclass."""

    level: float = 1.0


@pytest.mark.parametrize(
    ("register", "entry", "message"),
    [
        (losses.register, len, "a loss must be a class derived from lam.losses.Loss, got <built-in"),
        (methods.register, Unmarked, "a method must be a class derived from lam.methods.Method, got <class"),
        (methods.register, 3, "a method must be a class derived from lam.methods.Method, got 3"),
        (methods.register, Half, r"Half must be a frozen dataclass: put @dataclass\(frozen=True\) above it"),
        (hessians.register, Unmarked, r"Unmarked must be a frozen dataclass: put @dataclass\(frozen=True\)"),
        (hessians.register, Answering(), "a curvature must be a class derived from lam.hessians.losses.Curvature, got"),
        (encoders.register, Half, "an encoder must be a class derived from lam.encoders.Encoder, got <class"),
    ],
)
def test_what_is_no_extension_of_its_kind_is_not_registered(
    register: Callable[[str, Any], None], entry: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        register("mine", entry)
    assert "mine" not in losses.LOSSES.keys() | methods.METHODS.keys() | hessians.CURVATURES.keys()


def test_a_name_is_a_word() -> None:
    wrong: Any
    for wrong in ("", None, losses.Contrastive):
        with pytest.raises(ValueError, match="the name of a loss must be a word, got"):
            losses.register(wrong, losses.Contrastive)


@pytest.mark.parametrize(
    ("result", "message"),
    [(0.5, "got float"), (None, "got NoneType"), (torch.ones(3), r"got Tensor of shape \(3,\)")],
)
def test_a_loss_that_is_no_number_is_refused(result: Any, message: str) -> None:
    class Mine(losses.Loss):
        def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
            return result

    with pytest.raises(ValueError, match=f"Mine._compute must return a tensor of one number, {message}"):
        Mine()(torch.eye(3), Pairs.by_label(torch.tensor([0, 0, 1])))


@pytest.mark.parametrize(("result", "given"), [("a word", "str"), (torch.ones(16, 3), r"\(16, 3\)"), (0.5, "float")])
def test_a_curvature_of_another_shape_is_refused(result: Any, given: str) -> None:
    with pytest.raises(ValueError, match=rf"Answering.diagonal must return .* \(16, T, 3\), T terms, got {given}"):
        fit(curvature=Answering(result))


def test_a_curvature_that_is_no_dataclass_is_refused() -> None:
    with pytest.raises(ValueError, match="Unmarked must be a frozen dataclass"):
        lam.Laplace(curvature=Unmarked())


def test_a_loader_of_data_gives_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = lambda *, seed=0: (1, 2, 3)  # noqa: E731
    monkeypatch.setattr(datasets, "DATASETS", {**datasets.DATASETS, "mine": wrong})
    with pytest.raises(ValueError, match="the loader of mine must return lam.datasets.Splits, got tuple"):
        datasets.load("mine")
