"""Small files of many parts, which cost a decoder minutes, are refused at once; files of cameras pass."""

import contextlib
import io
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lam.inputs.decoding import open_image
from lam.inputs.parts import TooManyPartsError, check_parts


def saved(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)
    Image.fromarray(pixels).save(file, kind, **options)  # pyright: ignore[reportArgumentType]
    return file.getvalue()


def chunk(name: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">L", len(content)) + name + content + struct.pack(">L", zlib.crc32(name + content))


def exif(n_entries: int, count: int = 1) -> bytes:
    """Entries whose values share the same bytes."""
    entries = b"".join(struct.pack("<HHLL", number, 1, count, 8) for number in range(n_entries))
    return b"II*\0" + struct.pack("<L", 8) + struct.pack("<H", n_entries) + entries + bytes(4)


def with_segments(segments: bytes) -> bytes:
    return saved("JPEG")[:2] + segments + saved("JPEG")[2:]


def with_chunks(chunks: bytes) -> bytes:
    return saved("PNG")[:33] + chunks + saved("PNG")[33:]


def with_webp_chunks(chunks: bytes) -> bytes:
    webp = saved("WEBP") + chunks
    return webp[:4] + struct.pack("<L", len(webp) - 8) + webp[8:]


def with_scans(n_scans: int) -> bytes:
    jpeg = saved("JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:last] + n_scans * jpeg[last:-2] + b"\xff\xd9"


def exif_segment(content: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(content) + 8) + b"Exif\0\0" + content


HARMFUL = {
    "scans": (with_scans(100), "64 scans"),
    "segments": (with_segments(1_000_000 * b"\xff\xe5\0\2"), "256 segments"),
    "comments": (with_segments(2_500_000 * b"\xff\xfe\0\2"), "256 segments"),
    "tables": (with_segments(1_000_000 * b"\xff\xdb\0\2"), "1,000 tables"),
    "lone markers": (with_segments(1_000_000 * b"\xff\x01"), "1,000 tables"),
    "fill bytes": (with_segments(10_000_000 * b"\xff"), "bytes between segments"),
    "other bytes": (with_segments(10_000_000 * b"\0"), "bytes between segments"),
    "JPEG EXIF": (with_segments(exif_segment(exif(2_000))), "1,000 EXIF"),
    "JPEG EXIF values": (with_segments(exif_segment(exif(500, 5_000))), "EXIF or TIFF values"),
    "PNG chunks": (with_chunks(870_000 * chunk(b"abCd")), "1,000 chunks"),
    "PNG pixels": (with_chunks(870_000 * chunk(b"IDAT")), "chunks of pixels"),
    "PNG EXIF": (with_chunks(chunk(b"eXIf", exif(65_535))), "1,000 EXIF"),
    "PNG EXIF values": (with_chunks(chunk(b"eXIf", exif(900, 10_000))), "EXIF or TIFF values"),
    "WebP chunks": (with_webp_chunks(1_000_000 * b"abcd\0\0\0\0"), "1,000 chunks"),
    "WebP EXIF": (with_webp_chunks(b"EXIF" + struct.pack("<L", len(exif(5_000))) + exif(5_000)), "1,000 EXIF"),
    "GIF blocks": (saved("GIF")[: 13 + 768] + b"\x21\xfe" + 40_000 * (b"\xff" + bytes(255)) + b"\0", "1,000 blocks"),
    "GIF extensions": (saved("GIF")[: 13 + 768] + 1_000_000 * b"\x21\xfe\0", "1,000 blocks"),
    "TIFF entries": (exif(65_535), "1,000 EXIF"),
    "TIFF values": (exif(900, 10_000), "EXIF or TIFF values"),
    "TIFF strips": (b"MM\0*\0\0\0\x08" + struct.pack(">HHHLL", 1, 273, 4, 2**19, 8) + bytes(2**22), "strips"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_many_parts_are_refused_at_once(name: str, tmp_path: Path) -> None:
    content, message = HARMFUL[name]
    started = time.thread_time()
    with pytest.raises(TooManyPartsError, match=message):
        check_parts(content)
    (tmp_path / "image").write_bytes(content)
    with pytest.raises(ValueError, match=f"image: more.*{message}"):
        open_image(tmp_path / "image")
    assert time.thread_time() - started < 1  # a decoder would spend minutes; loaded cores are slow


ORDINARY = {
    "progressive": saved("JPEG", progressive=True),
    "restarts": saved("JPEG", restart_marker_blocks=1),
    "50 scans": with_scans(50),
    "profile": saved("JPEG", icc_profile=bytes(2_000_000)),
    "segments": with_segments(200 * b"\xff\xe5\0\2"),
    "PNG": with_chunks(900 * chunk(b"tEXt", b"a\0b")),
    "padded PNG": saved("PNG") + bytes(100_000),
    "WebP": saved("WEBP"),
    "padded WebP": saved("WEBP") + bytes(100_000),
    "animation": saved("GIF", comment=bytes(1_000)),
    "TIFF": saved("TIFF"),
    "BMP": saved("BMP"),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_files_pass(name: str, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(ORDINARY[name])
    assert open_image(tmp_path / "image").size == (30, 40)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_damaged_files_are_left_to_the_decoder(kind: str) -> None:
    whole, draw = saved(kind), np.random.default_rng(0)
    for length in range(0, len(whole), 7):
        check_parts(whole[:length])
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[int(draw.integers(len(whole)))] ^= 255
        with contextlib.suppress(TooManyPartsError):
            check_parts(bytes(damaged))
