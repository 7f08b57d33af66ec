"""`CalibrationOptions`, and `repeat_choices`, which adds the choices of the last calibration."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from lam.datasets.texts import Columns
from lam.gallery.embed import DamagedFiles
from lam.retrieval.decisions.acceptance import ACCEPTS, PROBABILITY
from lam.retrieval.decisions.calibration import Targets
from lam.retrieval.decisions.flags import FLAGS, needs_reference
from lam.retrieval.decisions.match_probability import SHARE
from lam.retrieval.metrics.reference import NEIGHBOUR
from lam.runs.finished import Run
from lam.utils.checks import check_choice, check_share

REFERENCE = 5000
Gallery = Literal["index", "held-out"]


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of calibrating a run.

    Attributes:
        targets: error rates by name; missing names have default rates. With too few data, a default rate rises to the
            least rate that the data can bound, with a warning.
        flag: score that flags a query as a stranger, from `lam.retrieval.decisions.flags.FLAGS`; by default `combined`,
            unless a single score detects strangers far better in cross-validation (see `OodDetector.best`).
        accept: score that accepts a match, from `lam.retrieval.decisions.acceptance.ACCEPTS`; by default `probability`,
            unless a single score is better in cross-validation.
        gallery: `index` searches the labelled items of the run's gallery; `held-out` searches one half of the
            calibration data. The default is `index`. If the gallery then holds places, or no class of the validation
            split, half of this split replaces as many gallery items, with a note.
        folder: a folder of fresh images in class sub-folders, or a table of texts with labels or answers; by default
            the validation split.
        strangers: a folder or table of queries without a match; by default the items of held-out classes. P(known) and
            the flag learn from these strangers, and the bound on false accepts holds for queries like them. If they
            have several sub-folders or labels, the bound holds for a random item of a new class; it then counts classes
            instead of items. If the held-out classes are too few for the target rate, the bound is for labelled
            queries, searched without their matches. Without held-out classes, P(known) and the flag also learn from
            these queries.
        unlabelled: a folder or table of typical queries, some of them strangers, to learn P(known) from;
            `live` for the queries that `lam serve --keep-queries` stored. Stored items and training items among the
            queries are left out, with a warning. The queries have no effect if the interval for their share of
            strangers includes 0 or 1.
        share_of_strangers: assumed share of strangers among future queries, if unlabelled queries do not determine it.
        columns: columns of the tables; by default the run's columns, or the default names of `Columns`.
        data_root: folder of the run's data, if it has moved.
        reference: number of training items for the scores that need them; 0 leaves these scores out.
        damaged: treatment of damaged image files in these folders; by default an error.

    Raises:
        ValueError: for a choice or number out of range, or, with `reference` 0, a score that needs a reference.
    """

    targets: Targets | Mapping[str, float] = field(default_factory=dict)
    flag: str | None = None
    accept: str | None = None
    gallery: Gallery | None = None
    folder: str | Path | None = None
    strangers: str | Path | None = None
    unlabelled: str | Path | None = None
    share_of_strangers: float = SHARE
    columns: Columns | None = None
    data_root: str | Path | None = None
    reference: int = REFERENCE
    damaged: DamagedFiles | None = None

    def __post_init__(self) -> None:
        if self.reference != 0 and self.reference < NEIGHBOUR:
            raise ValueError(f"reference must be at least {NEIGHBOUR} items, or 0 for none, got {self.reference}")
        check_share("the share of strangers", self.share_of_strangers)
        for name, allowed in (("gallery", get_args(Gallery)), ("flag", FLAGS), ("accept", ACCEPTS)):
            if (choice := getattr(self, name)) is not None:
                check_choice(name, choice, allowed)
        for name, by in (("flag", self.flag), ("accept", self.accept)):
            if by not in (None, PROBABILITY) and self.reference == 0 and needs_reference(by):
                raise ValueError(
                    f"{name} {by!r} compares with training features: leave out reference=0, or choose 'kappa'"
                )

    @property
    def rates(self) -> dict[str, float]:
        """The requested error rates by name."""
        return asdict(self.targets) if isinstance(self.targets, Targets) else dict(self.targets)


def repeat_choices(run: str | Path, options: CalibrationOptions) -> CalibrationOptions:
    """The options; missing rates, flag and accept score are as requested for the run's last calibration.

    A `wrong` rate of 0 removes the earlier `wrong` rate. With `reference` 0, an earlier flag that needs a reference is
    dropped, with a warning.
    """
    try:
        previous = Run(run).calibration
    except ValueError:  # a calibration of another encoder is not repeated; a broken run fails later
        previous = None
    rates, flag, accept = options.rates, options.flag, options.accept
    if previous is not None:
        facts = previous.facts
        rates = {name: getattr(previous.targets, name) for name in facts["asked_rates"]} | rates
        flag, accept = flag or facts["asked_flag"], accept or facts["asked_accept"]
        if options.flag is None and flag is not None and options.reference == 0 and needs_reference(flag):
            flag = None
            warnings.warn(
                f"flag {facts['asked_flag']} compares with training features, but reference is 0: the flag is chosen "
                "anew",
                stacklevel=2,
            )
    if rates.get("wrong") == 0:
        del rates["wrong"]
    return replace(options, targets=rates, flag=flag, accept=accept)
