"""Quantities chosen or learned on held-out data: likelihood scale, ambiguity of items, OOD score."""

__all__: list[str] = []
