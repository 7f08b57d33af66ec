"""A run as a folder: configuration, data, method, evaluation, report, and what is made of it afterwards."""

__all__ = ["calibrate", "comparison", "config", "config_files", "finished", "index", "run", "search", "sweep"]
