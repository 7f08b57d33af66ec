"""Curvatures in the weights of a layer; one file a structure."""

__all__: list[str] = []
