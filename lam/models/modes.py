"""Contexts for passes of a network: in evaluation mode, and without torch.compile. Afterwards it is as before."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

network_lock = threading.RLock()
"""Lock for passes that change hooks, modes or weights of a network, because networks may share modules."""

# A fork waits until no other thread holds the lock. Otherwise the child, without that thread, could never acquire it.
os.register_at_fork(
    before=network_lock.acquire, after_in_parent=network_lock.release, after_in_child=network_lock.release
)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Within the context, a network is in evaluation mode without gradients; afterwards, every mode is restored.

    A module with a `train` of its own, such as a LoRA layer that merges weights for evaluation, reverts its changes.
    """
    with network_lock:
        training = dict.fromkeys(module for module in network.modules() if module.training)
        if training:
            network.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                if type(module).train is not nn.Module.train:
                    module.train()
            for module in network.modules() if training else ():
                module.training = module in training


def uncompiled(network: nn.Module, layers: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """A context for hooks on layers of a network: torch.compile is off if it compiled one of them.

    Code that was compiled before a hook ignores the hook, and later code would be compiled anew for every hook.
    """
    compiled = {part for module in network.modules() if _is_compiled(module) for part in module.modules()}
    return nullcontext() if compiled.isdisjoint(layers) else torch.compiler.set_stance("force_eager")


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled: by torch.compile, by its method `compile`, or in its method `forward`."""
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
