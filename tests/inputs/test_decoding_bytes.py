"""Decoding takes at most the memory that lam computes from the header; if this is too much, an error is raised."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lam.inputs.decoding import _FORMATS, decoding_bytes, open_image

SIDE, SLACK = 2048, 8 * 2**20
WHOLE = {"compression": "tiff_deflate", "strip_size": 2**31 - 1}  # one strip


def saver(kind: str, mode: str = "RGB", **options: object) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        if kind == "HEIF":
            pytest.importorskip("pillow_heif").register_heif_opener()
        image = Image.effect_noise((SIDE, SIDE), 1) if kind == "JPEG" else Image.new("L", (SIDE, SIDE), 100)
        image.convert("I" if mode == "I;16" else mode).convert(mode).save(path, kind, **options)  # pyright: ignore[reportArgumentType]

    return save


KINDS = {
    "JPEG": saver("JPEG"),
    "JPEG progressive": saver("JPEG", progressive=True, subsampling=0),
    "JPEG grey": saver("JPEG", "L", progressive=True),
    "PNG": saver("PNG"),
    "PNG transparent": saver("PNG", "RGBA"),
    "PNG deep": saver("PNG", "I;16"),
    "WEBP": saver("WEBP", method=0),
    "WEBP lossless": saver("WEBP", "RGBA", lossless=True, method=0),
    "BMP": saver("BMP"),
    "GIF": saver("GIF", "P"),
    "PPM": saver("PPM"),
    "TIFF": saver("TIFF"),
    "TIFF in one strip": saver("TIFF", "RGBA", **WHOLE),
    "TIFF deep": saver("TIFF", "I;16", **WHOLE),
    "AVIF": saver("AVIF", speed=10),
    "AVIF transparent": saver("AVIF", "RGBA", speed=10, subsampling="4:4:4"),
    "HEIF": saver("HEIF"),
    "HEIF whole colours": saver("HEIF", "RGBA", chroma=444),
}


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc, which Linux has")
@pytest.mark.parametrize("name", KINDS)
def test_an_image_takes_no_more_than_is_said(name: str, tmp_path: Path) -> None:
    KINDS[name](tmp_path / "image")
    with Image.open(tmp_path / "image") as image:
        said = decoding_bytes(image, 256)
    assert said <= 16 * SIDE**2
    open_image(tmp_path / "image", 256)  # memory that the first use keeps
    Path("/proc/self/clear_refs").write_text("5")  # the peak equals the present use
    before = memory("VmRSS")
    open_image(tmp_path / "image", 256)
    assert memory("VmHWM") - before < said + SLACK


def test_every_format_is_tried() -> None:
    assert {name.split()[0] for name in KINDS} == {*_FORMATS, "HEIF"}


def test_what_would_take_too_much_is_refused_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A WebP of 30 by 20 pixels takes 16 bytes for each."""
    Image.new("RGB", (30, 20)).save(tmp_path / "a.webp")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1200)
    assert open_image(tmp_path / "a.webp").size == (30, 20)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1199)
    with pytest.raises(ValueError, match=r"a\.webp.*9600 bytes.*9592"):
        open_image(tmp_path / "a.webp")


@pytest.mark.parametrize(("magic", "channels"), [("P5", 1), ("P6", 3)])
@pytest.mark.parametrize("white", [1, 100, 255, 256, 1023, 4095, 65535])
def test_white_of_a_ppm_file_is_the_one_that_it_states(tmp_path: Path, magic: str, channels: int, white: int) -> None:
    values = np.random.default_rng(0).integers(0, white + 1, (50, 400, channels))
    header = f"{magic}\n# by hand\n400 50\n{white}\n".encode()
    path, content = tmp_path / "a.ppm", header + values.astype("u1" if white < 256 else ">u2").tobytes()
    path.write_bytes(content)
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(open_image(path)), np.asarray(image))
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"a\.ppm.*(truncated|not large enough)"):
        open_image(path)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"BM" + bytes(12) + struct.pack("<LllHHLL", 40, 5000, 5000, 1, 8, 1, 0) + bytes(100), "pixels in runs"),
        (b"P6\n" + b"#\n" * 2**16, "bytes before.*pixels"),
        (b"P3\n2000 2000\n255\n" + b"1 " * 2**22, "bytes of numbers"),
        (b"P2\n20 20\n255\n" + b"#\n" * 2**16, "comments"),
    ],
)
def test_what_is_decoded_in_python_is_limited(content: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=part):
        open_image(tmp_path / "a")
