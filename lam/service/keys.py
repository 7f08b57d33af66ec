"""Keys with rights, and the right that each route needs."""

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

Right = Literal["read", "write", "admin"]
RIGHTS: tuple[Right, ...] = ("read", "write", "admin")
"""Rights from the least to the greatest; each right includes the rights before it."""

VARIABLE = "LAM_API_KEY"
GUARDED = ("/v1/", "/metrics", "/openapi.json")
OPEN_PATHS = ("/v1/health", "/v1/ready")
_LOG = logging.getLogger(__name__)
_MAX_KEY = 4096  # characters; all headers of a request may have 16 KiB
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OF_ADMIN = ("/v1/backup", "/v1/reload")  # a POST to a path that begins so needs `admin`
_READING = ("/v1/search", "/v1/embed", "/v1/verify")  # a POST to a path that begins so needs `read`


def right_for(method: str, path: str) -> Right:
    """The right that a request needs."""
    if method == "POST" and path.startswith(_OF_ADMIN):
        return "admin"
    is_read = method in ("GET", "HEAD") or (method == "POST" and path.startswith(_READING))
    return "read" if is_read else "write"


class Keys:
    """Hashes and rights of keys. A key that no header can hold raises a `ValueError`, which does not quote the key.

    `file` is the file of these keys, if any, and `version` its `_version_of` before it was read.
    """

    def __init__(self, rights: Mapping[str, Right], file: str | None = None, version: object = None) -> None:
        self._file, self._version = file, version
        for key in rights:
            _check(key, "a key")
        self._rights = _hashed(rights)

    @classmethod
    def read(cls, file: str | None = None) -> "Keys | None":
        """The key in $LAM_API_KEY, with the right `admin`, and the keys of a file; None without a key.

        Args:
            file: lines such as `write KEY`. Empty lines and lines that start with # are skipped.

        Raises:
            ValueError: for an empty variable or file, another right, a repeated key, or a file that others may read.
            OSError: for a file that cannot be read.
        """
        version, rights = _version_of(file), _of_environment()
        if file is not None:
            before = len(rights)
            _read_file(Path(file), rights)
            if len(rights) == before:
                raise ValueError(f"{file} holds no key: give lines such as `read KEY`")
        return cls(rights, file, version) if rights else None

    def right_of(self, key: bytes) -> Right | None:
        """The right of a key; None for an unknown key. A file that has changed is read again.

        The keys of an invalid file stay as they were. A deleted or empty file has no keys.
        """
        if (version := _version_of(self._file)) != self._version:
            self._version = version
            rights = _of_environment()
            try:
                if self._file is not None and version is not None:
                    _read_file(Path(self._file), rights)
                self._rights = _hashed(rights)
            except (OSError, ValueError) as error:
                _LOG.error("the keys stay as they were: %s", error)
        digest = _hash(key)
        found: Right | None = None
        for known, right in self._rights:  # no early end: the time would tell which key fits
            if hmac.compare_digest(known, digest):
                found = right
        return found


def _version_of(file: str | None) -> tuple[int, ...] | None:
    """Numbers that change with the content or mode of a file; None without a file."""
    with suppress(OSError):
        if file is not None:
            status = Path(file).stat()
            return status.st_ino, status.st_size, status.st_ctime_ns
    return None


def _of_environment() -> dict[str, Right]:
    if (key := os.environ.get(VARIABLE)) is None:
        return {}
    key = key.strip()  # secret files end with a line break
    if not key:
        raise ValueError(f"${VARIABLE} is empty: unset it to serve only this machine, or set a key")
    return {_check(key, f"${VARIABLE}"): "admin"}


def _read_file(path: Path, rights: dict[str, Right]) -> None:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & _OTHERS:
            raise ValueError(f"{path} holds keys, and other users may read or change it: `chmod 600 {path}`")
        lines = file.read().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, key = line.strip().replace("\t", " ").partition(" ")
        where = f"{path}, line {number}"
        if name not in RIGHTS:
            raise ValueError(f"{where} must be RIGHT KEY, where RIGHT is one of {', '.join(RIGHTS)}")
        if _check(key.strip(), where) in rights:
            raise ValueError(f"{where} repeats a key: give each key one right")
        rights[key.strip()] = name


def _check(key: str, where: str) -> str:
    if not all("!" <= character <= "~" for character in key) or not key:
        raise ValueError(f"{where} must have only ASCII letters, digits and signs, no spaces: it is a header")
    if len(key) > _MAX_KEY:
        raise ValueError(f"{where} has {len(key)} characters; at most {_MAX_KEY} fit into a header")
    return key


def _hashed(rights: Mapping[str, Right]) -> list[tuple[bytes, Right]]:
    return [(_hash(key.encode()), right) for key, right in rights.items()]


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
