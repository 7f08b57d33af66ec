"""A run as a folder: configuration, data, method, evaluation and report; then gallery, calibration and search."""

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
