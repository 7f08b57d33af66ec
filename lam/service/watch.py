"""`Watch` tests, by queries and feedback, whether the promised error rates hold, and gives each answer an id.

The run's folder `watch/` holds one SQLite file: the tests of the promise, with a hash, the ids of judged answers, and
hashes of the strangers' labels, because answers to one stranger depend on each other: only the first counts.
Answers are not stored: the id of an answer holds its time, its decision and a hash of the first hit's label, signed by
HMAC. The tests are written with each feedback, and every few seconds while queries arrive. A killed service forgets the
queries of the last seconds, but no acknowledged feedback.
"""

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import sqlite3
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from safetensors.numpy import load, save

from lam.gallery.database import connect, explain_errors, refuse_unstored
from lam.gallery.refusal import Refusal, full
from lam.retrieval.decisions.abstention import DECISIONS, Decision
from lam.retrieval.decisions.calibration import Calibration, label_key
from lam.retrieval.decisions.promise import Promise, Reading, State
from lam.utils.files import CorruptFileError, check_format

FILE = "promise.sqlite"
DAYS = 30  # greatest age of an answer that feedback may judge
_FORMAT = 1
_SCHEMA = f"""
CREATE TABLE promise (one INTEGER PRIMARY KEY CHECK (one = 1), secret BLOB, key BLOB, tests BLOB, sha256 BLOB);
CREATE TABLE judged (answer BLOB PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX judged_at ON judged (at);
INSERT INTO promise VALUES (1, randomblob(32), x'', x'', x'');
PRAGMA user_version = {_FORMAT};
"""
_FOREVER = 2**62  # a time, for rows that do not age
_EVERY = 5.0  # seconds between two writes of the tests
_ANSWER = struct.Struct(">8s8sIBq")  # a random number, the start of the key, the time, the decision, the label
_REMEDY = "delete its folder to begin anew, without its feedback"
_SEAL = 13  # bytes: with them, an id is 56 characters
_LOG = logging.getLogger(__name__)


