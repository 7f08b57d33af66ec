"""What a ranking and its uncertainty are worth, in numbers and in pictures."""

__all__ = ["open_set", "plots", "registry", "votes"]
