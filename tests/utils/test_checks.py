"""Settings that are no numbers are refused by name; in an interpreter of its own, as tests check types before that."""

import subprocess
import sys

_ATTEMPTS = """
import numpy as np, torch
from lam import losses
from lam.hessians import ContrastiveCurvature, InfoNCECurvature
from lam.hessians.accumulate import StructureOptions
from lam.hessians.structures.diagonal import Diagonal
from lam.utils.checks import check_at_least, check_margin, check_positive, check_share

for attempt in (
    lambda: check_positive("x", "0.5"),
    lambda: check_share("x", [0.5]),
    lambda: check_margin({}),
    lambda: check_at_least("x", "1", 0),
    lambda: InfoNCECurvature(temperature="a"),
    lambda: ContrastiveCurvature("a"),
    lambda: ContrastiveCurvature(1.0, negative_weight="a"),
    lambda: losses.Contrastive(margin="a"),
    lambda: losses.SupCon(temperature="a"),
    lambda: losses.VarCon(margin="a"),
    lambda: StructureOptions(Diagonal, "4GB", None),
):
    try:
        attempt()
    except ValueError as error:
        print(error)
for number in (0.5, np.float32(0.5), torch.tensor(0.5), None):
    for check in (lambda: check_positive("x", number), lambda: check_margin(number)):
        check()
"""

_SAID = """\
x must be a number, got '0.5'
x must be a number, got [0.5]
margin must be a number, got {}
x must be a number, got '1'
temperature must be a number, got 'a'
margin must be a number, got 'a'
negative_weight must be a number, got 'a'
margin must be a number, got 'a'
temperature must be a number, got 'a'
margin must be a number, got 'a'
max_memory must be a number, got '4GB'
"""


def test_a_setting_that_is_no_number_is_refused_by_name() -> None:
    call = subprocess.run([sys.executable, "-c", _ATTEMPTS], capture_output=True, text=True, check=True)
    assert call.stdout == _SAID
