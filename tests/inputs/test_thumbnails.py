"""Thumbnails: small pictures that look like the original image."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lam.inputs.decoding import thumbnail, thumbnail_of_file


@pytest.mark.parametrize("mode", ["I;16", "I"])
@pytest.mark.parametrize("side", [40, 100, 1000])
def test_sixteen_bits_keep_their_shades(tmp_path: Path, mode: str, side: int) -> None:
    shades = np.linspace(0, 65535, side * side).reshape(side, side)
    image = Image.fromarray(shades.astype(np.uint16 if mode == "I;16" else np.int32))
    assert image.mode == mode
    image.save(tmp_path / "deep.tiff")
    for small in (thumbnail(image), thumbnail_of_file(tmp_path / "deep.tiff")):
        values = np.asarray(Image.open(io.BytesIO(small)))
        assert values.shape == (min(side, 128),) * 2
        assert abs(float(np.median(values)) - 127.5) < 4
        assert (values == 255).mean() < 0.05


def test_grey_stays_grey_and_transparency_stays() -> None:
    for mode, expected in (("L", "L"), ("1", "L"), ("RGB", "RGB"), ("CMYK", "RGB"), ("RGBA", "RGBA"), ("LA", "RGBA")):
        assert Image.open(io.BytesIO(thumbnail(Image.new(mode, (20, 30))))).mode == expected
