"""The estimator keeps scikit-learn's contract and its promised rate, and detects digits outside its training data."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

import lam
from lam.integrations.sklearn import OutlierDetector
from lam.vmf.embeddings import KAPPA_RANGE


@pytest.mark.parametrize(
    "settings",
    [{}, {"by": "kappa"}, pytest.param({"by": "kappa", "dimension": 2}, marks=pytest.mark.long)],
    ids=["knn", "kappa", "trained layer"],
)
@pytest.mark.usefixtures("as_in_production")  # a check gives settings of any type, which only `fit` may reject
def test_it_passes_every_check_of_scikit_learn(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flag_rate")  # the checks fit on few rows
        results = check_estimator(OutlierDetector(**settings), on_skip=None, on_fail="raise", expected_failed_checks={})
    statuses = {result["check_name"]: result["status"] for result in results}
    assert {name for name, status in statuses.items() if status != "passed"} <= {
        "check_array_api_input"
    }  # needs a variable
    assert {"check_outliers_train", "check_outliers_fit_predict", "check_transformer_general"} <= statuses.keys()


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows and labels of digits below 7 in two halves, and rows of the others."""
    X, y = load_digits(return_X_y=True)
    usual = np.random.default_rng(0).permutation(np.flatnonzero(y < 7))
    train, fresh = usual[:630], usual[630:]
    return X[train], y[train], X[fresh], X[y >= 7]


@pytest.mark.parametrize(("settings", "least"), [({}, 0.93), ({"by": "kappa"}, 0.8)], ids=["knn", "kappa"])
@pytest.mark.parametrize("labelled", [True, False])
def test_it_detects_digits_that_it_never_saw(settings: dict[str, Any], least: float, labelled: bool) -> None:
    X, y, fresh, strange = digits()
    detector = OutlierDetector(**settings, random_state=0).fit(X, y if labelled else None)
    scores = np.r_[detector.score_samples(fresh), detector.score_samples(strange)]
    assert roc_auc_score(np.r_[np.ones(len(fresh)), np.zeros(len(strange))], scores) > least
    assert (detector.predict(fresh) == -1).mean() < 0.09
    assert (detector.predict(strange) == -1).mean() > 0.12
    assert (detector.decision_function(fresh) < 0).tolist() == (detector.predict(fresh) == -1).tolist()


def test_the_share_of_flagged_rows_keeps_its_promise_on_average() -> None:
    generator, shares = np.random.default_rng(0), []
    for _ in range(60):
        X = generator.normal(size=(1100, 4)) + 1
        detector = OutlierDetector(flag_rate=0.1, calibration=0.5, random_state=generator.integers(99)).fit(X[:100])
        shares.append((detector.predict(X[100:]) == -1).mean())
    # (N + 1) 0.1 ranks of N + 1: the mean over calibration sets is 5 of 51, with a standard error of 0.042 / √60
    assert np.mean(shares) == pytest.approx(5 / 51, abs=0.02)


def test_kappa_is_the_encoders_and_the_offset_is_the_conformal_quantile() -> None:
    X, y, fresh, _ = digits()
    detector = OutlierDetector(by="kappa", random_state=0, calibration=0.4).fit(X, y)
    import torch

    embeddings = detector.encoder_.embed(torch.from_numpy(fresh))
    np.testing.assert_array_equal(detector.score_samples(fresh), embeddings.kappa.log().numpy())
    np.testing.assert_array_equal(detector.transform(fresh), embeddings.mean.numpy())
    np.testing.assert_allclose(detector.transform(fresh), fresh / np.linalg.norm(fresh, axis=1, keepdims=True))
    held_out = np.random.RandomState(0).permutation(len(X))[:252]
    scores = np.sort(detector.score_samples(X[held_out]))
    assert detector.offset_ == pytest.approx(scores[int(253 * 0.05) - 1], rel=1e-7)
    assert np.log(KAPPA_RANGE[0]) < scores[0] < scores[-1] < np.log(KAPPA_RANGE[1])


