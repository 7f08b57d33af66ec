"""`Run`: the contents of a finished run's folder, each read when it is first used."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from lam.datasets.base import GalleryKind
from lam.datasets.texts import Columns
from lam.encoders.base import Encoder
from lam.encoders.files import fingerprint
from lam.encoders.load import load
from lam.gallery.gallery import Gallery
from lam.gallery.snapshot import Snapshot
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.files import FOLDER as CALIBRATION
from lam.retrieval.decisions.files import load_calibration
from lam.runs.config import RunConfig
from lam.runs.config_files import load_config
from lam.runs.folder import ENCODER, GALLERY, read_data, require_finished
from lam.runs.samples import Sample, read_samples
from lam.utils.files import locked


class Run:
    """A finished run. Every file is checked before it is read.

    Args:
        folder: of the run.

    Attributes:
        folder: the same.

    Raises:
        ValueError: where the folder is no run or the run did not finish.
        CorruptFileError: naming the file that is missing, truncated or altered; so does every property.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        require_finished(self.folder)

    @property
    def config(self) -> RunConfig:
        """Its configuration."""
        return self.configured([])

    def configured(self, overrides: Sequence[str]) -> RunConfig:
        """`config`, but for some settings, such as `--data.root=DIR` where its data have moved."""
        return load_config(self.folder, overrides)

    @cached_property
    def encoder(self) -> Encoder:
        """Its network and uncertainty."""
        return load(self.folder / ENCODER)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of its network, posterior and preprocessing."""
        return fingerprint(self.folder / ENCODER)

    @property
    def calibration(self) -> Calibration | None:
        """Its thresholds as they are now; None where it has none.

        Raises:
            ValueError: where they are of another network, posterior or preprocessing.
        """
        if not (self.folder / CALIBRATION).is_dir():
            return None
        return load_calibration(self.folder, key=self.fingerprint)

    @cached_property
    def gallery_kind(self) -> GalleryKind:
        """What its gallery is: of classes, or of identities."""
        return read_data(self.folder)["gallery"]

    @cached_property
    def has_answers(self) -> bool:
        """Whether its gallery is of answers to questions: none of its items is a query like those calibrated on."""
        return read_data(self.folder).get("answers", False)  # older runs do not say

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """A few inputs to try it with; none where there were none to be shown."""
        return read_samples(self.folder)

    @property
    def gallery_folder(self) -> Path:
        """Where its items lie."""
        return self.folder / GALLERY

    @property
    def gallery(self) -> Snapshot:
        """Its items as they are now, to be searched, whoever writes to them.

        Raises:
            ValueError: where it has no gallery, or another process has locked it.
        """
        return Snapshot.read(self.gallery_folder, self.encoder.dimension)

    def open_gallery(self, *, drop_corrupt: bool = False, index: str | None = None) -> Gallery:
        """Open its items to be searched and changed by this process alone; see `lam.gallery.gallery.Gallery`."""
        return Gallery(self.gallery_folder, self.encoder.dimension, drop_corrupt=drop_corrupt, index=index)

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes from writing to the folder, but for its gallery, which has a lock of its own.

        Raises:
            ValueError: where another process holds it.
        """
        return locked(self.folder)


def columns_of(run: Run, columns: Columns | None = None) -> Columns | None:
    """The columns of a file of texts: those that are named, or else those of the file that the run was trained on."""
    data = run.config.data
    if columns is not None or data.name != "texts":
        return columns
    return Columns(**{name: data.options.get(name) for name in ("text", "label", "question", "answer")})
