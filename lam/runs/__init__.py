"""Runs: train, evaluate and report in one folder; then index, calibrate and search."""

__all__ = [
    "calibrate",
    "calibration_options",
    "comparison",
    "config",
    "config_files",
    "finished",
    "index",
    "run",
    "search",
    "sweep",
]
