"""The commands. Each calls one function of the library and prints its result; its docstring is its help."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lam.utils import distributed
from lam.utils.extras import install_command

Record = TypeVar("Record")
DEMOS = {"digits": "digits", "text": "docstrings", "images": "spots"}  # the data set of each demo
_SHOWN = 20  # items listed one by one
_DEMO_OPTIONS = {"digits": ["--network.dimension=8"]}  # with the paper's 3, drawn digits are recognised less well
_DEMO_TARGETS = {"far": 0.01, "ood": 0.05}  # the demo's 289 held-out digits are enough for these
HEADLINES = {
    "retrieval": ("recall@1", "map@5"),
    "is the first hit right?": ("ausc", "ece"),
    "is it out of distribution?": ("auroc", "auprc"),
}
"""The metrics that commands print; `metrics.json` and the report hold all metrics."""
_NO_STRANGERS = (
    "not measured: how well κ detects strangers, as the run has no OOD set (--data.ood) and holds out no "
    "classes (--data.strangers)"
)


def printable(said: object) -> str:
    """One line of text with control and direction characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(said))


def complain(message: str) -> None:
    """Print a message on standard error; every process except process 0 adds its number."""
    name = "lam" if distributed.is_rank_zero() else f"lam, process {distributed.rank()}"
    print("\n".join(printable(line) for line in f"{name}: {message}".splitlines()), file=sys.stderr)


def _config(parsed: argparse.Namespace, overrides: list[str]) -> Any:
    from lam.runs.config_files import load_config

    limit = [] if parsed.limit is None else [f"--data.limit={parsed.limit}"]
    skip = ["--data.skip_damaged=true"] if parsed.skip_damaged else []
    words = [*parsed.config, *(["--paper"] if getattr(parsed, "paper", False) else [])]
    return load_config(words, [*overrides, *limit, *skip], allow_missing=parsed.allow_missing)


def run_or_print(parsed: argparse.Namespace, overrides: list[str]) -> None:
    """Run a configuration: train, fit the posterior, tune, evaluate, report."""
    if not parsed.print:
        _run(parsed, overrides)
        return
    config = _config(parsed, overrides)
    config.check()
    settings = config.resolved() | {"output": config.output}
    print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")


def _run(parsed: argparse.Namespace, overrides: list[str]) -> Path:
    config = _config(parsed, overrides)
    from lam.runs.folder import METRICS
    from lam.runs.run import run  # slow to import, so wrong settings are reported first

    result = run(config, progress=not parsed.quiet)
    if distributed.is_rank_zero():
        _print_metrics({key: _number(value) for key, value in result.metrics.items()})
        if not {"auroc", "unseen_recall@1"} & result.metrics.keys():
            print(_NO_STRANGERS)
        print(f"all metrics: {result.folder / METRICS}")
        print(f"report: {result.report}")
    return result.folder


def _number(value: Any) -> str:
    return "undefined" if value is None else f"{value:.4f}" if isinstance(value, float | int) else str(value)


def _print_metrics(texts: Mapping[str, str]) -> None:
    """Print the headline metrics in groups, without metrics of further scores; `texts` holds values by key."""
    from lam.retrieval.metrics.registry import Key

    keys = [Key.parse(key) for key in texts]
    for group, names in HEADLINES.items():
        headlines = [str(key) for name in names for key in keys if key.metric == name and not key.score]
        if headlines:
            print("\n".join([group, *(f"  {key:<32}{texts[key]:>10}" for key in headlines)]))


def demo(parsed: argparse.Namespace, overrides: list[str]) -> None:
    """Run and calibrate digits, sentences or photographs that other packages ship."""
    name = " ".join(parsed.config) or "digits"
    if name not in DEMOS:
        raise ValueError(f"there is no demo {name}; allowed: {', '.join(DEMOS)}")
    parsed.config = [DEMOS[name], "laplace_posthoc"]
    folder = _run(parsed, [*_DEMO_OPTIONS.get(name, []), *overrides])
    if not distributed.is_rank_zero():
        return
    from lam.retrieval.decisions.calibration import Targets
    from lam.runs.calibrate import CalibrationOptions, calibrate_run
    from lam.runs.finished import Run

    if (calibration := Run(folder).calibration) is None:
        if not parsed.quiet:
            print("calibrate ...", file=sys.stderr)
        try:
            calibration = calibrate_run(folder, CalibrationOptions(Targets(**_DEMO_TARGETS)), progress=not parsed.quiet)
        except ValueError as error:
            complain(f"warning: not calibrated: {error}; `lam calibrate {folder}` takes other targets")
            return
    far, ood = (f"{100 * rate:g} %" for rate in (calibration.targets.far, calibration.targets.ood))
    print(f"Calibrated. False accepts: at most {far} {calibration.facts['false_accepts']}. False flags: at most {ood}.")
    program = sys.argv[0] if Path(sys.argv[0]).name == "lam" else "lam"  # `make demo` runs a command that is on no path
    print(f"a page to try it: {program} serve {folder}")