class Watch:
    """The tests of a promise, stored in a folder. One thread may call `count` while another thread calls other methods.

    Args:
        folder: created if it is missing; None keeps the watch in memory, for a replica.
        calibration: calibration of the run; without a calibration (None), there is no promise.

    Raises:
        CorruptFileError: for a file that was altered or that SQLite cannot read.
        ValueError: for a file that another process has locked.
        OSError: for a folder that cannot be written.
    """

    def __init__(self, folder: Path | None, calibration: Calibration | None) -> None:
        self.path = Path(":memory:")
        if folder is not None:
            folder.mkdir(exist_ok=True)
            self.path = folder / FILE
        self._counting = threading.Lock()
        self._written = time.monotonic()
        with explain_errors(self.path, remedy=_REMEDY), ExitStack() as opened:
            self._database = opened.enter_context(closing(connect(self.path)))
            self._database.execute("PRAGMA journal_mode=WAL")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._database.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            else:
                check_format(self.path, version, readable=_FORMAT)
            self._secret, self._key = self._database.execute("SELECT secret, key FROM promise").fetchone()
            self._promise = promise = None if calibration is None else Promise(calibration)
            if promise is None or promise.key != self._key:
                self._begin(promise)
            else:
                tests, sha256 = self._database.execute("SELECT tests, sha256 FROM promise").fetchone()
                if hashlib.sha256(tests).digest() != sha256:
                    raise CorruptFileError(f"{self.path}: it was altered; {_REMEDY}")
                promise.restore(load(tests))
            opened.pop_all()  # from here on, `close` closes the file

    def _begin(self, promise: Promise | None) -> None:
        """Store a new promise, and forget the old one with the answers judged under it."""
        self._key = b"" if promise is None else promise.key
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("DELETE FROM judged")
            self._write(promise)

    def renew(self, calibration: Calibration | None) -> None:
        """Begin the promise of a calibration, unless it is the present one; refused if it cannot be stored."""
        promise = None if calibration is None else Promise(calibration)
        if promise is not None and promise.key == self._key:
            return
        try:
            with refuse_unstored():
                self._begin(promise)
        finally:
            self._promise = promise

    @property
    def state(self) -> State | None:
        """Whether the promises hold; None without calibration."""
        promise = self._promise
        return None if promise is None else promise.state

    @property
    def readings(self) -> list[Reading]:
        """The state of each test."""
        promise = self._promise
        return [] if promise is None else promise.readings

    def count(self, decision: Decision, kappa: float, cosine: float, label: str) -> tuple[str, State, bool] | None:
        """Count a query, and return the answer's id, the state of the promises, and whether to call `write` now.

        Only searches of the whole gallery count. `cosine` and `label` are of the first hit (−1 and empty without hits).
        Without a promise, such as just before `renew` begins the first one, nothing is counted, and the result is None.
        """
        promise = self._promise
        if promise is None:
            return None
        with self._counting:
            before = promise.state
            promise.observe(kappa, cosine)
            state = promise.state
        is_due = state != before or time.monotonic() - self._written > _EVERY
        if is_due:
            self._written = time.monotonic()
        key = label_key(label) if label else -1
        code = DECISIONS.index(decision)
        body = _ANSWER.pack(secrets.token_bytes(8), promise.key[:8], int(time.time()), code, key)
        return base64.urlsafe_b64encode(body + self._seal(body)).decode(), state, is_due

    def judge(
        self, answer_id: str, label: str | None, correct: bool | None, *, holds: Callable[[str], bool]
    ) -> tuple[list[str], State]:
        """Count feedback, and write it to disk; returns the tests that count it, and the state of the promises.

        Args:
            label: the true label, empty if every item in the gallery is wrong; None if only `correct` is known. Of
                the answers to strangers with one label, only the first counts.
            correct: whether a match is right; None if the label is known.
            holds: tells whether the gallery holds a label.

        Raises:
            Refusal: for an answer that is unknown, too old or judged before, or feedback that does not fit it.
            Refusal: `full`, if the feedback could not be stored.
        """
        answer, matched, hit = self._read(answer_id)
        if (promise := self._promise) is None:
            raise Refusal(409, "the run is no longer calibrated", allowed="`lam calibrate RUN`, then a SIGHUP")
        if label is None:
            if not matched:
                what = "an answer that is not `match` is judged by a label"
                raise Refusal(422, what, allowed='"label", empty if nothing in the gallery is right')
            stranger, right = None, correct
        else:
            stranger = not label or not holds(label)
            is_known = matched and (stranger or hit != -1)
            right = not stranger and hit == label_key(label) if is_known else None
        before = promise.arrays(only_feedback=True)
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                now = int(time.time())
                self._database.execute("DELETE FROM judged WHERE at < ?", (now - DAYS * 86_400,))
                self._database.execute("INSERT INTO judged VALUES (?, ?)", (answer, now))
                is_new = True
                if stranger and label:
                    row = b"label" + label_key(label).to_bytes(8, signed=True), _FOREVER
                    is_new = self._database.execute("INSERT OR IGNORE INTO judged VALUES (?, ?)", row).rowcount > 0
                counted = promise.judge(matched=matched, stranger=stranger, right=right) if is_new else []
                self._write(promise)
        except sqlite3.IntegrityError:
            raise Refusal(409, "this answer was judged before", allowed="one feedback on each answer") from None
        except sqlite3.Error as error:
            promise.restore(before)
            raise full(str(error)) from error
        return counted, promise.state

    def _read(self, answer: str) -> tuple[bytes, bool, int]:
        """From the id of an answer: its random number, whether it is a match, and its first hit's `label_key` or −1."""
        try:
            content = base64.b64decode(answer, b"-_", validate=True)
        except (binascii.Error, ValueError):
            content = b""
        body = content[: _ANSWER.size]
        if len(content) != _ANSWER.size + _SEAL or not hmac.compare_digest(content[_ANSWER.size :], self._seal(body)):
            raise Refusal(404, "there is no answer of this id", allowed="the answer_id of POST /v1/search")
        number, key, at, code, label = _ANSWER.unpack(body)
        if key != self._key[:8]:
            raise Refusal(409, "the answer is of an earlier calibration", allowed="answers of this calibration")
        if (days := (time.time() - at) / 86_400) > DAYS:
            raise Refusal(409, f"the answer is {days:.0f} days old", allowed=f"at most {DAYS} days")
        return number, DECISIONS[code] == "match", label

    def _seal(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, "sha256")[:_SEAL]

    def write(self) -> None:
        """Write the tests, and log a failure."""
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._write(self._promise)
        except sqlite3.Error as error:
            _LOG.error("the tests of the promise are not written: %s", error)

    def _write(self, promise: Promise | None) -> None:
        with self._counting:
            arrays = {} if promise is None else promise.arrays()
        tests = save(arrays) if arrays else b""
        row = self._key, tests, hashlib.sha256(tests).digest()
        self._database.execute("UPDATE promise SET key = ?, tests = ?, sha256 = ?", row)

    def close(self) -> None:
        """Write the tests, and close the file."""
        with closing(self._database):
            self.write()
