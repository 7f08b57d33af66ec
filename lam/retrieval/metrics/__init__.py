"""Quality of a ranking and of its uncertainty, in numbers and in pictures."""

__all__ = ["open_set", "plots", "registry", "scores", "votes"]
