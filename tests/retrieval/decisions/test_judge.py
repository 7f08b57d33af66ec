"""`judge` on hits of any store: the decisions of lam's own index, and errors for hits that break the contract."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lam.retrieval import Calibration, CalibrationData, Choices, Index, Targets, calibrate, calibrate_vectors, judge
from lam.retrieval.decisions.conformal import least_rate
from lam.retrieval.index.hits import label_numbers
from lam.retrieval.metrics.open_set import search_open_set
from lam.utils.notes import Note
from lam.vmf.embeddings import Embeddings

G, Q, D = 300, 200, 8
CHOICES = Choices(Targets(far=0.05, ood=0.1, conformal_miss=0.1))


def items(n: int, seed: int, *, classes: int = 6) -> tuple[Embeddings, list[str]]:
    """Points around the centres of classes; a small κ puts a point farther away."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(10, D, generator=torch.Generator().manual_seed(99)))
    labels = torch.randint(0, classes, (n,), generator=generator)
    kappa = 10 ** (1 + 2 * torch.rand(n, generator=generator))
    noise = torch.randn(n, D, generator=generator) * 2.4 / kappa.sqrt()[:, None]
    mean = torch.nn.functional.normalize(centres[labels] + noise)
    return Embeddings(mean, kappa, torch.ones(n), torch.ones(n)), [f"class {label}" for label in labels.tolist()]


@cache
def gallery() -> tuple[Embeddings, list[str]]:
    return items(G, 1)


@cache
def calibration() -> Calibration:
    queries, labels = items(Q, 2)
    stored, stored_labels = gallery()
    return calibrate_vectors(queries, labels, stored.mean, stored_labels, CHOICES)


def hits(mean: Tensor, k: int = 50) -> tuple[Tensor, list[list[str]]]:
    """Cosines and labels of a plain search."""
    stored, labels = gallery()
    scores, places = (mean.double() @ stored.mean.double().T).sort(descending=True)
    return scores[:, :k], [[labels[place] for place in row] for row in places[:, :k].tolist()]


def table(values: Tensor) -> Any:
    """A table or column of pandas, with an index that does not begin at 0."""
    pandas = pytest.importorskip("pandas")
    kind = pandas.DataFrame if values.ndim == 2 else pandas.Series
    return kind(values.numpy(), index=range(5, 5 + len(values)))


def swapped(values: Tensor) -> Any:
    """An array in the byte order of other machines."""
    return values.numpy().astype(values.numpy().dtype.newbyteorder())


def backwards(values: Tensor) -> Any:
    """An array whose rows lie in memory from last to first."""
    return values.flip(0).numpy()[::-1]


@pytest.mark.parametrize("kind", ["tensors", "arrays", "swapped", "backwards", "lists", "tables"])
def test_decisions_on_plain_values_are_those_of_the_index(kind: str) -> None:
    queries, _ = items(50, 3, classes=10)
    stored, stored_labels = gallery()
    index = Index(D)
    index.add(stored, torch.arange(G))
    found = index.search(queries, 50)
    numbers = label_numbers([[stored_labels[place] for place in row] for row in found.ids.tolist()])
    expected = calibration().decide(found, queries, labels=numbers, gallery_size=G)
    scores, labels = hits(queries.mean)
    if kind == "tables":
        labels = pytest.importorskip("pandas").DataFrame(labels, index=range(5, 55))
    plain: Any = {
        "tensors": lambda x: x,
        "arrays": Tensor.numpy,
        "swapped": swapped,
        "backwards": backwards,
        "lists": Tensor.tolist,
        "tables": table,
    }[kind]
    asked, features = (plain(queries.mean), plain(queries.kappa)), plain(queries.mean)
    got = judge(calibration(), asked, plain(scores), labels, gallery_size=G, features=features)
    assert got.decision == expected.decision
    assert set(got.decision) >= {"match", "unknown"}
    torch.testing.assert_close(got.probability, expected.probability, atol=1e-5, rtol=0)


