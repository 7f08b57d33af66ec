"""Wrong dimensions and types are refused by lam itself, before native code: without `assert`, and without pytest."""

import json
import re

import pytest

from tests.encoders.wrong_shapes import TYPES, wrong
from tests.helpers import run_python

pytestmark = pytest.mark.long

SHAPED = [name for name in wrong(8) if name not in map(str, TYPES)]


@pytest.fixture(scope="module", params=["", "-O"])
def told(request: pytest.FixtureRequest) -> dict[str, str]:
    options = [option for option in ("-W", "error", request.param) if option]
    found = json.loads(run_python(*options, "-m", "tests.encoders.wrong_shapes").stdout)
    assert found["optimised"] == (request.param == "-O")
    return found["told"]


def test_an_index_refuses_them_and_keeps_what_it_has(told: dict[str, str]) -> None:
    for verb in ("add", "search"):
        for name in SHAPED[:4]:
            assert told[f"{verb}, {name}"].startswith("ValueError: embeddings must have dimension 8, got"), name
        for name in SHAPED[4:]:
            assert told[f"{verb}, {name}"].startswith("ValueError: mean must have shape (N, D)"), name
        for kind in TYPES:
            assert re.fullmatch(f"ValueError: mean.*floating-point.*{kind}", told[f"{verb}, {kind}"])
    assert told["held"] == "[7, 8, 9]"


def test_an_encoder_refuses_them(told: dict[str, str]) -> None:
    for name in SHAPED[:4]:
        assert told[f"embed, {name}"].startswith("ValueError: features must be (N, P) and weight (D, P), got"), name
    for name in (*SHAPED[4:], "torch.complex64"):
        assert told[f"embed, {name}"].startswith("ValueError: features must be real numbers of shape (N, P)"), name
    for whole in ("torch.int64", "torch.bool"):  # these are numbers of any type
        assert told[f"embed, {whole}"].startswith("returned Embeddings")
