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
        (losses.register, len, "loss.*lam.losses.Loss.*<built-in"),
        (methods.register, Unmarked, "method.*lam.methods.Method.*<class"),
        (methods.register, 3, "method.*lam.methods.Method.*3"),
        (methods.register, Half, r"Half.*@dataclass\(frozen=True\)"),
        (hessians.register, Unmarked, r"Unmarked.*@dataclass\(frozen=True\)"),
        (hessians.register, Answering(), "curvature.*lam.hessians.losses.Curvature"),
        (encoders.register, Half, "encoder.*lam.encoders.Encoder.*<class"),
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
        with pytest.raises(ValueError, match="name of a loss.*word"):
            losses.register(wrong, losses.Contrastive)


@pytest.mark.parametrize(
    ("result", "message"),
    [(0.5, "got float"), (None, "got NoneType"), (torch.ones(3), r"Tensor.*\(3,\)")],
)
def test_a_loss_that_is_no_number_is_refused(result: Any, message: str) -> None:
    class Mine(losses.Loss):
        def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
            return result

    with pytest.raises(ValueError, match=f"Mine._compute.*tensor.*{message}"):
        Mine()(torch.eye(3), Pairs.by_label(torch.tensor([0, 0, 1])))


@pytest.mark.parametrize(("result", "given"), [("a word", "str"), (torch.ones(16, 3), r"\(16, 3\)"), (0.5, "float")])
def test_a_curvature_of_another_shape_is_refused(result: Any, given: str) -> None:
    with pytest.raises(ValueError, match=rf"Answering.diagonal must return .* \(16, T, 3\), T terms, got {given}"):
        fit(curvature=Answering(result))


def test_a_curvature_that_is_no_dataclass_is_refused() -> None:
    with pytest.raises(ValueError, match="Unmarked.*frozen dataclass"):
        lam.Laplace(curvature=Unmarked())


def test_a_loader_of_data_gives_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = lambda *, seed=0: (1, 2, 3)  # noqa: E731
    monkeypatch.setattr(datasets, "DATASETS", {**datasets.DATASETS, "mine": wrong})
    with pytest.raises(ValueError, match="loader.*lam.datasets.Splits.*tuple"):
        datasets.load("mine")
