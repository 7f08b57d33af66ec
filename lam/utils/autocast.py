"""Computations without torch's autocast."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off on every device, as a context or a decorator.

    Autocast computes float32 matrix products in bfloat16 or float16, with three digits; curvature and κ need seven.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
        ...     (torch.eye(2) @ torch.eye(2)).dtype
        torch.float32
    """
    with ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, _DEVICES):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
