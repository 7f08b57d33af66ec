"""Retrieval: index and exact ranking, decisions at stated error rates, and what shows whether certainty can be trusted.

Tensors in, tensors out: nothing here knows of networks, data sets or configuration. Plots and the report are imported
from their own modules, `lam.retrieval.metrics.plots` and `lam.runs.html`.
"""

from lam.retrieval.decisions.abstention import Decision, Decisions
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, calibrate
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.decisions.files import load_calibration, save_calibration
from lam.retrieval.index.exact import rank, sampled_nearest
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.fusion import FusedIdentities, fuse_identities
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.hit_scores import N_HITS
from lam.retrieval.metrics.ood import auprc, auroc, precision_recall_curve, prevalence, roc_curve
from lam.retrieval.metrics.open_set import OpenSet, open_set_metrics
from lam.retrieval.metrics.ranking import (
    RelevantRanks,
    map_at_k,
    mean_reciprocal_rank,
    precision_at_k,
    r_precision,
    recall_at_k,
    relevant_ranks,
)
from lam.retrieval.metrics.registry import METRICS, SCORES, Metric, Score
from lam.retrieval.metrics.searches import Searches, search_open_set
from lam.retrieval.metrics.uncertainty import (
    ReliabilityBins,
    Votes,
    ausc,
    majority_votes,
    sparsification,
)

__all__ = [
    "METRICS",
    "N_HITS",
    "SCORES",
    "Calibration",
    "CalibrationData",
    "Choices",
    "Decision",
    "Decisions",
    "FusedIdentities",
    "Hits",
    "Index",
    "Metric",
    "OpenSet",
    "RelevantRanks",
    "ReliabilityBins",
    "Score",
    "Searches",
    "Targets",
    "Votes",
    "auprc",
    "auroc",
    "ausc",
    "calibrate",
    "fuse_identities",
    "load_calibration",
    "majority_votes",
    "map_at_k",
    "mean_reciprocal_rank",
    "open_set_metrics",
    "precision_at_k",
    "precision_recall_curve",
    "prevalence",
    "r_precision",
    "rank",
    "recall_at_k",
    "relevant_ranks",
    "roc_curve",
    "sampled_nearest",
    "save_calibration",
    "search_open_set",
    "sparsification",
]
