"""Preprocessing equals torchvision's on the same image, reads every kind of pixel, and names what it cannot read."""

import json
import struct
import sys
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from lam.inputs.decoding import _convert, decode, open_image, to_mode
from lam.inputs.preprocessing import Preprocessing
from tests.helpers import unchecked


def photograph(height: int = 60, width: int = 90) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    waves = [128 + 100 * np.sin(rows / 7 + phase) * np.cos(columns / 5 - phase) for phase in range(3)]
    return Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8))


class TestTensor:
    def test_scales_to_the_unit_interval_without_anything_else(self):
        image = Image.fromarray(np.arange(0, 250, 10, dtype=np.uint8).reshape(5, 5))
        tensor = Preprocessing(mode="L")(image)
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, torch.arange(0, 250, 10).reshape(1, 5, 5) / 255)

    @pytest.mark.parametrize("shape", [(60, 90), (91, 60), (33, 33), (20, 31)])
    @pytest.mark.parametrize("resampling", ["bilinear", "bicubic"])
    def test_equals_torchvision(self, shape, resampling):
        from torchvision import transforms

        mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
        mode = transforms.InterpolationMode(resampling)
        theirs = transforms.Compose(
            [
                transforms.Resize(32, interpolation=mode),
                transforms.CenterCrop(27),
                transforms.PILToTensor(),
                transforms.ConvertImageDtype(torch.float32),
                transforms.Normalize(mean, std),
            ]
        )
        ours = Preprocessing(size=32, crop=27, mean=mean, std=std, resampling=resampling)
        image = photograph(*shape)
        step = 1 / 255 / min(std)  # the 8-bit rounding of one pixel
        torch.testing.assert_close(ours(image), theirs(image), rtol=0, atol=1.01 * step)
        assert (ours(image) != theirs(image)).float().mean() < 0.01

    def test_exact_size_changes_the_aspect(self):
        tensor = Preprocessing(mode="L", size=(10, 20))(photograph())
        assert tensor.shape == (1, 10, 20)

    def test_shrinking_is_antialiased(self):
        stripes = Image.fromarray(np.tile(np.array([0, 255], dtype=np.uint8), (64, 32)))
        tensor = Preprocessing(mode="L", size=8)(stripes)
        assert (tensor[:, 1:-1, 1:-1] - 0.5).abs().max() < 0.02

    def test_normalize_takes_a_batch_and_leaves_it_unchanged(self):
        pixels = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(2, 3, 4, 4)
        before = pixels.clone()
        preprocessing = Preprocessing(size=(4, 4), mean=(0.1, 0.2, 0.3), std=(1, 2, 3))
        batch = preprocessing.normalize(pixels)
        images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
        torch.testing.assert_close(batch, torch.stack([preprocessing(image) for image in images]), rtol=0, atol=0)
        assert torch.equal(pixels, before)

    @pytest.mark.parametrize(
        "options", [{}, {"mean": (0.1, 0.2, 0.3)}, {"std": (1, 2, 3)}, {"mean": (0.5,) * 3, "std": (2,) * 3}]
    )
    def test_denormalize_undoes_normalize(self, options):
        pixels = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(2, 3, 4, 4)
        preprocessing = Preprocessing(size=(4, 4), **options)
        normalized = preprocessing.normalize(pixels)
        before = normalized.clone()
        torch.testing.assert_close(preprocessing.denormalize(normalized), pixels / 255)
        assert torch.equal(normalized, before)

    @pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1)])
    def test_thin_images_give_a_finite_answer(self, shape):
        tensor = Preprocessing.imagenet(32)(Image.new("RGB", shape[::-1], "red"))
        assert tensor.shape == (3, 32, 32)
        assert tensor.isfinite().all()

    @pytest.mark.parametrize(
        ("preprocessing", "shape"),
        [
            (Preprocessing.imagenet(), (3, 224, 224)),
            (Preprocessing(mode="L", size=(4, 6)), (1, 4, 6)),
            (Preprocessing(crop=(4, 6)), (3, 4, 6)),
            (Preprocessing(size=(8, 8), crop=5), (3, 5, 5)),
            (Preprocessing(size=8), None),
            (Preprocessing(), None),
        ],
    )
    def test_shape_is_known_ahead_or_none(self, preprocessing, shape):
        assert preprocessing.shape == shape
        assert shape is None or preprocessing(photograph()).shape == shape

    def test_a_crop_larger_than_an_unresized_image_is_refused(self):
        with pytest.raises(ValueError, match="60 x 90.*crop=70.*size"):
            Preprocessing(crop=70)(photograph())

    def test_an_image_that_would_become_too_large_is_refused(self, tmp_path):
        strip = Image.new("L", (60_000, 1))
        with pytest.raises(ValueError, match="1 x 60000.*224 x 13440000.*crop"):
            Preprocessing(size=224)(strip)
        strip.save(tmp_path / "strip.png")
        with pytest.raises(ValueError, match=r"strip\.png: "):
            Preprocessing(size=224)(tmp_path / "strip.png")

    def test_an_empty_image_is_refused(self):
        with pytest.raises(ValueError, match="no pixels: 5 x 0"):
            Preprocessing()(Image.new("L", (0, 5)))


