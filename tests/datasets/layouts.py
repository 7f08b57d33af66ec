"""Writes small data sets in the layouts of their authors: every file and column that a reader touches."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

RECORD = 1 + 3 * 32 * 32


def picture(path: Path, grey: int = 0) -> Path:
    """A small photograph of one grey value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (14, 12), (grey % 256,) * 3).save(path)
    return path


def lines(path: Path, *content: str) -> Path:
    """A text file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
    return path


def folder(root: Path, classes: Mapping[str, int], *, offset: int = 0) -> Path:
    """A folder for each class, with images of distinct grey values."""
    for label, n in classes.items():
        (root / label).mkdir(parents=True, exist_ok=True)
        for index in range(n):
            Image.new("L", (12, 9), offset + index).save(root / label / f"{index}.png")
    return root


def idx(values: np.ndarray) -> bytes:
    """An IDX file of unsigned bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes((0, 0, 8, values.ndim)) + sizes + values.astype(np.uint8).tobytes()


def packed(path: Path, content: bytes) -> Path:
    """A file, compressed if its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def mnist(root: Path, *, suffix: str = "", n_train: int = 60, n_test: int = 20) -> Path:
    """MNIST's or FashionMNIST's four files; pixel (0, 1) of every image is its position in its file."""
    for prefix, n, grey in (("train", n_train, 255), ("t10k", n_test, 100)):
        images = np.full((n, 28, 28), grey)
        images[:, 0, 1] = np.arange(n)
        packed(root / f"{prefix}-images-idx3-ubyte{suffix}", idx(images))
        packed(root / f"{prefix}-labels-idx1-ubyte{suffix}", idx(np.arange(n) % 10))
    return root


def cifar10(root: Path, *, n_batch: int = 20, n_test: int = 30) -> Path:
    """CIFAR-10's binary version; the red pixel (0, 1) of every image is its position in its file."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, n in [*((f"data_batch_{i}.bin", n_batch) for i in range(1, 6)), ("test_batch.bin", n_test)]:
        records = np.zeros((n, RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(n) % 10
        records[:, 1 + 1] = np.arange(n)
        records[:, 1 + 1024 :] = 255  # green and blue
        (folder / name).write_bytes(records.tobytes())
    return root


def svhn(root: Path, *, n_train: int = 40, n_test: int = 20) -> Path:
    """Street View House Numbers; digits in order, 0 as label 10, the red pixel (0, 1) is the position."""
    from scipy.io import savemat

    root.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", n_train), ("test", n_test)):
        pixels = np.zeros((32, 32, 3, n), dtype=np.uint8)
        pixels[0, 1, 0] = np.arange(n)
        digits = np.arange(n) % 10
        savemat(root / f"{part}_32x32.mat", {"X": pixels, "y": np.where(digits == 0, 10, digits)[:, None]})
    return root


def cub200(root: Path, *, n_classes: int = 8, each: int = 4) -> Path:
    """CUB-200-2011; the grey value of an image is its number."""
    folder = root / "CUB_200_2011"
    classes = [f"{label:03}.Bird_{label}" for label in range(1, n_classes + 1)]
    names = [f"{label}/Bird_{i:04}_{label[:3]}.jpg" for label in classes for i in range(each)]
    for number, name in enumerate(names, start=1):
        picture(folder / "images" / name, number)
    lines(folder / "classes.txt", *(f"{i} {name}" for i, name in enumerate(classes, 1)))
    lines(folder / "images.txt", *(f"{i} {name}" for i, name in enumerate(names, 1)))
    lines(folder / "image_class_labels.txt", *(f"{i} {1 + (i - 1) // each}" for i in range(1, len(names) + 1)))
    return root


def cars196(root: Path, *, n_classes: int = 8, each: int = 4) -> Path:
    """Stanford Cars in one annotation file."""
    from scipy.io import savemat

    files = [f"car_ims/{i:06}.jpg" for i in range(1, n_classes * each + 1)]
    for number, file in enumerate(files, start=1):
        picture(root / file, number)
    fields = ("relative_im_path", "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test")
    rows = [(file, 1, 1, 14, 12, 1 + i // each, i % 2) for i, file in enumerate(files)]
    names = np.array([[f"Car {label}" for label in range(n_classes)]], dtype=object)
    savemat(root / "cars_annos.mat", {"annotations": structs(rows, fields), "class_names": names})
    return root


def cars196_kit(root: Path, *, n_classes: int = 8, each: int = 4) -> Path:
    """Stanford Cars with its development kit: half of each class in either part."""
    from scipy.io import savemat

    (root / "devkit").mkdir(parents=True)
    fields = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")
    for part, file in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        rows = [(1, 1, 14, 12, label, f"{i:05}.jpg") for i, label in _numbered(n_classes, each // 2)]
        for row in rows:
            picture(root / f"cars_{part}" / row[-1], row[-2])
        savemat(root / file, {"annotations": structs(rows, fields)})
    names = np.array([[f"Car {label}" for label in range(n_classes)]], dtype=object)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
    return root


def lfw(root: Path, train: Mapping[str, int], test: Mapping[str, int], *, lists: bool = True) -> Path:
    """Labeled Faces in the Wild, deep-funneled, with the lists of people."""
    for name, n in {**train, **test}.items():
        for i in range(1, n + 1):
            picture(root / "lfw-deepfunneled" / name / f"{name}_{i:04}.jpg", i)
    if lists:
        for part, people in (("Train", train), ("Test", test)):
            content = [f"{name}\t{n}" for name, n in people.items()]
            lines(root / f"peopleDev{part}.txt", str(len(people)), *content)
    return root


def _numbered(n_classes: int, each: int) -> Sequence[tuple[int, int]]:
    return list(enumerate((label for label in range(1, n_classes + 1) for _ in range(each)), start=1))


def structs(rows: Sequence[tuple], fields: Sequence[str]) -> np.ndarray:
    """A struct array of MATLAB."""
    return np.array([rows], dtype=[(name, object) for name in fields])


def table(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """A CSV file."""
    columns = list(rows[0])
    content = [",".join(columns), *(",".join(str(row[name]) for name in columns) for row in rows)]
    return lines(path, *content)


def places(root: Path, rows: Sequence[Mapping[str, object]], *, name: str = "places.csv") -> Path:
    """A folder of images and the CSV file that places them; the grey value of an image is its row."""
    for number, row in enumerate(rows):
        picture(root / str(row["path"]), number)
    table(root / name, rows)
    return root


def msls(root: Path, cities: Sequence[str], *, each: int = 6) -> Path:
    """MSLS's train_val: images are 8 m apart; in each role, the last is a panorama, and the first is in no subtask."""
    for c, city in enumerate(cities):
        for role, shift in (("query", 0), ("database", 3)):
            folder = root / "train_val" / city / role
            keys = [f"{city}_{role[0]}{i}" for i in range(each)]
            for number, key in enumerate(keys):
                picture(folder / "images" / f"{key}.jpg", number)
            indexed = list(enumerate(keys))
            table(
                folder / "postprocessed.csv",
                [
                    {"": i, "key": key, "easting": 5e5 + 8 * i + shift, "northing": 6e6 + c, "unique_cluster": i,
                     "night": False, "control_panel": False, "view_direction": "Forward"}
                    for i, key in indexed
                ],
            )  # fmt: skip
            table(
                folder / "raw.csv",
                [
                    {"": i, "key": key, "lon": 10.0, "lat": 55.0, "ca": "" if i == 1 else 30.5 * i,
                     "captured_at": "2017-05-29", "pano": i == each - 1}
                    for i, key in reversed(indexed)  # joined by key, not by row
                ],
            )  # fmt: skip
            subtasks = ("all", "s2w", "w2s", "o2n", "n2o", "d2n", "n2d")
            table(
                folder / "subtask_index.csv",
                [{"": i, "key": key, **{task: i > 0 and task != "n2d" for task in subtasks}} for i, key in indexed],
            )
    return root


def _topics() -> dict[str, list[list[str]]]:
    """Texts of three topics, in parts."""
    words = {"cats": "fur paw whisker purr", "trains": "rail station engine track", "bread": "flour oven crust yeast"}
    rows = [
        [f"{of_topic.split()[number % 4]} {of_topic.split()[(number + 1) % 4]} {number}", topic]
        for topic, of_topic in words.items()
        for number in range(16)
    ]
    return {"train": rows[::2], "val": rows[1::4], "test": rows[3::4]}


def clinc150(folder: Path) -> None:
    """Texts in the file of CLINC150, with some that are out of scope."""
    folder.mkdir(parents=True, exist_ok=True)
    outside, parts = [[f"cloud wind {number}", "oos"] for number in range(8)], _topics()
    content = {**parts, **{f"oos_{part}": outside for part in parts}}
    (folder / "data_full.json").write_text(json.dumps(content), encoding="utf-8")


def texts(folder: Path) -> None:
    """Texts in the files of BANKING77, and in files for the data set `texts`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = _topics()
    for name in ("train", "test"):
        content = (f"{text},{topic},{topic}" for text, topic in parts[name])
        lines(folder / f"{name}.csv", "text,label,category", *content)
