"""Settings that must be numbers: errors name other values, and numbers of any type pass."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

import lam
from lam import losses, retrieval, vmf
from lam.datasets import TensorImages
from lam.hessians import ContrastiveCurvature, InfoNCECurvature
from lam.pairs import Pairs
from lam.utils.checks import check_at_least, check_margin, check_positive, check_share, unit_rows
from lam.vmf.embeddings import Embeddings

pytestmark = pytest.mark.usefixtures("as_in_production")

TEXT: Any = "a"
LIST: Any = [0.5]
NONE: Any = None


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: check_positive("x", TEXT), "x.*'a'"),
        (lambda: check_share("x", LIST), r"x.*\[0.5\]"),
        (lambda: check_margin(LIST), r"margin.*\[0.5\]"),
        (lambda: check_at_least("x", TEXT, 0), "x.*'a'"),
        (lambda: InfoNCECurvature(temperature=TEXT), "temperature.*'a'"),
        (lambda: ContrastiveCurvature(TEXT), "margin.*'a'"),
        (lambda: ContrastiveCurvature(1.0, negative_weight=TEXT), "negative_weight.*'a'"),
        (lambda: losses.Contrastive(margin=TEXT), "margin.*'a'"),
        (lambda: losses.Contrastive(margin=NONE), "Contrastive.*margin"),
        (lambda: losses.SupCon(temperature=TEXT), "temperature.*'a'"),
        (lambda: losses.VarCon(margin=TEXT), "margin.*'a'"),
        (lambda: lam.Laplace(margin=0.7, max_memory=TEXT), "max_memory.*'a'"),
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


ROWS = torch.nn.functional.normalize(torch.arange(12.0).reshape(4, 3) + 1)


def fitted() -> lam.BayesianEncoder:
    return lam.fit_features(ROWS, [0, 1] * 2, torch.eye(3), margin=0.7)


@pytest.mark.parametrize("given", [np.array([0.1, 0.9]), [0.1, 0.9]])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda given: retrieval.auroc(given, given), "in_distribution"),
        (lambda given: retrieval.auprc(torch.ones(2), given), "out_of_distribution"),
        (lambda given: retrieval.ausc(torch.ones(2).bool(), given), "uncertainty"),
        (lambda given: retrieval.sparsification(given, torch.ones(2)), "correct"),
        (lambda given: retrieval.recall_at_k(given, torch.ones(2).long(), k=1), "relevance"),
        (lambda given: retrieval.rank(given, k=1), "queries"),
        (lambda given: retrieval.rank(ROWS, given, k=1), "gallery"),
        (
            lambda given: lam.evaluate(fitted(), lam.HeldOut((ROWS, torch.tensor([0, 0, 1, 1])), soft_labels=given)),
            "soft_labels",
        ),
        (lambda given: vmf.bessel_ratio(3, given), "kappa"),
        (lambda given: vmf.mean_resultant_length(given, unbiased=True), "samples"),
        (lambda given: Embeddings(given, *[torch.ones(2)] * 3), "mean"),
        (lambda given: Embeddings(ROWS[:2], torch.ones(2), torch.ones(2), given), "variance"),
        (lambda given: Embeddings.from_samples(given, torch.ones(2)), "samples"),
        (lambda given: Pairs.by_label(given), "labels"),
        (lambda given: TensorImages(torch.zeros(2, 1, 8, 8), given, name="mine"), "labels"),
    ],
)
def test_arrays_and_lists_are_refused_by_name(call: Callable[[Any], object], name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*tensor.*torch.as_tensor\({name}\)"):
        call(given)


@pytest.mark.parametrize("name", ["features", "weight", "bias"])
def test_lists_of_stored_features_are_refused_by_name(name: str) -> None:
    given: Any = {"features": ROWS, "weight": ROWS, "bias": torch.zeros(4), name: [0.1, 0.9]}
    with pytest.raises(ValueError, match=rf"{name}.*tensor.*torch.as_tensor\({name}\)"):
        lam.fit_features(labels=[0, 1] * 2, margin=0.7, **given)
    if name == "weight":
        with pytest.raises(ValueError, match=r"weight.*\(D, P\).*\(2,\)"):
            lam.fit_features(ROWS, [0, 1] * 2, np.array([0.1, 0.9]), margin=0.7)


def test_a_table_is_refused_with_a_conversion_that_works() -> None:
    table: Any = pytest.importorskip("pandas").DataFrame(ROWS.numpy())
    with pytest.raises(ValueError, match=r"got DataFrame: give torch.tensor\(queries.to_numpy\(\)\)"):
        retrieval.rank(table, k=1)
    assert torch.equal(torch.tensor(table.to_numpy()), ROWS)


@pytest.mark.parametrize(
    ("value", "message"),
    [(0.0, r"\[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ...\] at index 1$"), (math.nan, "at index 1, column 1500")],
)
def test_a_wide_row_without_a_direction_is_named_in_few_words(value: float, message: str) -> None:
    rows = torch.ones(2, 1536)
    rows[1] = 0.0
    rows[1, 1500] = value
    with pytest.raises(ValueError, match=message):
        unit_rows("queries", rows)


def test_one_row_and_bare_directions_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"queries.*\(N, D\).*\(3,\).*queries\[None\]"):
        retrieval.rank(ROWS[0], ROWS, k=1)
    index, bare = retrieval.Index(3), cast(Any, ROWS)
    index.add(Embeddings(ROWS, torch.ones(4), torch.ones(4), torch.ones(4)), range(4))
    for call in (lambda: index.search(bare, 1), lambda: index.add(bare.numpy(), range(4))):
        with pytest.raises(ValueError, match=r"embeddings.*lam.Embeddings.*encoder.embed\(inputs\)"):
            call()
    with pytest.raises(ValueError, match=r"got 2: .*\[2:3\]"):
        Embeddings(ROWS, torch.ones(4), torch.ones(4), torch.ones(4))[cast(Any, 2)]