class TestPixels:
    @pytest.mark.parametrize("mode", ["L", "RGB"])
    @pytest.mark.parametrize(
        "stored", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "I;16"]
    )
    def test_white_stays_white_in_every_mode(self, stored, mode):
        if stored in ("RGBa", "HSV", "PA"):
            image = Image.new("RGBA" if stored != "HSV" else "RGB", (3, 3), "white")
            image = image.convert("P").convert("PA") if stored == "PA" else image.convert(stored)
        elif stored == "I;16":
            image = Image.fromarray(np.full((3, 3), 65535, dtype=np.uint16))
        else:
            image = Image.new("RGB", (3, 3), "white").convert(stored)
        assert image.mode == stored
        tensor = Preprocessing(mode=mode)(image)
        assert tensor.shape == ({"L": 1, "RGB": 3}[mode], 3, 3)
        torch.testing.assert_close(tensor, torch.ones_like(tensor))

    def test_16_bits_keep_their_scale(self, tmp_path):
        values = np.array([[0, 257], [32896, 65535]], dtype=np.uint16)
        for name in ("deep.png", "deep.tiff"):
            Image.fromarray(values).save(tmp_path / name)
            tensor = Preprocessing(mode="L")(tmp_path / name)
            torch.testing.assert_close(tensor, torch.tensor([[[0.0, 1.0], [128.0, 255.0]]]) / 255)

    @pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
    @pytest.mark.parametrize("kind", ["PNG", "TIFF"])
    def test_grey_of_fewer_bits_in_16_is_as_bright_as_it_was(self, tmp_path, bits, kind):
        shades = np.linspace(0, 2**bits - 1, 600 * 500).round().reshape(600, 500).astype(np.uint16)
        Image.fromarray(shades).save(tmp_path / "deep", kind)
        with Image.open(tmp_path / "deep") as image:
            assert image.mode == "I;16"
            assert (np.asarray(to_mode(image, "L")) == np.round(shades * (255 / (2**bits - 1)))).all()
        assert Preprocessing(mode="L", size=32)(tmp_path / "deep").mean() == pytest.approx(0.5, abs=0.01)

    def test_32_bit_integers_within_16_bits_are_read_and_others_refused(self):
        image = Image.fromarray(np.array([[0, 65535]], dtype=np.int32))
        torch.testing.assert_close(Preprocessing(mode="L")(image), torch.tensor([[[0.0, 1.0]]]))
        with pytest.raises(ValueError, match=r"within 0 and 65535, got 0 to 70000"):
            Preprocessing()(Image.fromarray(np.array([[0, 70000]], dtype=np.int32)))

    def test_transparency_is_laid_on_white(self, tmp_path):
        half = Image.new("RGBA", (2, 2), (0, 0, 0, 51))
        torch.testing.assert_close(Preprocessing()(half), torch.full((3, 2, 2), 0.8))
        palette = Image.new("P", (2, 2), 1)
        palette.putpalette([0, 0, 0, 255, 0, 0])
        palette.save(tmp_path / "palette.png", transparency=1)
        torch.testing.assert_close(Preprocessing()(tmp_path / "palette.png"), torch.ones(3, 2, 2))

    @pytest.mark.parametrize("mode", ["F", "LAB"])
    def test_pixels_without_a_conversion_are_refused(self, mode):
        with pytest.raises(ValueError, match=f"mode {mode} to L.*RGB"):
            Preprocessing(mode="L")(Image.new(mode, (3, 3)))

    def test_exif_orientation_is_applied(self, tmp_path):
        image = photograph(20, 30)
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
        image.save(tmp_path / "turned.png", exif=exif)
        upright = Preprocessing()(image.transpose(Image.Transpose.ROTATE_270))
        assert torch.equal(Preprocessing()(tmp_path / "turned.png"), upright)
        with Image.open(tmp_path / "turned.png") as lazy:
            assert torch.equal(Preprocessing()(lazy), upright)

    def test_first_frame_of_an_animation(self, tmp_path):
        frames = [Image.new("L", (4, 4), value) for value in (255, 0, 100)]
        frames[0].save(tmp_path / "animated.png", save_all=True, append_images=frames[1:])
        torch.testing.assert_close(Preprocessing(mode="L")(tmp_path / "animated.png"), torch.ones(1, 4, 4))