def test_a_calibration_on_vectors_is_that_of_their_searches() -> None:
    queries, labels = items(Q, 2)
    stored, stored_labels = gallery()
    own, others = label_numbers([labels])[0], label_numbers([labels + stored_labels])[0][Q:]
    searches = search_open_set(queries.mean, stored.mean, lambda rows: own[rows][:, None] == others)
    expected = calibrate(CalibrationData(searches, queries, gallery_labels=others), CHOICES, key="k")
    assert (calibration().accept_above, calibration().flag_above) == (expected.accept_above, expected.flag_above)
    assert (calibration().gallery_size, calibration().depth) == (G, expected.depth)


def test_promised_rates_hold_on_hits_from_elsewhere() -> None:
    queries, labels = items(1000, 4, classes=10)  # four classes that the gallery lacks
    known = torch.tensor([label < "class 6" for label in labels])
    scores, found = hits(queries.mean)
    decisions = judge(calibration(), queries, scores, found, gallery_size=G)
    right = torch.tensor([row[0] == label for row, label in zip(found, labels, strict=True)])
    is_match = decisions.codes == 0
    assert float((is_match & ~known).sum() / (~known).sum()) < 0.1
    assert float(is_match[known].double().mean()) > 0.6
    for answered in (is_match, ~is_match):
        says, is_right = decisions.probability[answered].mean(), right[answered].double().mean()
        assert float(says) == pytest.approx(float(is_right), abs=0.1)


def test_the_vectors_of_a_store_may_be_embeddings() -> None:
    stored, labels = gallery()
    made = calibrate_vectors(*items(Q, 2), stored, labels, CHOICES)
    assert torch.equal(made.false_accepts.scores, calibration().false_accepts.scores)


def test_items_of_the_store_are_calibrated_without_themselves() -> None:
    stored, labels = gallery()
    with pytest.warns(Note, match="200 of 200 queries"):
        made = calibrate_vectors(stored[:200], labels[:200], stored.mean.half().float(), labels, CHOICES)
    queries, _ = items(1000, 4)
    decisions = judge(made, queries, *hits(queries.mean), gallery_size=G)
    assert float((decisions.codes == 0).double().mean()) > 0.6


def test_hits_without_labels_are_judged_without_votes() -> None:
    queries, _ = items(20, 5)
    scores, labels = hits(queries.mean)
    without = judge(calibration(), queries, scores, gallery_size=G)
    labels[3][7] = ""
    mixed = judge(calibration(), queries, scores, labels, gallery_size=G)
    assert mixed.probability[3] == without.probability[3]
    assert not torch.equal(mixed.probability, without.probability)


def test_a_grown_store_makes_decisions_stale() -> None:
    queries, _ = items(5, 6)
    scores, labels = hits(queries.mean)
    assert not judge(calibration(), queries, scores, labels, gallery_size=G).stale
    assert judge(calibration(), queries, scores, labels, gallery_size=2 * G).stale


def squared_distances(scores: Tensor) -> Tensor:
    return 2 - 2 * scores


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda scores: 1 - scores, "sorted, .*query 0: .*1 - distance"),
        (lambda scores: 40 * scores, "-1 to 1, got .*normalised"),
        (lambda scores: squared_distances(scores) + 1, "from -1 to 1"),
        (lambda scores: scores.flip(1), "must be sorted"),
        (lambda scores: scores[:, :10], "k=50 hits.*300.*k=10"),
        (lambda scores: scores[:1], "each of 3 queries, got 1"),
        (lambda scores: scores * torch.nan, "scores.*finite"),
        (lambda scores: [[0.9, 0.8], [0.7]], "scores.*matrix.*numbers"),
        (lambda scores: scores[0], "scores.*matrix"),
    ],
)
def test_scores_that_break_the_contract_are_an_error(broken: Any, message: str) -> None:
    queries, _ = items(3, 7)
    with pytest.raises(ValueError, match=message):
        judge(calibration(), queries, broken(hits(queries.mean)[0]), gallery_size=G)


