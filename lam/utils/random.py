"""Seeds derived from a run's seed, and torch's global random state."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*place: int | str) -> int:
    """A seed below 2⁵⁶: a hash of numbers and words."""
    return int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:7])


def derive_seed_of_part(part: int, *place: int | str) -> int:
    """`derive_seed` for a part of a batch; part 0 has the seed of the whole batch."""
    return derive_seed(*place, *((part,) if part else ()))


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of one device only."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """The generator, if it is on the device; else a new generator on the device with the same initial seed."""
    if generator.device.type == device.type:
        return generator
    return torch.Generator(device).manual_seed(generator.initial_seed())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the context, torch's global random state of the CPU has this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