class TestOpenImage:
    def test_paths_as_text_or_path(self, tmp_path):
        photograph().save(tmp_path / "a.png")
        assert np.array_equal(np.asarray(open_image(tmp_path / "a.png")), np.asarray(photograph()))
        assert open_image(str(tmp_path / "a.png")).size == (90, 60)

    @pytest.mark.parametrize(
        "content", [b"", b"hello, this is text", b"%PDF-1.4", b"<svg></svg>", b"%!PS-Adobe-3.0 EPSF-3.0"]
    )
    def test_no_image_is_named(self, tmp_path, content):
        path = tmp_path / "letter.jpg"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"letter\.jpg.*JPEG, PNG"):
            open_image(path)

    @pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "gif", "tiff", "ppm", "avif", "heic"])
    def test_every_truncation_is_named(self, tmp_path, suffix):
        if suffix == "heic":
            pytest.importorskip("pillow_heif").register_heif_opener()
        whole = tmp_path / f"whole.{suffix}"
        photograph().save(whole)
        content = whole.read_bytes()
        open_image(whole)
        for share in (0.3, 0.6, 0.9):
            cut = tmp_path / f"cut.{suffix}"
            cut.write_bytes(content[: int(len(content) * share)])
            with pytest.raises(ValueError, match=rf"cut\.{suffix}"):
                open_image(cut)

    @pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
    def test_what_phones_write_is_read_under_any_name(self, tmp_path, kind):
        if kind == "HEIF":
            pytest.importorskip("pillow_heif").register_heif_opener()
        exif = Image.Exif()
        exif[0x0112] = 6 if kind == "AVIF" else 1  # pillow_heif writes none but upright
        photograph(600, 900).save(tmp_path / "IMG_0001.jpg", kind, exif=exif, quality=90)
        image = open_image(tmp_path / "IMG_0001.jpg", 256)
        expected = photograph(600, 900).reduce(2)
        if kind == "AVIF":
            expected = expected.transpose(Image.Transpose.ROTATE_270)
        assert image.size == expected.size
        assert np.abs(np.asarray(image).astype(int) - np.asarray(expected)).mean() < 5

    def test_heic_without_its_extra_says_what_to_install(self, tmp_path, monkeypatch):
        (tmp_path / "IMG_0001.HEIC").write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf")
        monkeypatch.setitem(sys.modules, "pillow_heif", None)
        with pytest.raises(ValueError, match=r"HEIC.*'lam-retrieval\[heic\]'"):
            open_image(tmp_path / "IMG_0001.HEIC")

    def test_pixels_are_refused_in_one_line(self):
        with pytest.raises(ValueError, match="ndarray.*Image.fromarray"):
            unchecked(Preprocessing.__call__)(Preprocessing.imagenet(), np.zeros((8, 8, 3), np.uint8))

    def test_missing_file_and_folder(self, tmp_path):
        with pytest.raises(ValueError, match=r"no image.*absent\.png"):
            open_image(tmp_path / "absent.png")
        with pytest.raises(ValueError, match=f"{tmp_path}.*image"):
            open_image(tmp_path)

    @pytest.mark.parametrize("side", [10_000, 20_000])
    def test_decompression_bombs_are_refused_from_the_header(self, tmp_path, side):
        header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
        content = b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
        (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
        with pytest.raises(ValueError, match=r"bomb\.png.*pixels"):
            open_image(tmp_path / "bomb.png")

    @pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
    def test_bombs_are_refused_where_warnings_are_ignored_too(self, tmp_path, monkeypatch):
        Image.new("L", (15, 10)).save(tmp_path / "bomb.png")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 149)
        with pytest.raises(ValueError, match=r"bomb\.png .*15 x 10 pixels, more than 149"):
            open_image(tmp_path / "bomb.png")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        assert open_image(tmp_path / "bomb.png").size == (15, 10)

    @pytest.mark.parametrize("size", [(1, 65_536), (65_536, 1)])
    def test_thin_images_are_refused(self, tmp_path, size):
        Image.new("L", size).save(tmp_path / "thin.png")
        with pytest.raises(ValueError, match=r"thin\.png.*: (1 x 65536|65536 x 1) pixels.*65,535"):
            open_image(tmp_path / "thin.png")
        Image.new("L", (65_535, 1)).save(tmp_path / "long.png")
        assert open_image(tmp_path / "long.png").size == (65_535, 1)

    def test_text_bombs_are_refused(self, tmp_path):
        information = PngImagePlugin.PngInfo()
        information.add_text("comment", "0" * (2 << 20), zip=True)
        Image.new("L", (4, 4)).save(tmp_path / "text.png", pnginfo=information)
        with pytest.raises(ValueError, match=r"text\.png.*read"):
            open_image(tmp_path / "text.png")


