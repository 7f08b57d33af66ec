"""Metrics of rankings and of their uncertainty, and plots of these metrics."""

__all__ = ["open_set", "plots", "registry", "scores", "votes"]