def test_queries_and_labels_that_break_the_contract_are_an_error() -> None:
    queries, _ = items(3, 7)
    scores, labels = hits(queries.mean)
    with pytest.raises(ValueError, match="labels.*3.*50"):
        judge(calibration(), queries, scores, [row[:9] for row in labels], gallery_size=G)
    with pytest.raises(ValueError, match="unit vectors, got length 2"):
        judge(calibration(), (2 * queries.mean, queries.kappa), scores, labels, gallery_size=G)
    with pytest.raises(ValueError, match="kappa.*negative"):
        judge(calibration(), (queries.mean, -queries.kappa), scores, labels, gallery_size=G)
    with pytest.raises(ValueError, match="dimension 8, got 3"):
        judge(calibration(), (torch.eye(3), queries.kappa), scores, labels, gallery_size=G)
    with pytest.raises(ValueError, match="gallery_size.*50.*20"):
        judge(calibration(), queries, scores, labels, gallery_size=20)
    with pytest.raises(ValueError, match="query_labels.*empty, .*index 1"):
        calibrate_vectors(queries, ["a", "", "b"], np.eye(8), ["a"] * 8, CHOICES)
    with pytest.raises(ValueError, match="labels.*8 vectors.*7"):
        calibrate_vectors(queries, ["a", "a", "b"], np.eye(8), ["a"] * 7, CHOICES)
    with pytest.raises(ValueError, match="unit vectors.*2 at index 0"):
        calibrate_vectors(queries, ["a", "a", "b"], 2 * np.eye(8), ["a"] * 8, CHOICES)


def test_an_empty_store_matches_nothing() -> None:
    queries, _ = items(2, 8)
    decisions = judge(calibration(), queries, [[], []], [[], []], gallery_size=0)
    assert "match" not in decisions.decision
    assert decisions.probability.tolist() == [0, 0]


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("as_labels", [torch.tensor, lambda rows: rows, np.array])
def test_labels_that_are_no_strings_are_an_error(as_labels: Any) -> None:
    queries, words = items(3, 3)
    scores, labels = hits(queries.mean)
    numbers = as_labels([[int(label[-1:]) for label in row] for row in labels])
    with pytest.raises(ValueError, match="labels.*strings, .*index 0"):
        judge(calibration(), queries, scores, numbers, gallery_size=G)
    own = as_labels([int(word[-1:]) for word in words])
    with pytest.raises(ValueError, match="query_labels.*strings, .*index 0: .*unlabelled"):
        calibrate_vectors(queries, own, queries.mean, words)


@pytest.mark.usefixtures("as_in_production")
def test_arguments_of_another_kind_are_an_error() -> None:
    queries, words = items(3, 3)
    scores, labels = hits(queries.mean)
    wrong: Any
    for wrong in (queries.mean, (queries.mean, None), None):
        with pytest.raises(ValueError, match=r"queries.*lam.Embeddings.*\(mean, κ\)"):
            judge(calibration(), wrong, scores, labels, gallery_size=G)
    with pytest.raises(ValueError, match="vectors: .*unit vectors.*2"):
        calibrate_vectors(queries, words, 2 * queries.mean, words)
    for wrong in ({"far": 0.1}, 0.1):
        with pytest.raises(ValueError, match=r"targets.*lam.retrieval.Targets.*Targets\(far=0.01\)"):
            Choices(wrong)
    wrong = Targets(far=0.1)
    with pytest.raises(ValueError, match=r"choices.*lam.retrieval.Choices.*Targets\(far=0.1"):
        calibrate_vectors(queries, words, *gallery(), wrong)
    with pytest.raises(ValueError, match=r"\(0, 1\).*1.5"):
        Choices(share=1.5)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("name", ["features", "labels"])
def test_a_decision_names_the_evidence_that_is_no_tensor(name: str) -> None:
    stored, _ = gallery()
    queries, _ = items(5, 3)
    index = Index(D)
    index.add(stored, torch.arange(G))
    found = index.search(queries, 50)
    arrays: Any = {"features": queries.mean.numpy(), "labels": found.ids.numpy()}
    with pytest.raises(ValueError, match=rf"{name}.*tensor.*torch.as_tensor\({name}\)"):
        calibration().decide(found, queries, **{name: arrays[name]})


def test_default_rates_rise_to_what_few_queries_can_bound() -> None:
    stored, labels = gallery()
    with pytest.warns(UserWarning, match="raise.*promised rates"):
        made = calibrate_vectors(*items(Q, 2), stored, labels)
    assert (made.targets.far, made.targets.ood) == (least_rate(Q), Targets().ood)
    assert made.accept_above < 1
    with pytest.raises(ValueError, match="target far"):
        calibrate_vectors(*items(Q, 2), stored, labels, Choices(Targets()))