class TestRecord:
    def test_json_round_trip(self):
        for preprocessing in (
            Preprocessing(),
            Preprocessing.imagenet(227),
            Preprocessing(mode="L", size=(28, 28), crop=(20, 24), mean=(0.5,), std=(1,), resampling="bicubic"),
        ):
            text = json.dumps(preprocessing.to_json())
            assert Preprocessing.from_json(json.loads(text)) == preprocessing

    def test_imagenet_keeps_the_usual_ratio(self):
        assert (Preprocessing.imagenet().size, Preprocessing.imagenet().crop) == (256, 224)

    @pytest.mark.usefixtures("as_in_production")
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"mode": "RGBA"}, "mode.*L, RGB.*'RGBA'"),
            ({"mode": ["L"]}, "mode.*L, RGB"),
            ({"resampling": "nearest"}, "resampling.*bilinear, bicubic.*'nearest'"),
            ({"size": 0}, "size.*None.*8,192, got 0"),
            ({"size": [4, -4]}, r"size.*\(4, -4\)"),
            ({"size": [4, 4, 4]}, "size must be"),
            ({"size": 4.5}, "size must be"),
            ({"size": True}, "size must be"),
            ({"crop": "4"}, "crop must be"),
            ({"size": 20, "crop": 30}, "crop.*crop=30.*size=20"),
            ({"size": [20, 40], "crop": [10, 41]}, "crop.*fit into size"),
            ({"mean": [0.5]}, r"mean.*3 finite number\(s\).*mode RGB.*\(0.5,\)"),
            ({"mode": "L", "mean": 0.5}, "mean must have 1"),
            ({"mode": "L", "std": [float("nan")]}, "std must have 1"),
            ({"std": ["a", 1, 1]}, "std must have 3"),
            ({"std": [1.0, 0.0, 1.0]}, "std.*positive"),
            ({"colour": "RGB", "sizes": 3}, "no field colour, sizes.*mode, size, crop"),
            ([1, 2], r"preprocessing.*\[1, 2\]"),
        ],
    )
    def test_bad_records_are_refused(self, fields, message):
        with pytest.raises(ValueError, match=message):
            Preprocessing.from_json(fields)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [({}, (3, 224, 224)), ({"size": 32}, (3, 32, 32)), ({"size": [32, 48]}, (3, 32, 48)), ({"crop": 20}, (3, 20, 20))],
)
def test_what_is_not_given_is_as_imagenet_has_it(fields: dict[str, Any], shape: tuple[int, int, int]) -> None:
    preprocessing = Preprocessing.of(fields)
    assert preprocessing.shape == shape
    assert preprocessing(Image.new("RGB", (60, 40))).shape == shape
    assert (preprocessing.mean, preprocessing.std) == (Preprocessing.imagenet().mean, Preprocessing.imagenet().std)
    grey = Preprocessing.of({**fields, "mode": "L"})
    assert (grey.mean, grey.std) == (None, None)
    assert Preprocessing.of({**fields, "mean": None}).mean is None
    for wrong, message in (({"size": -32}, "got -32"), ({"pixels": 3}, "no field pixels"), ([], "mapping of its")):
        with pytest.raises(ValueError, match=message):
            Preprocessing.of(wrong)


