"""Malicious files of embeddings: zip bombs, pickles, paths outside the folder, false headers."""

import io
import resource
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lam.gallery.shards import merge_embeddings
from lam.utils.files import CorruptFileError

MEBIBYTE = 2**20


def arrays(count: int = 3) -> dict[str, np.ndarray]:
    """The arrays of a valid file."""
    names = np.array([str(number) for number in range(count)])
    rows = np.arange(count)
    ones = np.ones(count, np.float32)
    return {
        "paths": names,
        "labels": names,
        "ids": rows,
        "positions": rows,
        "mean": np.eye(count, dtype=np.float32),
        "kappa": ones,
        "variance": ones,
        "resultant": ones,
        "format": np.array(1),
        "shard": np.array([1, 1]),
        "total": np.array(count),
        "listing": np.array("listing"),
        "encoder": np.array("encoder"),
        "mean_samples": np.array(0),
    }


def refusal(path: Path) -> str:
    """The error for a file; it needs at most a second and 64 MiB of memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(CorruptFileError, match=path.name) as refused:
        merge_embeddings([path], encoder="encoder")
    assert time.thread_time() - started < 1
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 64 * MEBIBYTE
    return str(refused.value)


def test_a_file_that_is_right_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "right.npz", **arrays())
    entries, embeddings = merge_embeddings([tmp_path / "right.npz"], encoder="encoder")
    assert len(entries) == len(embeddings) == 3


def test_paths_that_compress_well_are_no_bomb(tmp_path: Path) -> None:
    """NumPy pads texts to one width, so one long path makes an array that compresses well."""
    count, draw = 20_000, np.random.default_rng(0)
    many = arrays() | {name: draw.random(count, np.float32) for name in ("kappa", "variance", "resultant")}
    many |= {"mean": np.eye(1, 2, dtype=np.float32).repeat(count, 0), "total": np.array(count)}
    many |= {"ids": draw.integers(2**63, size=count), "positions": np.arange(count)}
    many["labels"] = np.full(count, "a label")
    many["paths"] = np.array(["x" * 500, *(f"/photographs/{number}.jpg" for number in range(count - 1))])
    np.savez_compressed(tmp_path / "many.npz", **many)
    entries, _ = merge_embeddings([tmp_path / "many.npz"], encoder="encoder")
    assert len(entries) == count
    assert many["paths"].nbytes > 32 * MEBIBYTE


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), [("mean", "<f4"), ("paths", "<U1")])
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, name: str, kind: str) -> None:
    path, header = tmp_path / "bomb.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": kind, "fortran_order": False, "shape": (2**27, 2)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for other, values in arrays().items():
            with archive.open(f"{other}.npy", "w", force_zip64=True) as member:
                if other != name:
                    np.lib.format.write_array(member, values)
                    continue
                member.write(header.getvalue())
                for _ in range(2**10):
                    member.write(bytes(MEBIBYTE))
    assert path.stat().st_size < 8 * MEBIBYTE
    assert "it would unpack to 1,024 MiB" in refusal(path)


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    path, header = tmp_path / "lies.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**28, 2)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("paths.npy", header.getvalue() + bytes(100))
    assert "is truncated, altered or not a file of embeddings" in refusal(path)


class Harm:
    """An object that creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> object:
        return Path.touch, (self.trace,)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    path, trace = tmp_path / "pickled.npz", tmp_path / "trace"
    harmful = np.array([Harm(trace)], dtype=object)
    np.savez(path, **{**arrays(), "paths": harmful})
    assert "allow_pickle=False" in refusal(path)
    np.save(tmp_path / "alone.npy", harmful, allow_pickle=True)
    assert "allow_pickle=False" in refusal(tmp_path / "alone.npy")
    (tmp_path / "raw.npz").write_bytes(harmful.dumps())
    refusal(tmp_path / "raw.npz")
    assert not trace.exists()
    np.load(path, allow_pickle=True)["paths"]
    assert trace.exists()  # it would have


def test_names_that_lead_outside_lead_nowhere(tmp_path: Path) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    path = inside / "slip.npz"
    np.savez(path, **arrays())
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("../../outside.npy", f"{tmp_path}/absolute.npy"):
            archive.writestr(name, b"outside")
    merge_embeddings([path], encoder="encoder")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["slip.npz"]
