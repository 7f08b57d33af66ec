"""Small folders as a phone, a network drive, a Mac's zip, a spreadsheet and labelling tools write them.

Each has photographs of four classes, which differ in colour and its place, or questions of three topics, beside the
usual other files of the device or program. Each function returns a value for `--data.root`.
"""

import csv
import io
import json
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from tests.text_runs import TOPICS

CLASSES = ("Café", "Garten", "Haus", "Vögel")
EACH = 8
_TURNED = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}


def view(label: str, number: int) -> Image.Image:
    """An upright photograph."""
    generator = np.random.default_rng(100 * CLASSES.index(label) + number)
    pixels = generator.integers(0, 60, (48, 64, 3), dtype=np.uint8)
    half = [np.s_[:24], np.s_[24:], np.s_[:, :32], np.s_[:, 32:]][CLASSES.index(label)]
    pixels[half] += np.array([[190, 0, 0], [0, 190, 0], [0, 0, 190], [190, 190, 0]][CLASSES.index(label)], np.uint8)
    return Image.fromarray(pixels)


def jpeg(label: str, number: int, orientation: int = 1, kind: str = "JPEG", **options: object) -> bytes:
    """The photograph as a camera stores it, in one of four orientations."""
    turn, exif, file = _TURNED[orientation], Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Model] = orientation, "Phone"
    image = view(label, number)
    (image if turn is None else image.transpose(turn)).save(file, kind, quality=90, exif=exif, **options)
    return file.getvalue()


def png(label: str, number: int) -> bytes:
    """The photograph as a screen shot."""
    file = io.BytesIO()
    view(label, number).save(file, "PNG")
    return file.getvalue()


def written(path: Path, content: bytes = b"") -> Path:
    """Write a file, and its folder if this is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _photographs() -> Iterator[tuple[str, int, bytes]]:
    for label in CLASSES:
        for number in range(EACH):
            yield label, number, jpeg(label, number, (1, 3, 6, 8)[number % 4])


def phone(root: Path) -> Path:
    """Albums copied over a cable: Live Photos, portraits of several pictures, edits, and deleted files."""
    for label, number, content in _photographs():
        name = f"IMG_{1200 + number}"
        if number == 0:
            content = jpeg(label, number, 6, kind="MPO", save_all=True, append_images=[view(label, 90)])
        if number == 1:  # a motion photo: a film after the end of the picture
            name, content = "PXL_20260703_101112345.MP", content + b"\x00\x00\x00\x18ftypmp42" + bytes(4000)
        if number == 2:
            written(root / label / "Screenshot_20260703-101112.png", png(label, number))
        else:
            written(root / label / f"{name}.JPG", content)
        written(root / label / f"{name}.MOV", b"\x00\x00\x00\x14ftypqt  " + bytes(100))
        written(root / label / f"{name}.AAE", b'<?xml version="1.0" encoding="UTF-8"?><plist version="1.0"/>')
        written(root / label / f".trashed-17836{number}-IMG_{number}.JPG", content)
    written(root / ".thumbnails" / "1.jpg", png("Haus", 0))
    written(root / "Haus" / ".nomedia")
    written(root / "Haus" / "VID_20260703_101112.mp4", b"\x00\x00\x00\x18ftypmp42")
    return root


def network_drive(root: Path) -> Path:
    """A share of a network drive, with thumbnails, metadata of an indexer, recycle bins and snapshots."""
    for label, number, content in _photographs():
        name = f"DSC_{number:04}.jpg"
        written(root / label / name, content)
        for size in ("XL", "M"):
            written(root / label / "@eaDir" / name / f"SYNOPHOTO_THUMB_{size}.jpg", content)
        written(root / label / "@eaDir" / f"{name}@SynoEAStream", bytes(200))
        written(root / label / ".@__thumb" / f"s800{name}", content)
        written(root / label / "Thumbs.db", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
    for folder in ("#recycle", "@Recycle", "#snapshot", "@Recently-Snapshot", "$RECYCLE.BIN", "@eaDir", ".Trash-1000"):
        written(root / folder / "Haus" / "old.jpg", jpeg("Haus", 50))
    written(root / "System Volume Information" / "IndexerVolumeGuid", b"{0}")
    written(root / "desktop.ini", b"[.ShellClassInfo]\r\n")
    return root


def mac_zip(root: Path) -> Path:
    """A folder compressed by a Mac's Finder, unpacked elsewhere: one folder more, and another for resource forks."""
    names: dict[str, bytes] = {"photos/.DS_Store": b"\x00\x00\x00\x01Bud1", "photos/Icon\r": b""}
    fork = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X" + bytes(80)
    for label, number, content in _photographs():
        decomposed = unicodedata.normalize("NFD", label)  # as file names were stored before APFS
        names[f"photos/{decomposed}/P{number}.jpeg"] = content
        names[f"__MACOSX/photos/{decomposed}/._P{number}.jpeg"] = fork
        names[f"photos/{decomposed}/.DS_Store"] = b"\x00\x00\x00\x01Bud1"
    names["__MACOSX/._photos"] = fork
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in names.items():
            packed.writestr(name, content)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(root)
    return root