@pytest.mark.parametrize(("crop", "size"), [(224, 256), (112, 128), ([96, 112], 128)])
def test_a_crop_alone_is_cut_from_an_image_a_little_larger(crop, size):
    preprocessing = Preprocessing.of({"crop": crop})
    assert preprocessing.size == size
    large = Image.new("L", (640, 480))
    large.paste(255, (200, 0, 440, 480))
    assert preprocessing(large).std() > 0.5  # a crop of the whole image would see white alone
    assert Preprocessing.of({"crop": crop, "size": None}).size is None


class TestReduction:
    """Large images are reduced before they are resized."""

    def test_small_ones_are_not(self):
        preprocessing = Preprocessing.imagenet(64)
        assert preprocessing.reduced_to == 256
        assert Preprocessing.imagenet(224).reduced_to == 512
        assert Preprocessing(size=(100, 300)).reduced_to == 600
        assert Preprocessing(crop=5).reduced_to is None
        for image in (photograph(511, 2000), photograph(2000, 511)):
            assert decode(image, 256) is image
        assert decode(photograph(513, 2000), 256).size == (1000, 257)
        assert decode(photograph(800, 770), 256).size == (257, 267)

    @pytest.mark.long
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
    @pytest.mark.parametrize("stored", ["RGB", "L"])
    def test_the_tensor_is_nearly_that_of_the_whole(self, tmp_path, kind, stored):
        image, noise = photograph(120, 100).resize((1500, 1800)), Image.effect_noise((1500, 1800), 60).convert("RGB")
        path = tmp_path / "image"
        Image.blend(image, noise, 0.3).convert(stored).save(path, kind)
        preprocessing = Preprocessing(size=100, crop=90)
        with Image.open(path) as whole:
            difference = (preprocessing(path) - preprocessing._tensor(whole)).abs()
        assert difference.max() < 6 / 255
        assert difference.mean() < 1 / 255

    @pytest.mark.parametrize("stored", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
    @pytest.mark.parametrize("shape", [(1100, 777), (601, 3000)])
    def test_in_strips_it_is_what_it_is_at_once(self, stored, shape):
        rows, columns = np.mgrid[: shape[0], : shape[1]]
        grey = Image.fromarray(((rows * 7 + columns * 3) % 251).astype(np.uint8))
        if stored == "I;16":
            image = Image.fromarray(((rows * 77 + columns * 33) % 65521).astype(np.uint16))
        else:
            image = Image.merge("RGBA", (grey, grey.rotate(180), grey, grey)).convert(stored)
        factor = min(image.size) // 256
        mode = "L" if stored in ("1", "L", "LA", "I;16") else "RGB"
        assert factor > 1
        at_once = _convert(image, mode, 65535)
        assert np.array_equal(np.asarray(decode(image, 256)), np.asarray(at_once.reduce(factor)))
        assert np.array_equal(np.asarray(to_mode(image, mode)), np.asarray(at_once))

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
    def test_it_is_turned_afterwards(self, tmp_path, kind):
        exif = Image.Exif()
        exif[0x0112] = 6
        photograph(600, 900).save(tmp_path / "turned", kind, exif=exif)
        image = open_image(tmp_path / "turned", 256)
        assert image.size == (300, 450)
        assert image.getexif().get(0x0112, 1) == 1
        upright = photograph(600, 900).transpose(Image.Transpose.ROTATE_270).reduce(2)
        assert np.abs(np.asarray(image).astype(int) - np.asarray(upright)).mean() < 4

    def test_a_file_and_its_image_give_the_same(self, tmp_path):
        path = tmp_path / "image.jpg"
        photograph(1800, 1500).save(path)
        preprocessing = Preprocessing.imagenet(64)
        with Image.open(path) as opened:
            assert torch.equal(preprocessing(path), preprocessing(opened))
        assert torch.equal(preprocessing(path), preprocessing(open_image(path, preprocessing.reduced_to)))

    def test_an_image_of_the_caller_stays_as_it_is(self):
        image = photograph(1100, 1200)
        image.getexif()[0x0112] = 3
        before = image.tobytes()
        Preprocessing.imagenet(64)(image)
        assert image.size == (1200, 1100)
        assert image.tobytes() == before
        assert image.getexif()[0x0112] == 3
