"""Curvatures with respect to the weights of layers; each structure has its own file."""

__all__: list[str] = []
