"""Helpers of every room: whole files, tables, processes, seeds, checks."""

__all__: list[str] = []
