"""Whether an encoder can be trusted: retrieval, calibration and out-of-distribution detection on held-out data."""

from lam.evaluation.evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
