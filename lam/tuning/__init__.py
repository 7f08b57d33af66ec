"""Choices on held-out data: the likelihood scale, the ambiguity of items, and the OOD score."""

__all__: list[str] = []
