"""Answers at stated error rates: thresholds, flags, probabilities and sets, calibrated on held-out data."""