def questions() -> list[tuple[str, str]]:
    """Texts with their topic."""
    return [
        (f"{words[number % 4]} and {words[(number + 1) % 4]} – {number}", topic)
        for topic, words in ((topic, words.split()) for topic, words in TOPICS.items())
        for number in range(20)
    ]


def spreadsheet(root: Path) -> Path:
    """A sheet saved as "CSV UTF-8" with decimal commas: a byte order mark, semicolons, and empty rows at the end."""
    text = io.StringIO()
    rows = csv.writer(text, delimiter=";", lineterminator="\r\n")
    rows.writerow(["Text", "Label", "Preis", ""])
    rows.writerows([[question, topic, "1,50", ""] for question, topic in questions()])
    rows.writerows([["", "", "", ""]] * 5)
    return written(root / "Fragen (Kopie).csv", text.getvalue().encode("utf-8-sig"))


def workbook(root: Path) -> Path:
    """The same sheet as a workbook, with blanks in a title and an empty row."""
    import openpyxl

    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    sheet.append(["Text ", "Label", "Preis"])
    for question, topic in questions():
        sheet.append([question, topic, 1.5])
    sheet.append([None, None, None])
    root.mkdir(parents=True, exist_ok=True)
    book.create_sheet("Notizen")
    book.save(root / "Fragen.xlsx")
    return root / "Fragen.xlsx"


def label_studio(root: Path) -> Path:
    """Texts labelled in Label Studio, exported as JSON: tasks with their annotations."""
    tasks, control = [], {"from_name": "label", "to_name": "text", "type": "choices", "origin": "manual"}
    for number, (question, topic) in enumerate(questions(), 1):
        annotation = {
            **{"id": 1000 + number, "completed_by": 1, "was_cancelled": False, "ground_truth": False},
            **{"created_at": "2026-07-03T10:11:12.131415Z", "lead_time": 3.2},
            "result": [{"value": {"choices": [topic]}, "id": f"r{number}", **control}],
        }
        task = {"id": number, "annotations": [annotation], "drafts": [], "predictions": [], "data": {"text": question}}
        tasks.append({**task, "meta": {}, "inner_id": number, "project": 7})
    return written(root / "project-7-at-2026-07-03-10-11-1a2b3c4d.json", json.dumps(tasks).encode())


def cvat(root: Path) -> Path:
    """Photographs with a tag each, exported from CVAT as COCO: one folder of images, one of annotations."""
    images, annotations = list[dict[str, object]](), list[dict[str, object]]()
    for number, (label, of_class, content) in enumerate(_photographs(), 1):
        name = f"{label}_{of_class:03}.JPG"
        written(root / "images" / "default" / name, content)
        images.append({"id": number, "width": 64, "height": 48, "file_name": name, "license": 0, "date_captured": 0})
        category = 1 + CLASSES.index(label)
        annotations.append({"id": number, "image_id": number, "category_id": category, "bbox": [0.0, 0.0, 9.0, 9.0]})
    categories = [{"id": number, "name": label, "supercategory": ""} for number, label in enumerate(CLASSES, 1)]
    content = {"info": {}, "licenses": [], "categories": categories, "images": images, "annotations": annotations}
    written(root / "annotations" / "instances_default.json", json.dumps(content).encode())
    return root
