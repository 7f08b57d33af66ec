"""From an image file to what a network takes."""

from lam.inputs.preprocessing import Preprocessing

__all__ = ["Preprocessing"]
