"""Evaluation of an encoder on held-out data: retrieval, calibration and out-of-distribution detection."""

from lam.evaluation.evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
