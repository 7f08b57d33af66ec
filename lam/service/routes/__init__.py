"""The routes: searches, items, and the state of the service. A refused request raises a `Refusal`."""

__all__: list[str] = []