def run_sweep(parsed: argparse.Namespace, overrides: list[str]) -> None:
    """Run a configuration with several seeds: mean and standard deviation."""
    config = _config(parsed, overrides)
    from lam.runs.sweep import SWEEP, seeds_of, sweep

    result = sweep(config, seeds_of(config, parsed.seeds), progress=not parsed.quiet)
    if not distributed.is_rank_zero():
        return
    texts = {key: f"{mean:.4f}" for key, mean in result.mean.items()}
    texts |= {key: f"{texts[key]} ± {std:.4f}" for key, std in result.std.items()}
    _print_metrics(texts | {key: f"undefined for seed {', '.join(map(str, s))}" for key, s in result.undefined.items()})
    print(f"all metrics: {result.folder / SWEEP}")


def compare_runs(parsed: argparse.Namespace, _: list[str]) -> None:
    """Draw finished runs on the same data together, with a table."""
    from lam.runs.comparison import compare
    from lam.runs.folder import run_at

    comparison = compare([run_at(Path(run)) for run in parsed.runs], parsed.output)
    print("\n".join(map(str, [comparison, *comparison.written])))


def embed(parsed: argparse.Namespace, _: list[str]) -> None:
    """Embed images or texts into an .npz file: mean, kappa, variance and, if the run is calibrated, a flag."""
    from lam.gallery.embed import embed_items
    from lam.gallery.shards import Shard, save_embeddings
    from lam.runs.finished import Run
    from lam.runs.index import calibration_of
    from lam.utils.files import check_output

    if (output := Path(parsed.output)).suffix.lower() != ".npz":
        raise ValueError(f"embeddings are written as .npz, got --output {output}")
    check_output(output)
    distributed.join()
    if distributed.world_size() > 1:
        if parsed.shard is not None:
            raise ValueError("torchrun gives each process its shard: leave --shard out")
        shard = Shard(distributed.rank() + 1, distributed.world_size())
        output = output.with_stem(f"{output.stem}-{shard.number}-of-{shard.count}")
    else:
        shard = Shard() if parsed.shard is None else Shard.parse(parsed.shard)
    run, quiet = Run(parsed.run), parsed.quiet
    columns = run.columns(_columns(parsed.columns))
    embedded = embed_items(
        run.encoder,
        parsed.folder,
        columns=columns,
        shard=shard,
        calibration=calibration_of(run),
        damaged=_damaged(parsed, output),
        progress=not quiet,
    )
    save_embeddings(output, embedded, encoder=run.fingerprint, shard=shard)
    flagged = "" if embedded.flagged is None else f", {int(embedded.flagged.sum())} flagged as unlike known queries"
    print(f"{len(embedded.embeddings)} embeddings{flagged}: {output}")


def _damaged(parsed: argparse.Namespace, output: str | Path | None) -> Any:
    """Options for damaged image files; if there is an output, a list of these files is written beside it."""
    from lam.gallery.embed import DamagedFiles

    if output is None:
        return DamagedFiles(skip=parsed.skip_damaged)
    output = Path(output).absolute()
    return DamagedFiles(output.with_name(f"{output.stem}-damaged.csv"), parsed.skip_damaged)


def _columns(words: Sequence[str] | None) -> Any:
    """The `Columns` from arguments `NAME=COLUMN`; None without arguments."""
    from lam.datasets.texts import Columns

    if words is None:
        return None
    known = [field.name for field in fields(Columns)]
    pairs = [word.partition("=") for word in words]
    columns = {name: column for name, _, column in pairs}
    if len(columns) < len(words) or not columns.keys() <= set(known) or not all(columns.values()):
        raise ValueError(f"columns must be NAME=COLUMN, each NAME once of {', '.join(known)}, got {' '.join(words)}")
    return Columns(**columns)


def _record(kind: type[Record], parsed: argparse.Namespace) -> Record:
    """A record filled with a command's values; options that the command leaves out have their defaults."""
    names = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    return kind(**{name: value for name, value in vars(parsed).items() if name in names and value is not None})


