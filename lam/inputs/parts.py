"""Limits on the number of parts in an image file, checked before decoding.

A decoder spends time on each scan, segment, chunk and EXIF entry, so a small file with many parts can take minutes.
Damaged files pass, because the decoder reports them.
"""

import mmap
import re
import struct
from collections.abc import Iterator

MOST_SCANS = 64
MOST_SEGMENTS = 256  # of metadata: application segments and comments
MOST_PARTS = 1_000  # tables of a JPEG, chunks, blocks, EXIF entries
MOST_STRIPS = 2**18  # strips or tiles of a TIFF file
MOST_SKIPPED = 2**16  # bytes between the segments of a JPEG
_LEAST_OF_CHUNK = 1_024  # bytes of a file for each chunk of pixels beyond `MOST_PARTS`

MOST_PLAIN = 2**22  # bytes and pixels of formats that Pillow decodes in Python: run-length BMP, plain PPM
_PPM_HEADER = 2**16  # bytes
_RUN_LENGTH = (1, 2)  # compressions of a BMP file

_Bytes = bytes | mmap.mmap

_PPM_NUMBER = r"(?:\s|#[^\r\n]*[\r\n])+[-+.\w]+"
_PPM_NUMBERS = re.compile(rf"P(?:[14]\b(?:{_PPM_NUMBER}){{2}}|[^14]\S*(?:{_PPM_NUMBER}){{3}})".encode())
_MARKER = re.compile(rb"\xff[\x01-\xfe]")
_MARKER_IN_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_LONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length
_SCAN, _END, _EXIF, _COMMENT = 0xDA, 0xD9, 0xE1, 0xFE
_PIXELS = (b"IDAT", b"fcTL", b"fdAT")
_CHEAP = b"ANMF"  # frames of a WebP file: only the first is decoded
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_STRIPS = (273, 324)  # the tags of the offsets of strips and tiles


class TooManyPartsError(ValueError):
    """An image file has so many parts that reading it would take very long."""


def check_parts(file: _Bytes) -> None:
    """Reject an image file with too many scans, segments, chunks, blocks, strips, EXIF entries, runs or comments.

    JPEG, PNG, WebP, GIF, TIFF, BMP and PPM files are checked; others pass. The error names the part and its limit.

    Example:
        >>> check_parts(b"\\xff\\xd8" + 257 * b"\\xff\\xfe\\x00\\x02")
        Traceback (most recent call last):
        lam.inputs.parts.TooManyPartsError: more than 256 segments of metadata: save it again as a plain JPEG or PNG
    """
    head = file[:12]
    if head.startswith(b"\xff\xd8"):
        _check_jpeg(file)
    elif head.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_chunks(file, _png_chunks(file))
    elif head.startswith(b"RIFF") and head.endswith(b"WEBP"):
        _check_chunks(file, _webp_chunks(file))
    elif head.startswith((b"GIF87a", b"GIF89a")):
        _check_gif(file)
    elif head.startswith((b"II", b"MM")):
        _check_tiff(file)
    elif head.startswith(b"BM"):
        _check_bmp(file)
    elif re.match(rb"P[1-7fy]", head):
        _check_ppm(file)


def _limit(number: int, most: int, part: str) -> None:
    if number > most:
        raise TooManyPartsError(f"more than {most:,} {part}: save it again as a plain JPEG or PNG")


def _check_jpeg(file: _Bytes) -> None:
    scans = segments = tables = skipped = 0
    in_scan, at, exif = False, 2, []
    while True:
        if in_scan:
            found = _MARKER_IN_SCAN.search(file, at)
        else:
            end = min(at + MOST_SKIPPED + 2, len(file))
            found = _MARKER.search(file, at, end)
            skipped += (found.start() if found else end) - at
            _limit(skipped, MOST_SKIPPED, "bytes between segments")
        if found is None:
            break
        at, marker = found.end(), file[found.start() + 1]
        if marker == _END:
            break
        if marker in _LONE:
            tables += 1
        else:
            length = max(2, int.from_bytes(file[at : at + 2], "big"))
            if marker == _EXIF and file[at + 2 : at + 8] == b"Exif\0\0":
                exif.append(file[at + 8 : at + length])
            at += length
            in_scan = marker == _SCAN
            scans += in_scan
            metadata = 0xE0 <= marker <= 0xEF or marker == _COMMENT
            segments += metadata
            tables += not metadata and not in_scan
        _limit(scans, MOST_SCANS, "scans")
        _limit(segments, MOST_SEGMENTS, "segments of metadata")
        _limit(tables, MOST_PARTS, "tables")
    if exif:
        _check_tiff(b"".join(exif))


