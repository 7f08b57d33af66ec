"""scikit-learn: an outlier detector and transformer over the directions of features, with a bound on false flags.

Features are embeddings or activations of a network: only the direction of a row counts. The direction means nothing if
columns have different units; then scale the columns first, or take another detector.
"""

import warnings
from typing import Any, Literal, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, OutlierMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from lam.methods.fit import fit
from lam.methods.laplace import Laplace
from lam.pairs.relation import Relation
from lam.retrieval.decisions.conformal import ConformalScores, least_rate, needed
from lam.retrieval.metrics.reference import Reference, knn_distance
from lam.utils.checks import check_choice, check_share, positive_integer

Score = Literal["knn", "kappa"]
_BATCH = 512  # rows of a batch, in which nearest neighbours are pairs
_SAME, _ROUNDING = 1e-6, 1e-8  # tolerances for equal directions, and for rounded scores


class OutlierDetector(ClassNamePrefixFeaturesOutMixin, TransformerMixin, OutlierMixin, BaseEstimator):
    """Detect rows whose direction is unlike the training data; at most a promised share of usual rows is flagged.

    Scores of a held-out part of the rows determine `offset_`, a conformal threshold: a new row from the same source is
    flagged with a probability of at most `flag_rate_`, for any distribution. The Laplace posterior is fitted to pairs
    of rows with equal labels. Without labels, or if all labels are equal or all differ, near rows are pairs.

    Args:
        by: `knn`, the cosine distance to the k-th nearest training row; or `kappa`, the concentration of the
            embedding under the posterior.
        dimension: D of a linear layer that is trained on the pairs; None keeps the features' directions.
        margin: margin of the contrastive loss, in (0, 2].
        k: rank of the neighbour for `knn`.
        flag_rate: share of usual rows that may be flagged, in (0, 1).
        calibration: share of the rows that is held out, in (0, 1).
        random_state: seed of the split, of training and of the samples.

    Attributes:
        encoder_: the `lam.BayesianEncoder`; `encoder_.embed(X)` gives direction and κ of each row.
        offset_: threshold on `score_samples`; a row with a lower score is an outlier.
        flag_rate_: the promised rate: the larger of `flag_rate` and the least rate that the held-out rows allow.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(200, 3)) * 0.2 + [1, 1, 0]
        >>> detector = OutlierDetector(random_state=0).fit(X)
        >>> detector.predict([[1, 1, 0], [-1, 0, 1]]).tolist(), detector.transform([[2, 0, 0]]).tolist()
        ([1, -1], [[1.0, 0.0, 0.0]])
    """

    def __init__(
        self,
        *,
        by: Score = "knn",
        dimension: int | None = None,
        margin: float = 0.7,
        k: int = 5,
        flag_rate: float = 0.05,
        calibration: float = 0.3,
        random_state: Any = None,
    ) -> None:
        self.by = by
        self.dimension = dimension
        self.margin = margin
        self.k = k
        self.flag_rate = flag_rate
        self.calibration = calibration
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "OutlierDetector":
        """Fit the posterior on one part of the rows (N, P), and the threshold on the rest; y (N,) are labels."""
        check_choice("by", self.by, get_args(Score))
        check_share("flag_rate", self.flag_rate)
        check_share("calibration", self.calibration)
        positive_integer("k", self.k)
        least: Any = {"ensure_min_samples": 4, "ensure_min_features": 2}
        labels = None
        if y is None:
            X = validate_data(self, X, dtype=np.float64, **least)
        else:
            X, y = validate_data(self, X, y, dtype=np.float64, **least)
            if missing := [row for row, label in enumerate(y) if label is None]:  # NaN is an error above
                raise ValueError(f"y must have a label for each row, got None for row {missing[0]}: leave it out")
            labels = torch.from_numpy(np.unique(y, return_inverse=True)[1])
        random = check_random_state(self.random_state)
        order, seed = random.permutation(len(X)), int(random.randint(2**31))
        n_held_out = min(max(1, round(self.calibration * len(X))), len(X) - 3)
        held_out, train = order[:n_held_out], order[n_held_out:]
        train = train[X[train].any(1)]  # a row of zeros has no direction
        rows = _tensor(X[train])
        head = "identity" if self.dimension is None else "train"
        batches, relation = _pairs(rows, None if labels is None else labels[train])
        options = Laplace(margin=self.margin, pairs=relation, head=head, dimension=self.dimension)
        self.encoder_ = fit(nn.Identity(), batches, options, seed=seed, progress=False)
        self.encoder_.network, self.encoder_.head = None, ""  # an encoder of features, which `lam.load` can read
        self._reference = Reference.of(rows)
        self._by, self._k = self.by, min(self.k, len(rows))  # `offset_` belongs to these, whatever `set_params` changes
        self._n_features_out = self.encoder_.dimension
        self.flag_rate_ = max(self.flag_rate, least_rate(n_held_out))
        if n_held_out < needed(self.flag_rate):
            problem = f"flag_rate {self.flag_rate:g} needs {needed(self.flag_rate)} held-out rows, got {n_held_out}"
            warnings.warn(f"{problem}, so it is {self.flag_rate_:g}: give more rows or raise calibration", stacklevel=2)
        offset = -ConformalScores.of(-self._scores(X[held_out])).threshold(self.flag_rate_)
        self.offset_ = offset - _ROUNDING * (1 + abs(offset))  # rounding must not flag the row that sets it
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Directions (N, D) of the rows' embeddings: unit vectors, or zeros for a row of zeros."""
        return self.encoder_.embed(_tensor(self._validated(X))).mean.numpy()

    def score_samples(self, X: Any) -> np.ndarray:
        """(N,) scores, higher for usual rows: minus the distance of `knn`, or the logarithm of κ."""
        return self._scores(self._validated(X)).numpy()

    def decision_function(self, X: Any) -> np.ndarray:
        """(N,) `score_samples` minus `offset_`: negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray:
        """(N,) 1 for usual rows and -1 for outliers."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _validated(self, X: Any) -> Any:
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float64, reset=False)

    def _scores(self, X: np.ndarray) -> Tensor:
        if self._by == "kappa":
            return self.encoder_.embed(_tensor(X)).kappa.log()
        return -knn_distance(_tensor(X), self._reference, k=self._k)


def _tensor(X: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(X))  # a copy: arrays may be read-only


def _pairs(rows: Tensor, labels: Tensor | None) -> tuple[list[tuple[Tensor, Tensor]], Relation]:
    """Batches with targets, and the relation that decides which rows are pairs: by label, or by direction."""
    counts = torch.zeros(0) if labels is None else labels.unique(return_counts=True)[1]
    if labels is not None and len(counts) > 1 and bool((counts > 1).any()):
        return [(rows, labels)], Relation("dataset")
    unit = nn.functional.normalize(rows)
    distances = torch.cdist(unit[:_BATCH], unit[:_BATCH])
    distances = distances.masked_fill(distances < _SAME, torch.inf)  # each row with itself, and equal directions
    if not (is_different := distances.isfinite()).any():
        raise ValueError(f"X must have rows of different directions, got one direction in {len(rows)} rows to fit")
    near = float(distances.amin(1).median()) * (1 + _ROUNDING)
    far = max(near, float(distances[is_different].median()))
    relation = Relation("batch", positive_within=near, negative_beyond=far)
    return list(zip(rows.split(_BATCH), unit.split(_BATCH), strict=True)), relation
