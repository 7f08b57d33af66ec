"""Readers of a folder see its old or its new contents, also if another process replaces them meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lam.utils.files import CorruptFileError, FolderFormat

FORMAT = FolderFormat(1, "record.json", ("tensors.safetensors",), optional=("more.safetensors",))


def written(folder: Path, number: int) -> dict[str, int]:
    FORMAT.write(folder, {"number": number}, {"x": torch.zeros(1)}, {"y": torch.ones(1)})
    return {"number": number}


@pytest.mark.parametrize("read_before", [False, True])
def test_contents_that_are_replaced_during_a_read_are_read_again(tmp_path: Path, read_before: bool) -> None:
    written(tmp_path, 1)
    numbers = [2, 3]

    def read(generation: Path) -> tuple[Any, ...]:
        contents = FORMAT.read_files(generation) if read_before else None
        if numbers:
            written(tmp_path, numbers.pop(0))
        return contents or FORMAT.read_files(generation)

    record, _, more = FORMAT.read(tmp_path, read)
    assert record == {"number": 3}
    assert torch.equal(more["y"], torch.ones(1))


def test_a_folder_at_rest_is_read_at_most_twice(tmp_path: Path) -> None:
    tries: list[int] = []
    written(tmp_path, 1)

    def read(_: Path) -> None:
        tries.append(1)
        raise CorruptFileError("truncated")

    with pytest.raises(CorruptFileError, match="truncated"):
        FORMAT.read(tmp_path, read)
    assert len(tries) == 2
