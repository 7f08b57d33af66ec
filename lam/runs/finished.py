"""`Run`: the contents of a finished run's folder, read on first use."""

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from lam.datasets.splits import GalleryKind
from lam.datasets.texts import Columns
from lam.encoders.base import Encoder
from lam.encoders.files import fingerprint
from lam.encoders.load import load
from lam.gallery.gallery import Gallery
from lam.gallery.replica import Replica, Snapshot
from lam.retrieval import Calibration, load_calibration
from lam.retrieval.decisions.files import FOLDER as CALIBRATION
from lam.runs.config import RunConfig
from lam.runs.config_files import load_config
from lam.runs.folder import ENCODER, GALLERY, read_data, require_finished
from lam.runs.samples import Sample, read_samples
from lam.utils.files import MANIFEST, locked


class Run:
    """A finished run. Each file is checked before it is read.

    Raises:
        ValueError: if the folder is not a run or the run did not finish.
        CorruptFileError: naming the file that is missing, truncated or altered; also raised by properties.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        require_finished(self.folder)
        self._opened = self.folder.stat()

    @property
    def is_in_place(self) -> bool:
        """Whether the path still leads to the same folder; false after it was moved, deleted or replaced."""
        try:
            return os.path.samestat(self._opened, self.folder.stat())
        except OSError:
            return False

    @cached_property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return self.configured([])

    def configured(self, overrides: Sequence[str]) -> RunConfig:
        """The configuration with some settings changed, such as `--data.root=DIR` for data that have moved."""
        return load_config(self.folder, overrides)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of the run."""
        return load(self.folder / ENCODER)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of network, posterior and preprocessing."""
        return fingerprint(self.folder / ENCODER)

    @property
    def calibration(self) -> Calibration | None:
        """The present calibration; None, with a warning, if the first calibration was interrupted.

        Raises:
            ValueError: for the calibration of another encoder.
        """
        if not (folder := self.folder / CALIBRATION).is_dir():
            return None
        if not (folder / MANIFEST).is_file():
            warnings.warn(f"{folder} is incomplete and counts as no calibration: run lam calibrate", stacklevel=2)
            return None
        return load_calibration(self.folder, key=self.fingerprint)

    @cached_property
    def gallery_kind(self) -> GalleryKind:
        """`classes` if every query has a match in the gallery, `identities` if a query may lack one."""
        return read_data(self.folder)["gallery"]

    @cached_property
    def has_answers(self) -> bool:
        """Whether the gallery's items are answers to questions; an answer is never a query."""
        return read_data(self.folder)["answers"]

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """A few inputs to try the run with."""
        return read_samples(self.folder)

    @property
    def gallery(self) -> Snapshot:
        """The present items, even while another process writes; a missing or locked gallery raises a `ValueError`."""
        return Snapshot.read(self.folder / GALLERY, self.encoder.dimension)

    def open_gallery(self, *, drop_corrupt: bool = False, index: str | None = None, replica: bool = False) -> Gallery:
        """The gallery, locked for this process to search and change; or a read-only `Replica` of it."""
        if replica:
            return Replica(self.folder / GALLERY, self.encoder.dimension, index=index)
        return Gallery(self.folder / GALLERY, self.encoder.dimension, drop_corrupt=drop_corrupt, index=index)

    def columns(self, given: Columns | None = None) -> Columns | None:
        """Columns of a table of texts: `given`, or by default the columns of the run's own table."""
        data = self.config.data
        if given is not None or data.name != "texts":
            return given
        return Columns(**{name: data.options.get(name) for name in ("text", "label", "question", "answer")})

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder, except the gallery, which has its own lock; a `ValueError` if another process holds it."""
        return locked(self.folder)
