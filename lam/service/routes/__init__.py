"""Routes by what they serve. They raise a `ServiceError` for a refused request."""
