"""Routes by what they serve. They raise a `ServiceError` for a refused request."""

__all__: list[str] = []