def index(parsed: argparse.Namespace, _: list[str]) -> None:
    """Replace a run's gallery by images, texts or embeddings."""
    from lam.runs.folder import GALLERY
    from lam.runs.index import index_images

    sources = [*parsed.folder, *(source for source in (parsed.listed, parsed.embeddings) if source is not None)]
    if len(sources) != 1:
        raise ValueError("give the images to index as one of a folder, a table, or files of embeddings")
    enrolled = index_images(
        parsed.run,
        sources[0],
        columns=_columns(parsed.columns),
        factory=parsed.factory,
        fuse=parsed.fuse,
        skip_uncertain=parsed.skip_uncertain,
        damaged=_damaged(parsed, parsed.run),
        progress=not parsed.quiet,
    )
    if enrolled.uncertain:
        fate = "skipped" if parsed.skip_uncertain else "kept"
        print(f"uncertain, kappa below the flag, {fate}: {len(enrolled.uncertain)}")
        for path, kappa in enrolled.uncertain[:_SHOWN]:
            print(f"{kappa:10.4g}  {path}")
        if (n_more := len(enrolled.uncertain) - _SHOWN) > 0:
            print(f"and {n_more} more")
    is_text = any(item.text is not None for item in enrolled.items)
    what = "identities" if parsed.fuse else "texts" if is_text else "images"
    print(f"{len(enrolled)} {what}: {Path(parsed.run) / GALLERY}")


def search_gallery(parsed: argparse.Namespace, _: list[str]) -> None:
    """Search a run's gallery for images or texts."""
    from lam.runs.search import SearchResult, check_file, search_in_batches, write_results
    from lam.utils.files import check_output

    if parsed.output is not None:
        check_file(parsed.output, parsed.file)
        check_output(parsed.output)
    damaged = _damaged(parsed, parsed.output)
    if parsed.file is not None and parsed.text:
        raise ValueError("give texts either by --text or by --file")
    texts = parsed.text if parsed.file is None else Path(parsed.file)
    kind, results = "text" if texts else "image", list[SearchResult]()
    is_alone = len(parsed.text) == 1 or (len(parsed.image) == 1 and not Path(parsed.image[0]).is_dir())
    searched = search_in_batches(
        parsed.run,
        *parsed.image,
        texts=texts,
        columns=_columns(parsed.columns),
        k=parsed.k,
        damaged=damaged,
        progress=parsed.output is not None and not parsed.quiet,
    )
    problem: ValueError | None = None
    try:
        for result in searched:
            if parsed.output is not None:
                results.append(result)
                continue
            for row, query in enumerate(result.images):
                if not is_alone:
                    print(f"{kind}: {printable(query)}")
                _show_answer(result, row)
                if not is_alone:
                    print(flush=True)
    except ValueError as error:  # damaged files end the search after all others are found
        problem = error
    for reason in damaged.reasons.values() if parsed.output is None else ():
        complain(f"warning: {reason}")
    if parsed.output is not None and results:
        write_results(parsed.output, results)
        print(f"{sum(len(result.images) for result in results)} {kind}s: {parsed.output}")
    if problem is not None:
        raise problem


def _show_answer(result: Any, row: int) -> None:
    queries, kappa = result.queries, float(result.queries.kappa[row])
    bound = ("≤ ", "≥ ")[kappa > 1] if queries.capped[row] else ""
    print(f"query: kappa {bound}{kappa:.4g}, variance {float(queries.variance[row]):.4g}")
    if queries.has_parts:
        known, closely = float(queries.p_known[row]), float(queries.kappa_aleatoric[row])
        doubt = result.doubts[row] or "neither unseen nor ambiguous"
        print(f"       {doubt}: p_known {known:.3f}, kappa of ambiguity {closely:.4g}")
    if (decisions := result.decisions) is not None:
        print(f"decision: {decisions.decision[row]}{', calibration: stale' * bool(decisions.stale)}")
        print("".join(f"  {line}\n" for line in result.decision_in_words(row)), end="")
    items = result.items[row]
    is_labelled = not all(item.label_repeats_text for item in items)
    text = any(item.text is not None for item in items)
    intervals = result.intervals(row)
    another = f"{'another query':>15}  " if intervals else ""
    print(f"{'score':>8}  {another}{'kappa':>9}  {'label  ' * is_labelled}{'text' if text else 'path'}")
    scores = result.hits.scores[row].tolist()
    for place, (score, kappa, item) in enumerate(zip(scores, result.hits.kappa[row].tolist(), items, strict=True)):
        content, label = printable(item.path if item.text is None else item.text), printable(item.label)
        remarks = ["uncertain"] * bool(result.is_uncertain(item))
        remarks += [f"fused of {item.images} {'texts' if text else 'images'}"] * item.is_fused
        remark = f"  ({', '.join(remarks)})" if remarks else ""
        interval = "{:6.2f} to {:5.2f}  ".format(*intervals[place]) if intervals else ""
        print(f"{score:8.4f}  {interval}{kappa:9.4g}  {f'{label}  ' * is_labelled}{content}{remark}")


