"""Uploads: three formats, sizes from the header, first frames, turned upright, and no words of the decoder."""

import contextlib
import io
import json
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from lam.gallery.refusal import Refusal
from lam.inputs.decoding import media_type, thumbnail
from lam.inputs.preprocessing import Preprocessing
from lam.service.embedder import read_image
from lam.service.settings import ServiceSettings
from tests.inputs.test_parts import with_scans
from tests.service.conftest import encoded
from tests.service.serving import ROOT

LIMITS = ServiceSettings()
COLOURS = ("red", "blue")


def refusal(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as refused:
        read_image(body, LIMITS)
    return refused.value


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_three_formats_are_decoded(kind: str) -> None:
    assert read_image(encoded(Image.new("RGB", (5, 4), "red"), kind), LIMITS).size == (5, 4)


def others() -> list[bytes]:
    image, packed = Image.new("RGB", (5, 4), "red"), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("../../outside.png", b"0" * 1000)
    found = [encoded(image, kind) for kind in ("GIF", "BMP", "TIFF", "PPM", "ICO", "PDF", "EPS", "TGA")]
    found += [b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7\n", packed.getvalue()]
    return [*found, b"GIF89a" + encoded(image, "PNG"), b"\x00" * 100, b"RIFF\x00\x00\x00\x00WEBX"]


def test_other_formats_are_refused_and_nothing_is_leaked() -> None:
    draw = random.Random(0)
    bodies = [*others(), *(draw.randbytes(draw.randrange(1, 400)) for _ in range(190))]
    assert len(bodies) >= 200
    for body in bodies:
        error = refusal(body)
        assert error.status == 415
        assert "allowed format" in error.error
        assert error.allowed == ["image/jpeg", "image/png", "image/webp"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_truncated_and_damaged_images_are_refused_or_decoded_whole(kind: str) -> None:
    noise = Image.effect_noise((40, 40), 80).convert("RGB")
    whole, draw = encoded(noise, kind), random.Random(0)
    for _ in range(20):
        error = refusal(whole[: draw.randrange(60, len(whole) - 100)])
        assert error.status in (400, 415)
        assert "truncated or damaged" in error.error or "no image" in error.error
    for _ in range(60):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        with contextlib.suppress(Refusal):  # no other error may be raised
            assert read_image(bytes(changed), LIMITS).width > 0


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header states a larger size."""
    body = encoded(Image.new("L", (8, 8)))
    header = b"IHDR" + struct.pack(">II", width, height) + body[24:29]
    return body[:12] + header + struct.pack(">I", zlib.crc32(header)) + body[33:]


def cheap_refusal(body: bytes, *, seconds: float, mebibytes: int) -> Refusal:
    """A refusal that takes less time and memory than these limits."""
    tracemalloc.start()
    started = time.thread_time()
    error = refusal(body)
    taken, (_, most) = time.thread_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < seconds
    assert most < mebibytes * 2**20
    return error


@pytest.mark.parametrize("size", [(5001, 5000), (100_000, 100_000), (2**31 - 1, 1), (1, 30_000_000)])
def test_too_many_pixels_are_refused_from_the_header(size: tuple[int, int]) -> None:
    error = cheap_refusal(claiming(*size), seconds=0.05, mebibytes=32)
    assert (error.status, error.allowed) == (413, {"max_pixels": 25_000_000})


@pytest.mark.parametrize("size", [(16_385, 1), (1, 20_000_000)])
def test_a_side_that_is_too_long_is_refused_from_the_header(size: tuple[int, int]) -> None:
    error = refusal(claiming(*size))
    assert (error.status, error.allowed) == (413, {"max_side": 16_384})


CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a PNG's colour types


def blank(width: int, height: int, colour: int = 0, bits: int = 8) -> bytes:
    """A PNG of zeros; Pillow takes much longer to make one."""
    rows = zlib.compress(bytes(height * (1 + width * CHANNELS[colour] * bits // 8)), 1)
    chunks = {b"IHDR": struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)}
    chunks |= {b"PLTE": bytes(768), b"tRNS": b"\0"} if colour == 3 else {}
    body = b"\x89PNG\r\n\x1a\n"
    for name, data in {**chunks, b"IDAT": rows, b"IEND": b""}.items():
        body += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return body


def colour(width: int, kind: str, **options: Any) -> bytes:
    return encoded(Image.new("RGB", (width, width)), kind, **options)


COSTS = {
    "1 x 25 million": (lambda: blank(1, 25_000_000), 413),
    "16 bits": (lambda: blank(5000, 5000, bits=16), 200),
    "grey": (lambda: blank(5000, 5000), 200),
    "colour": (lambda: blank(5000, 5000, 2), 413),
    "15 megapixels of colour": (lambda: blank(3900, 3900, 2), 200),
    "transparent": (lambda: blank(3900, 3900, 6), 200),
    "transparent, not reduced": (lambda: blank(1000, 5400, 6), 200),
    "grey and transparent": (lambda: blank(3900, 3900, 4), 200),
    "palette": (lambda: blank(5000, 5000, 3), 200),
    "WebP": (lambda: colour(1900, "WEBP", method=0), 200),
    "large WebP": (lambda: colour(4000, "WEBP", method=0), 413),
    "JPEG": (lambda: colour(5000, "JPEG"), 200),
    "progressive JPEG": (lambda: colour(4500, "JPEG", progressive=True), 200),
    "large progressive JPEG": (lambda: colour(5000, "JPEG", progressive=True, subsampling=0), 413),
}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc, which Linux has")
def test_no_image_takes_more_than_64_mebibytes_or_a_second(tmp_path: Path) -> None:
    for number, (make, _) in enumerate(COSTS.values()):
        (tmp_path / f"{number:02}").write_bytes(make())
    command = [sys.executable, "-m", "tests.service.decoding", *map(str, sorted(tmp_path.iterdir()))]
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # so that freed memory returns to the system
    printed = subprocess.run(command, cwd=ROOT, env=given, check=True, capture_output=True, text=True).stdout
    for (name, (_, expected)), line in zip(COSTS.items(), printed.splitlines(), strict=True):
        status, most, seconds = json.loads(line)
        assert status == expected, name
        assert most < 64 * 2**20, name
        assert seconds < 1, name


def test_bombs_in_text_are_refused() -> None:
    text = PngImagePlugin.PngInfo()
    for number in range(100):
        text.add_itxt(f"key{number}", "0" * 5_000_000, zip=True)
    body = encoded(Image.new("L", (8, 8)), "PNG", pnginfo=text)
    assert len(body) < 1_000_000
    assert cheap_refusal(body, seconds=1, mebibytes=64).status in (400, 415)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    first, *rest = (Image.new("RGB", (6, 6), colour) for colour in COLOURS)
    body = encoded(first, kind, save_all=True, append_images=rest, lossless=True)
    red, _, blue = read_image(body, LIMITS).convert("RGB").getpixel((3, 3))
    assert red > 200
    assert blue < 50


def test_a_webp_of_very_many_frames_costs_one() -> None:
    frames = [Image.new("L", (4, 4), number % 256).convert("RGB") for number in range(10_000)]
    body = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True, method=0)
    started = time.thread_time()
    assert read_image(body, LIMITS).size == (4, 4)
    assert time.thread_time() - started < 0.05


def test_images_are_turned_as_their_exif_says() -> None:
    image = Image.new("RGB", (10, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(encoded(image, "JPEG", exif=exif), LIMITS).size == (20, 10)


ODD = {
    "one pixel": Image.new("L", (1, 1), 9),
    "a line": Image.new("RGB", (1, 500)),
    "a row": Image.new("RGB", (500, 1)),
    "alpha": Image.new("RGBA", (9, 9), (1, 2, 3, 4)),
    "grey with alpha": Image.new("LA", (9, 9)),
    "palette": Image.new("P", (9, 9)),
    "one bit": Image.new("1", (9, 9)),
    "16 bits": Image.new("I;16", (9, 9), 40_000),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_odd_images_become_finite_inputs(name: str, mode: str) -> None:
    image = read_image(encoded(ODD[name]), LIMITS)
    assert Preprocessing(mode=mode, size=(8, 8))(image).isfinite().all()
    small = thumbnail(image)
    assert media_type(small) == ("image/jpeg" if max(image.size) > 64 else "image/png")
    assert max(Image.open(io.BytesIO(small)).size) <= 128


def test_four_inks_become_three_channels() -> None:
    image = read_image(encoded(Image.new("CMYK", (200, 300), (0, 255, 255, 0)), "JPEG"), LIMITS)
    assert Preprocessing(mode="RGB", size=(8, 8))(image).shape == (3, 8, 8)
    assert media_type(thumbnail(image)) == "image/jpeg"


def test_thumbnails_carry_nothing_else() -> None:
    exif = Image.Exif()
    exif[0x010E] = "WHERE-I-LIVE"
    body = encoded(Image.new("RGB", (300, 200)), "JPEG", exif=exif, comment=b"WHERE-I-LIVE")
    assert b"WHERE-I-LIVE" in body
    assert b"WHERE-I-LIVE" not in thumbnail(read_image(body, LIMITS))


def test_too_many_scans_are_refused_and_named() -> None:
    error = refusal(with_scans(100))
    assert error.status == 413
    assert "more than 64 scans" in error.error
