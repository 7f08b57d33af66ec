"""Retrieval on tensors: search, decisions at promised error rates, and metrics of rankings and of uncertainty.

This package depends neither on networks nor on data sets. Plots are in `lam.retrieval.metrics.plots`.
"""

from lam.retrieval.decisions.calibrate import CalibrationData, Choices, calibrate
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.decisions.files import load_calibration, save_calibration
from lam.retrieval.decisions.judge import calibrate_vectors, judge
from lam.retrieval.index.exact import rank, sampled_nearest
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.fusion import fuse_identities
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.ood import auprc, auroc
from lam.retrieval.metrics.ranking import map_at_k, precision_at_k, recall_at_k
from lam.retrieval.metrics.registry import METRICS, Metric
from lam.retrieval.metrics.scores import N_HITS, SCORES, Score
from lam.retrieval.metrics.uncertainty import ausc, sparsification

__all__ = [
    "METRICS",
    "N_HITS",
    "SCORES",
    "Calibration",
    "CalibrationData",
    "Choices",
    "Hits",
    "Index",
    "Metric",
    "Score",
    "Targets",
    "auprc",
    "auroc",
    "ausc",
    "calibrate",
    "calibrate_vectors",
    "fuse_identities",
    "judge",
    "load_calibration",
    "map_at_k",
    "precision_at_k",
    "rank",
    "recall_at_k",
    "sampled_nearest",
    "save_calibration",
    "sparsification",
]