def _png_chunks(file: _Bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 8
    while len(header := file[at : at + 8]) == 8 and header[4:] != b"IEND":
        length = int.from_bytes(header[:4], "big")
        yield header[4:], at + 8, length
        at += 12 + length


def _webp_chunks(file: _Bytes) -> Iterator[tuple[bytes, int, int]]:
    at, end = 12, 8 + int.from_bytes(file[4:8], "little")
    while at < end and len(header := file[at : at + 8]) == 8:
        length = int.from_bytes(header[4:], "little")
        yield header[:4], at + 8, length
        at += 8 + length + length % 2


def _check_chunks(file: _Bytes, chunks: Iterator[tuple[bytes, int, int]]) -> None:
    pixels = others = 0
    for name, at, length in chunks:
        if name == _CHEAP:
            continue
        pixels += name in _PIXELS
        others += name not in _PIXELS
        _limit(pixels, MOST_PARTS + len(file) // _LEAST_OF_CHUNK, "chunks of pixels")
        _limit(others, MOST_PARTS, "chunks of metadata")
        if name in (b"eXIf", b"EXIF"):
            _check_tiff(file[at : at + length].removeprefix(b"Exif\0\0"))


def _check_gif(file: _Bytes) -> None:
    flags = file[10:11]
    blocks, at = 0, 13 + (3 * 2 ** ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0)  # after the palette
    while file[at : at + 1] == b"\x21":  # an extension; the decoder stops at the first image
        at, size = at + 2, 1
        while size:  # an empty block ends the extension
            size = int.from_bytes(file[at : at + 1], "big")
            at += 1 + size
            blocks += 1
            _limit(blocks, MOST_PARTS, "blocks of metadata")


def _check_bmp(file: _Bytes) -> None:
    if len(header := file[14:34]) == 20 and header[0] >= 40 and header[16] in _RUN_LENGTH:
        width, height = struct.unpack_from("<ll", header, 4)
        _limit(abs(width * height), MOST_PLAIN, "pixels in runs")
        _limit(len(file), MOST_PLAIN, "bytes of runs")


def _check_ppm(file: _Bytes) -> None:
    if not _PPM_NUMBERS.match(file[:_PPM_HEADER]):
        _limit(len(file), _PPM_HEADER, "bytes before the pixels")
    if file[:2] in (b"P1", b"P2", b"P3"):
        _limit(len(file), MOST_PLAIN, "bytes of numbers")
        _limit(file[:].count(b"#"), MOST_PARTS, "comments")


def _check_tiff(file: _Bytes) -> None:
    """Check the entries of the first directory; overlapping values count, because the decoder copies each value."""
    order = "<" if file[:2] == b"II" else ">"
    big = 43 in file[2:4]
    head, number, entry = ("Q", "Q", "HHQ") if big else ("L", "H", "HHL")
    try:
        (at,) = struct.unpack_from(order + head, file, 8 if big else 4)
        (n_entries,) = struct.unpack_from(order + number, file, at)
        _limit(n_entries, MOST_PARTS, "EXIF or TIFF entries")
        at += struct.calcsize(order + number)
        values = 0
        for _ in range(n_entries):
            tag, kind, count = struct.unpack_from(order + entry, file, at)
            if tag in _STRIPS:
                _limit(count, MOST_STRIPS, "strips or tiles")
            values += count * _TYPE_BYTES.get(kind, 0)
            _limit(values, 2 * len(file), "bytes of EXIF or TIFF values")
            at += 20 if big else 12
    except (struct.error, OverflowError):
        return
