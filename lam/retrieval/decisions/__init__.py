"""Answers at promised error rates: thresholds, flags, probabilities and sets, calibrated on held-out data."""

__all__ = ["abstention", "calibration", "conformal", "flags"]
