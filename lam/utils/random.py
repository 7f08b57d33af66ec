"""Seeds derived from a run's seed, and the global random states."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
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
    """Within the context, the global random states of torch's CPU, of Python and of NumPy follow from this seed."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(int(seed))
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
