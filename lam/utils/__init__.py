"""Helpers for all of lam: files, tables, processes, seeds, checks."""

__all__: list[str] = []