def calibrate(parsed: argparse.Namespace, _: list[str]) -> None:
    """Learn thresholds for given error rates, and the probability that a hit is right."""
    from lam.runs.calibrate import calibrate_run
    from lam.runs.calibration_options import CalibrationOptions, repeat_choices
    from lam.runs.calibration_report import describe_calibration

    rates = {"far": parsed.target_far, "ood": parsed.target_ood, "conformal_miss": parsed.target_miss}
    rates["wrong"] = parsed.target_wrong
    parsed.targets = {name: rate for name, rate in rates.items() if rate is not None}
    parsed.columns, parsed.damaged = _columns(parsed.columns), _damaged(parsed, parsed.run)
    options = repeat_choices(parsed.run, _record(CalibrationOptions, parsed))
    calibration = calibrate_run(parsed.run, options, progress=not parsed.quiet)
    print("\n".join(describe_calibration(calibration)))
    print(f"calibration: {Path(parsed.run) / 'calibration'}")


def serve_run(parsed: argparse.Namespace, _: list[str]) -> None:
    """Serve runs over HTTP: searches, decisions, a gallery that changes, a page."""
    from lam.service.settings import ServiceSettings

    try:
        from lam.service.server import serve
    except ImportError as error:
        raise ValueError(f"serving needs more than is installed ({error}): {install_command('serve')}") from None

    if len(parsed.index) > 1:
        raise ValueError(
            f"give --index once, got {', '.join(parsed.index)}: flat and hnsw are structures of the service's own "
            "index; a Milvus collection keeps its structure"
        )
    parsed.cors_origins = tuple(parsed.cors_origins)
    settings = _record(ServiceSettings, parsed)
    serve(
        _named_runs(parsed.runs),
        host=parsed.host,
        port=parsed.port,
        device=parsed.device,
        drop_corrupt=parsed.drop_corrupt,
        index=parsed.index[0] if parsed.index else None,
        replica=parsed.replica,
        settings=replace(settings, client_connections=None) if parsed.behind_proxy else settings,
    )


def _named_runs(words: Sequence[str]) -> dict[str, Path]:
    """Folders of runs by name, from arguments `RUN` or `NAME=RUN`."""
    from lam.runs.folder import run_at

    runs: dict[str, Path] = {}
    for word in words:
        name, is_named, folder = word.partition("=")
        if not is_named or "/" in name or Path(word).exists():
            folder = word
            name = run_at(Path(word)).absolute().name
        if name in ("", ".", "..", *runs):
            raise ValueError(f"each run needs a name of its own, got {name!r} for {word}: give NAME={folder}")
        runs[name] = run_at(Path(folder))
    return runs


def back_up_run(parsed: argparse.Namespace, _: list[str]) -> None:
    """Copy a run with its items, also while it is served."""
    from lam.runs.backup import back_up

    backup = back_up(parsed.run, parsed.folder)
    print(f"{backup.items} items, {len(backup.files)} files, {backup.bytes / 2**20:.1f} MiB: {backup.folder}")


def experiment(parsed: argparse.Namespace, overrides: list[str]) -> None:
    """Compare losses where the truth is known, or repeat a table of a paper; writes a table and a page."""
    from tqdm import tqdm

    from lam.experiments import conduct, load_experiment
    from lam.experiments.base import cell_text

    name, *more = parsed.config
    experiment = load_experiment(name, [*more, *overrides])
    folder = Path(parsed.output or Path("experiments") / experiment.name)
    with tqdm(disable=parsed.quiet, unit="batch") as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.set_description(what, refresh=False)
            bar.total, bar.n = total, done
            bar.update(0)

        outcome = conduct(experiment, folder, progress=progress)
    for row in outcome.rows:
        print("  ".join(f"{column} {cell_text(value)}" for column, value in row.items()))
    print(f"report: {folder / 'report.html'}")
