"""Data sets by name: errors for unknown names, options and roots, and OOD images of the same shape."""

import subprocess
import sys

import pytest
import torch

from lam.datasets import TensorImages, load, load_ood
from lam.inputs import Preprocessing
from tests.datasets import layouts


def like(shape=(1, 8, 8)) -> TensorImages:
    return TensorImages(torch.zeros(4, *shape), torch.zeros(4).long(), name="mine")


def test_unknown_names_list_the_allowed():
    with pytest.raises(ValueError, match="data set.*digits, fashionmnist, mnist.*'cifar'"):
        load("cifar")
    with pytest.raises(ValueError, match="OOD set.*digits, .*digits_patches.*'cifar'"):
        load_ood("cifar", like=like())


def test_any_data_set_can_be_out_of_distribution():
    images = load_ood("digits", like=like(), held_out=(0,))
    assert (images.name, len(images.classes)) == ("digits", 9)


def test_unknown_options_list_the_allowed(tmp_path):
    with pytest.raises(ValueError, match="digits.*no option size, valid.*held_out, validation, test"):
        load("digits", size=3, valid=2)
    with pytest.raises(ValueError, match="digits_held_out.*no option held_out"):
        load_ood("digits_held_out", like=like(), held_out=(1, 2))
    with pytest.raises(ValueError, match="mnist.*no option validation.*download"):
        load_ood("mnist", like=like(), root=tmp_path, validation=3)


def test_options_of_another_type_are_named(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").touch()
    with pytest.raises(ValueError, match="preprocessing of folder: .*'small'"):
        load("folder", root=tmp_path, preprocessing="small")
    with pytest.raises(ValueError, match="validation of digits: .*'abc'"):
        load("digits", validation="abc")
    with pytest.raises(ValueError, match="held_out of digits: .*8"):
        load_ood("digits", like=like(), held_out=8)
    assert load("digits", held_out=[8, 9]).test.classes == load("digits", held_out=(8, 9)).test.classes


def test_roots_where_there_is_one_alone():
    with pytest.raises(ValueError, match="digits.*root.*here"):
        load("digits", root="here")
    for name in ("folder", "texts"):
        with pytest.raises(ValueError, match=f"{name}.*root"):
            load(name)
    with pytest.raises(ValueError, match="folder.*root"):
        load_ood("folder", like=like())


def test_images_of_another_shape_are_read_as_files_of_them_would_be():
    patches, grey = load_ood("digits_patches", like=like((3, 12, 10))), load_ood("digits_patches", like=like((1, 8, 8)))
    assert patches.shape == patches[0][0].shape == (3, 12, 10)
    assert (len(patches), patches.name) == (len(grey), grey.name)
    assert isinstance(grey, TensorImages)
    assert torch.equal(patches.subset([1, 3])[1][0], patches.preprocessing(grey.picture(3)))
    assert patches.preview(3) == grey.preview(3)


def test_images_of_the_same_shape_get_the_same_normalisation():
    preprocessing = Preprocessing(mode="L", size=(8, 8), mean=(0.5,), std=(0.25,))
    known, raw = load("digits", preprocessing=preprocessing).test, load("digits").test
    patches, plain = load_ood("digits_patches", like=known), load_ood("digits_patches", like=raw)
    assert patches.preprocessing == preprocessing
    torch.testing.assert_close(patches[3][0], (plain[3][0] - 0.5) / 0.25)


@pytest.mark.filterwarnings("ignore::lam.utils.notes.Note")  # of files that other data sets read
@pytest.mark.parametrize("name", ["digits_patches", "folder", "lfw", "places"])
def test_images_are_refused_where_texts_are_known(tmp_path, name):
    layouts.texts(tmp_path)
    texts, root = load("texts", root=tmp_path).test, tmp_path / "images"
    layouts.lfw(root, {"Ann": 2, "Bob": 2}, {"Cy": 2})
    layouts.places(root, [{"path": f"places/{x}.jpg", "x": x, "y": 0} for x in range(20)])
    with pytest.raises(ValueError, match=rf"{name}.*shape.*texts of \(4096,\)"):
        load_ood(name, like=texts, root=None if name == "digits_patches" else root)


@pytest.mark.long
def test_importing_data_sets_is_light():
    heavy = ("sklearn", "torchvision", "matplotlib", "faiss")
    code = f"import sys, lam.datasets; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
