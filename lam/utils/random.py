"""Seeds derived from a run's, and torch's global random state kept as it was."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*place: int | str) -> int:
    """A seed below 2⁵⁶ that follows from numbers and words."""
    return int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:7])


def derive_seed_of_part(part: int, *place: int | str) -> int:
    """As `derive_seed`, a seed for each part of a batch; the first part has that of the whole batch in one process."""
    return derive_seed(*place, *((part,) if part else ()))


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of one device, and no other's."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """The generator itself where it is on that device, else one there that begins with its seed."""
    if generator.device.type == device.type:
        return generator
    return torch.Generator(device).manual_seed(generator.initial_seed())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's global random state of the CPU begins with a seed; afterwards it is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
