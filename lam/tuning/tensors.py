"""`TensorRecord`, the base of records of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record", bound="TensorRecord")


@dataclass(frozen=True)
class TensorRecord:
    """Base of records of tensors, with methods to move, save and load all tensors at once."""

    def to(self: Record, device: torch.device | str) -> Record:
        """The record with every tensor on a device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def restored(cls: type[Record], tensors: Mapping[str, Tensor]) -> Record:
        """Rebuild the record from the result of `tensors`; other names are ignored."""
        return cls(**{field.name: tensors[field.name] for field in fields(cls)})
