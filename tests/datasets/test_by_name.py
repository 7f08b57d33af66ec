"""Data sets by name: unknown names, options and roots say what is allowed, and OOD images fit."""

import subprocess
import sys

import pytest
import torch

from lam.datasets import TensorImages, load, load_ood


def like(shape=(1, 8, 8)) -> TensorImages:
    return TensorImages(torch.zeros(4, *shape), torch.zeros(4).long(), name="mine")


def test_unknown_names_list_the_allowed():
    with pytest.raises(ValueError, match="there is no data set 'cifar'; allowed: digits, fashionmnist, mnist, folder"):
        load("cifar")
    with pytest.raises(ValueError, match="there is no OOD set 'cifar'; allowed: digits, .*, digits_patches"):
        load_ood("cifar", like=like())


def test_any_data_set_can_be_out_of_distribution():
    images = load_ood("digits", like=like(), held_out=(0,))
    assert (images.name, len(images.classes)) == ("digits", 9)


def test_unknown_options_list_the_allowed(tmp_path):
    with pytest.raises(ValueError, match="digits has no option size, valid; allowed: held_out, validation, test"):
        load("digits", size=3, valid=2)
    with pytest.raises(ValueError, match="digits_held_out has no option held_out; it has none"):
        load_ood("digits_held_out", like=like(), held_out=(1, 2))
    with pytest.raises(ValueError, match="mnist has no option validation; allowed: download"):
        load_ood("mnist", like=like(), root=tmp_path, validation=3)


def test_roots_where_there_is_one_alone():
    with pytest.raises(ValueError, match="digits ships with a library and has no root, got here"):
        load("digits", root="here")
    with pytest.raises(ValueError, match="folder needs a root: the folder of its images"):
        load("folder")
    with pytest.raises(ValueError, match="folder needs a root"):
        load_ood("folder", like=like())


def test_another_shape_is_refused_with_both():
    message = r"digits_patches has items of shape \(1, 8, 8\), but mine of \(3, 8, 8\); take another set"
    with pytest.raises(ValueError, match=message):
        load_ood("digits_patches", like=like((3, 8, 8)))


def test_importing_data_sets_is_light():
    heavy = ("sklearn", "torchvision", "matplotlib", "faiss")
    code = f"import sys, lam.datasets; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
