"""Retrieval: the index, exact ranking, and the metrics, plots and report that show whether certainty can be trusted.

Tensors in, tensors out: nothing here knows of networks, data sets or configuration. Plots and the report are imported
from their own modules, `lam.retrieval.plots` and `lam.retrieval.report`.
"""

from lam.retrieval.index import Hits, Index
from lam.retrieval.neighbours import rank, sampled_nearest
from lam.retrieval.ood import auprc, auroc, precision_recall_curve, prevalence, roc_curve
from lam.retrieval.ranking import count_without_relevant, map_at_k, recall_at_k
from lam.retrieval.uncertainty import CalibrationBins, ausc, calibration_bins, retrieval_ece, sparsification

__all__ = [
    "CalibrationBins",
    "Hits",
    "Index",
    "auprc",
    "auroc",
    "ausc",
    "calibration_bins",
    "count_without_relevant",
    "map_at_k",
    "precision_recall_curve",
    "prevalence",
    "rank",
    "recall_at_k",
    "retrieval_ece",
    "roc_curve",
    "sampled_nearest",
    "sparsification",
]
