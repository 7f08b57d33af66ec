"""Curvatures in the weights of a layer; each structure has its own file."""

__all__: list[str] = []