def test_a_trained_layer_is_a_step_of_a_pipeline() -> None:
    X, y, fresh, _ = digits()
    steps = make_pipeline(OutlierDetector(dimension=8, random_state=0), KNeighborsClassifier())
    assert cross_val_score(steps, X, y, cv=2).mean() > 0.85
    detector = clone(steps[0]).fit(X, y)
    assert detector.transform(fresh).shape == (len(fresh), 8)
    np.testing.assert_allclose(np.linalg.norm(detector.transform(fresh), axis=1), 1)
    assert list(detector.get_feature_names_out()) == [f"outlierdetector{place}" for place in range(8)]
    restored = pickle.loads(pickle.dumps(detector))
    np.testing.assert_array_equal(restored.score_samples(fresh), detector.score_samples(fresh))


def test_few_rows_promise_a_larger_rate_with_a_warning() -> None:
    X = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.warns(UserWarning, match="flag_rate 0.05.*19 held-out rows.*6.*0.143"):
        detector = OutlierDetector(random_state=0).fit(X)
    assert detector.flag_rate_ == 0.143


@pytest.mark.parametrize(
    ("settings", "X", "message"),
    [
        ({"by": "mahalanobis"}, np.eye(4), "by must.*knn, kappa"),
        ({"flag_rate": 1.0}, np.eye(4), "flag_rate"),
        ({"calibration": 0.0}, np.eye(4), "calibration"),
        ({"k": 0}, np.eye(4), "^k .*integer.*1"),
        ({"dimension": 2.0}, np.random.default_rng(0).normal(size=(80, 4)), "dimension.*integer"),
        ({"dimension": 9}, np.random.default_rng(0).normal(size=(80, 4)), "dimension.*2 to 4"),
        ({}, np.ones((80, 4)), "directions.*56 rows"),
        ({}, np.outer(np.arange(1, 81), [1, 2, 3]), "different directions"),
        ({}, np.zeros((80, 4)), "different directions"),
        ({}, np.eye(3), "minimum of 4 is required"),
    ],
)
@pytest.mark.usefixtures("as_in_production")
def test_bad_settings_and_data_are_an_error(settings: dict[str, Any], X: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OutlierDetector(**settings).fit(X)


@pytest.mark.parametrize("labels", [np.zeros(80), np.arange(80)], ids=["one class", "a class each"])
def test_labels_that_make_no_pairs_are_left_aside(labels: np.ndarray) -> None:
    X = np.random.default_rng(0).normal(size=(80, 4))
    by_neighbours = OutlierDetector(by="kappa", random_state=0).fit(X).score_samples(X)
    np.testing.assert_array_equal(
        OutlierDetector(by="kappa", random_state=0).fit(X, labels).score_samples(X), by_neighbours
    )


@pytest.mark.parametrize("missing", [np.nan, None])
def test_a_missing_label_is_an_error_and_no_class(missing: Any) -> None:
    X, labels = np.random.default_rng(0).normal(size=(80, 4)), (np.arange(80) % 4).astype(object)
    labels[:9] = missing
    with pytest.raises(ValueError, match="NaN|None"):
        OutlierDetector(by="kappa", random_state=0).fit(X, labels)


@pytest.mark.parametrize("dimension", [None, 3])
def test_the_encoder_is_loaded_without_a_network(dimension: int | None, tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(80, 4))
    detector = OutlierDetector(by="kappa", dimension=dimension, random_state=0).fit(X, np.arange(80) % 4)
    detector.encoder_.save(tmp_path / "encoder")
    kappa = lam.load(tmp_path / "encoder").embed(X).kappa
    np.testing.assert_allclose(kappa.log().numpy(), detector.score_samples(X), rtol=1e-12)


def test_settings_that_change_after_the_fit_wait_for_the_next() -> None:
    X = np.random.default_rng(0).normal(size=(80, 4))
    detector = OutlierDetector(random_state=0).fit(X)
    before = detector.decision_function(X)
    np.testing.assert_array_equal(detector.set_params(by="kappa", k=1).decision_function(X), before)
    assert detector.fit(X).score_samples(X).tolist() != detector.set_params(by="knn").fit(X).score_samples(X).tolist()
