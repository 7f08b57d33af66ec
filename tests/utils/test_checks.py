"""Settings that are no numbers are refused by name; what is a number passes, of whatever kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lam import losses
from lam.hessians import ContrastiveCurvature, InfoNCECurvature
from lam.hessians.accumulate import StructureOptions
from lam.hessians.structures.diagonal import Diagonal
from lam.utils.checks import check_at_least, check_margin, check_positive, check_share

pytestmark = pytest.mark.usefixtures("as_in_production")

TEXT: Any = "a"
LIST: Any = [0.5]
NONE: Any = None


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: check_positive("x", TEXT), "x must be a number, got 'a'"),
        (lambda: check_share("x", LIST), r"x must be a number, got \[0.5\]"),
        (lambda: check_margin(LIST), r"margin must be a number, got \[0.5\]"),
        (lambda: check_at_least("x", TEXT, 0), "x must be a number, got 'a'"),
        (lambda: InfoNCECurvature(temperature=TEXT), "temperature must be a number, got 'a'"),
        (lambda: ContrastiveCurvature(TEXT), "margin must be a number, got 'a'"),
        (lambda: ContrastiveCurvature(1.0, negative_weight=TEXT), "negative_weight must be a number, got 'a'"),
        (lambda: losses.Contrastive(margin=TEXT), "margin must be a number, got 'a'"),
        (lambda: losses.Contrastive(margin=NONE), "Contrastive needs a margin in"),
        (lambda: losses.SupCon(temperature=TEXT), "temperature must be a number, got 'a'"),
        (lambda: losses.VarCon(margin=TEXT), "margin must be a number, got 'a'"),
        (lambda: StructureOptions(Diagonal, TEXT, None), "max_memory must be a number, got 'a'"),
    ],
)
def test_a_setting_that_is_no_number_is_refused_by_name(attempt: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt()


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), torch.tensor(0.5), None])
def test_numbers_of_numpy_and_torch_pass(number: Any) -> None:
    check_positive("x", number)
    check_margin(number)
    check_at_least("x", number, 0.0)
