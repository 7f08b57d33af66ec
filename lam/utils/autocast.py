"""torch's autocast is for networks: what is computed from their outputs keeps the precision that it is given."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast on any device, as a context or as a decorator; afterwards it is as it was.

    Under it a matrix product of float32 is of bfloat16 or float16: three digits, where curvature and κ need seven.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
        ...     (torch.eye(2) @ torch.eye(2)).dtype
        torch.float32
    """
    with ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, _DEVICES):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
