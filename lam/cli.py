"""The command `lam`."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from lam import __version__
from lam.service.hangups import block_hangups
from lam.utils import distributed
from lam.utils.extras import install_command
from lam.utils.notes import Note

DEMOS = {
    "digits": ("digits", "laplace_posthoc"),
    "text": ("docstrings", "laplace_posthoc"),
    "images": ("spots", "laplace_posthoc"),
}
_DEMO_OPTIONS = {"digits": ["--network.dimension=8"]}  # three, as in the paper, know drawn digits less well
_DEMO_TARGETS = {"far": 0.01, "ood": 0.05}  # the demo's 289 held-out digits are enough for these
RUNS = ("run", "demo", "sweep")
CONFIGURED = (*RUNS, "experiment")
"""The commands that take settings as options, such as `--training.epochs=5`."""
FLAGS = ("--quiet", "--help", "--allow-missing", "--skip-damaged", "--paper", "--print")
"""The options without a value."""
STOPPED, READER_GONE = 130, 141  # the shell's exit statuses for SIGINT and SIGPIPE
HEADLINES = {
    "retrieval": ("recall@1", "map@5"),
    "is the first hit right?": ("ausc", "ece"),
    "is it out of distribution?": ("auroc", "auprc"),
}
"""The metrics that commands print; `metrics.json` and the report hold all of them."""
_NO_STRANGERS = (
    "not measured: the separation of strangers from known queries, as there are neither outsiders (--data.ood) nor "
    "held-out classes to search for (--data.strangers)"
)
_EXAMPLES = """examples:
  lam demo                                     train, fit, report and calibrate on the digits that ship with lam
  lam demo text                                the same on sentences that ship with Python
  lam demo images                              the same on photographs that ship with scikit-learn
  lam run fashionmnist laplace_posthoc --data.root=DIR
  lam run folder laplace_posthoc --data.root=DIR       your own images, a sub-folder a class
  lam run mine.yaml                            your own settings; `--print` shows all of them
  lam sweep fashionmnist laplace_online --seeds 5      mean and standard deviation over seeds
  lam compare RUN RUN RUN -o comparison        several methods in one set of plots, and a table
  lam embed RUN FOLDER -o embeddings.npz       RUN is the folder of a run, such as runs/digits/laplace_posthoc, or
                                               the folder above it if that holds no other run
  lam index RUN FOLDER
  lam embed RUN FOLDER --shard 1/4 -o part-1.npz, and so on, then lam index RUN --embeddings part-*.npz
  lam search RUN IMAGE -k 5
  lam run texts laplace_posthoc --data.root=FILE   a table with columns text and label, or question and answer
  lam search RUN --text "where is my card?"
  lam calibrate RUN --target-far 0.01          thresholds for "match", "unknown" and "abstain" at given error rates
  lam experiment posterior-recovery --dimension=10 --learning_rate=1e-4
  lam serve RUN --port 8000                    searches and decisions over HTTP; other machines need a key"""

_SETTINGS = """\
Any setting can be an option, such as --training.epochs=5 or --output=DIR; it replaces the setting of the file. The
default folder is runs/DATA/METHOD, of a sweep runs/DATA/METHOD-sweep. A run that is started again with the same
settings continues.

settings, their defaults (and allowed values):"""
_EXPERIMENT_SETTINGS = """\
Any setting can be an option, such as --dimension=10; it replaces the setting of the file.

settings, their defaults (and allowed values):"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 0 for success, 1 for an error, printed in one line, 2 for wrong usage."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: a terminal may lack letters of a file name
    try:
        try:
            words = list(sys.argv[1:] if arguments is None else arguments)
            with block_hangups() if words[:1] == ["serve"] else nullcontext():  # its imports take a second
                return _execute(words)
        finally:
            print(end="", flush=True)  # here a broken pipe can still be told from other errors
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
        return READER_GONE


def _execute(arguments: list[str]) -> int:
    takes_settings = bool(arguments) and arguments[0] in CONFIGURED
    parsed, rest = _parser().parse_known_args(_attach_values(arguments) if takes_settings else arguments)
    if takes_settings:  # argparse takes a setting with a space in it for a positional argument
        rest += [word for word in parsed.config if word.startswith("--")]
        parsed.config = [word for word in parsed.config if not word.startswith("--")]
        if not parsed.config and parsed.command != "demo":
            _parser().error("say what to run, such as digits laplace_posthoc")
    if parsed.command == "index" and parsed.folder is None and len(rest) == 1 and not rest[0].startswith("-"):
        parsed.folder = rest.pop()  # argparse takes an optional positional only beside the one before it
    if rest and not takes_settings:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, category, *_, **__: _complain(
            f"{'note' if issubclass(category, Note) else 'warning'}: {message}"
        )
        try:
            if "run" in parsed:
                from lam.runs.folder import run_at

                parsed.run = str(run_at(Path(parsed.run)))
            if "plugin" in parsed:
                _load_plugins(parsed.plugin)
            parsed.do(parsed, rest)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            _complain(" ".join(line.strip() for line in str(error).splitlines()))
            return 1
        except KeyboardInterrupt:
            _complain("stopped; start it again to continue")
            return STOPPED
    return 0


def _load_plugins(files: Sequence[str]) -> None:
    """Register what installed packages and the user's files add, before any run is opened."""
    from lam.runs.plugins import load_file, load_installed

    load_installed()
    for file in files:
        load_file(file)


def _attach_values(arguments: list[str]) -> list[str]:
    """Write `--name value` as `--name=value`, so that argparse takes no value for a positional argument."""
    joined: list[str] = []
    for argument in arguments:
        last = joined[-1] if joined else ""
        lacks_value = last.startswith("--") and "=" not in last and last not in FLAGS
        if lacks_value and not argument.startswith("--"):
            joined[-1] = f"{last}={argument}"
        else:
            joined.append(argument)
    return joined


def _complain(message: str) -> None:
    name = "lam" if distributed.is_rank_zero() else f"lam, process {distributed.rank()}"
    print("\n".join(_printable(line) for line in f"{name}: {message}".splitlines()), file=sys.stderr)


def _config(parsed: argparse.Namespace, overrides: list[str]) -> Any:
    from lam.runs.config_files import load_config

    limit = [] if parsed.limit is None else [f"--data.limit={parsed.limit}"]
    skip = ["--data.skip_damaged=true"] if parsed.skip_damaged else []
    words = [*parsed.config, *(["--paper"] if getattr(parsed, "paper", False) else [])]
    return load_config(words, [*overrides, *limit, *skip], allow_missing=parsed.allow_missing)


def _run_or_print(parsed: argparse.Namespace, overrides: list[str]) -> None:
    if not parsed.print:
        _run(parsed, overrides)
        return
    config = _config(parsed, overrides)
    config.check()
    print(yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True), end="")


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
    """Print the headline metrics of the encoder's own score, by flat key, in groups."""
    from lam.retrieval.metrics.registry import Key

    keys = [Key.parse(key) for key in texts]
    for group, names in HEADLINES.items():
        headlines = [str(key) for name in names for key in keys if key.metric == name and not key.score]
        if headlines:
            print("\n".join([group, *(f"  {key:<32}{texts[key]:>10}" for key in headlines)]))


def _demo(parsed: argparse.Namespace, overrides: list[str]) -> None:
    name = " ".join(parsed.config) or "digits"
    if name not in DEMOS:
        raise ValueError(f"there is no demo {name}; allowed: {', '.join(DEMOS)}")
    parsed.config = DEMOS[name]
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
            _complain(f"warning: not calibrated: {error}; `lam calibrate {folder}` takes other targets")
            return
    far, ood = (f"{100 * _DEMO_TARGETS[name]:g} %" for name in ("far", "ood"))
    print(f"Calibrated. False accepts: at most {far} {calibration.facts['false_accepts']}. False flags: at most {ood}.")
    program = sys.argv[0] if Path(sys.argv[0]).name == "lam" else "lam"  # `make demo` puts it on no path
    print(f"a page to try it: {program} serve {folder}")


def _sweep(parsed: argparse.Namespace, overrides: list[str]) -> None:
    config = _config(parsed, overrides)
    from lam.runs.sweep import SWEEP, seeds_of, sweep

    result = sweep(config, seeds_of(config, parsed.seeds), progress=not parsed.quiet)
    if not distributed.is_rank_zero():
        return
    texts = {key: f"{mean:.4f}" for key, mean in result.mean.items()}
    texts |= {key: f"{texts[key]} ± {std:.4f}" for key, std in result.std.items()}
    _print_metrics(texts | {key: f"undefined for seed {', '.join(map(str, s))}" for key, s in result.undefined.items()})
    print(f"all metrics: {result.folder / SWEEP}")


def _compare(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.runs.comparison import compare
    from lam.runs.folder import run_at

    comparison = compare([run_at(Path(run)) for run in parsed.runs], parsed.output)
    print("\n".join(map(str, [comparison, *comparison.written])))


def _embed(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.gallery.embed import embed_items
    from lam.gallery.shards import Shard, save_embeddings
    from lam.runs.finished import Run, columns_of
    from lam.runs.index import calibration_of
    from lam.utils.files import check_output

    output = Path(parsed.output)
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
    columns = columns_of(run, _columns(parsed.columns))
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
    """How to treat unreadable image files: a list of them is written beside the output, if there is one."""
    from lam.gallery.damaged import DamagedFiles

    if output is None:
        return DamagedFiles(skip=parsed.skip_damaged)
    output = Path(output).absolute()
    return DamagedFiles(output.with_name(f"{output.stem}-damaged.csv"), parsed.skip_damaged)


def _columns(words: Sequence[str] | None) -> Any:
    """The columns that `NAME=COLUMN` words name; None without words."""
    from lam.datasets.texts import Columns

    if words is None:
        return None
    known = [field.name for field in fields(Columns)]
    pairs = [word.partition("=") for word in words]
    columns = {name: column for name, _, column in pairs}
    if len(columns) < len(words) or not columns.keys() <= set(known) or not all(columns.values()):
        raise ValueError(f"columns must be NAME=COLUMN, each NAME once of {', '.join(known)}, got {' '.join(words)}")
    return Columns(**columns)


def _index(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.runs.folder import GALLERY
    from lam.runs.index import index_images

    sources = [source for source in (parsed.folder, parsed.listed, parsed.embeddings) if source is not None]
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
        for path, kappa in enrolled.uncertain:
            print(f"{kappa:10.4g}  {path}")
    is_text = any(item.text is not None for item in enrolled.items)
    what = "identities" if parsed.fuse else "texts" if is_text else "images"
    print(f"{len(enrolled)} {what}: {Path(parsed.run) / GALLERY}")


def _search(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.runs.search import SearchResult, search_in_batches
    from lam.runs.search_files import check_suffix, write_results
    from lam.utils.files import check_output

    if parsed.output is not None:
        check_suffix(parsed.output)
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
        k=parsed.k,
        damaged=damaged,
        progress=parsed.output is not None and not parsed.quiet,
    )
    try:
        for result in searched:
            if parsed.output is not None:
                results.append(result)
                continue
            for row, query in enumerate(result.images):
                if not is_alone:
                    print(f"{kind}: {_printable(query)}")
                _show_answer(result, row)
                if not is_alone:
                    print(flush=True)
    finally:  # damaged files end the search after all others are found
        for reason in damaged.reasons.values() if parsed.output is None else ():
            _complain(f"warning: {reason}")
        if parsed.output is not None and results:
            write_results(parsed.output, results)
            print(f"{sum(len(result.images) for result in results)} {kind}s: {parsed.output}")


def _show_answer(result: Any, row: int) -> None:
    queries = result.queries
    print(f"query: kappa {float(queries.kappa[row]):.4g}, variance {float(queries.variance[row]):.4g}")
    if queries.has_parts:
        known, closely = float(queries.p_known[row]), float(queries.kappa_aleatoric[row])
        doubt = result.doubts[row] or "neither unseen nor ambiguous"
        print(f"       {doubt}: p_known {known:.3f}, kappa of ambiguity {closely:.4g}")
    if (decisions := result.decisions) is not None:
        stale = ", calibration: stale" if decisions.stale else ""
        print(f"decision: {decisions.decision[row]}{stale}")
        print("".join(f"  {line}\n" for line in result.decision_in_words(row)), end="")
    items = result.items[row]
    is_labelled = not all(item.label_repeats_text for item in items)
    text = any(item.text is not None for item in items)
    print(f"{'score':>8} {'kappa':>10}  {'label  ' * is_labelled}{'text' if text else 'path'}")
    for score, kappa, item in zip(result.hits.scores[row], result.hits.kappa[row], items, strict=True):
        content, label = _printable(item.path if item.text is None else item.text), _printable(item.label)
        remarks = ["uncertain"] * bool(result.is_uncertain(item))
        remarks += [f"fused of {item.images.count} {'texts' if text else 'images'}"] * item.is_fused
        remark = f"  ({', '.join(remarks)})" if remarks else ""
        print(f"{float(score):8.4f} {float(kappa):10.4g}  {f'{label}  ' * is_labelled}{content}{remark}")


def _printable(said: object) -> str:
    """One line of text with control and direction characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(said))


def _calibrate(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.retrieval.decisions.density_ratio import SHARE
    from lam.runs.calibrate import calibrate_run
    from lam.runs.calibration_options import CalibrationOptions, repeat_choices
    from lam.runs.calibration_report import describe_calibration

    rates = {"far": parsed.target_far, "ood": parsed.target_ood, "conformal_miss": parsed.target_miss}
    rates["wrong"] = parsed.target_wrong
    options = CalibrationOptions(
        targets={name: rate for name, rate in rates.items() if rate is not None},
        flag=parsed.flag,
        accept=parsed.accept,
        gallery=parsed.gallery,
        folder=parsed.folder,
        strangers=parsed.strangers,
        unlabelled=parsed.unlabelled,
        share_of_strangers=SHARE if parsed.share_of_strangers is None else parsed.share_of_strangers,
        columns=_columns(parsed.columns),
        data_root=parsed.data_root,
        reference=parsed.reference,
        damaged=_damaged(parsed, parsed.run),
    )
    calibration = calibrate_run(parsed.run, repeat_choices(parsed.run, options), progress=not parsed.quiet)
    print("\n".join(describe_calibration(calibration)))
    print(f"calibration: {Path(parsed.run) / 'calibration'}")


def _serve(parsed: argparse.Namespace, _: list[str]) -> None:
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
    settings = ServiceSettings(keep_queries=parsed.keep_queries)
    serve(
        parsed.run,
        host=parsed.host,
        port=parsed.port,
        device=parsed.device,
        drop_corrupt=parsed.drop_corrupt,
        index=parsed.index[0] if parsed.index else None,
        settings=replace(settings, client_connections=None) if parsed.behind_proxy else settings,
    )


def _experiment(parsed: argparse.Namespace, overrides: list[str]) -> None:
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


class _CommandParser(argparse.ArgumentParser):
    """A command; the help of one with settings lists them, which takes slow imports."""

    def format_help(self) -> str:
        do = self.get_default("do")
        if do is _experiment:
            from lam.experiments import describe_settings

            self.epilog = f"{_EXPERIMENT_SETTINGS}\n{describe_settings()}"
        elif do in (_run_or_print, _demo, _sweep):
            from lam.runs.config_files import describe_settings

            self.epilog = f"{_SETTINGS}\n{describe_settings()}"
        return super().format_help()


_SHARED: dict[str, dict[str, Any]] = {
    "run": {"help": "the folder of a finished run"},
    "--plugin": {
        "action": "append",
        "default": [],
        "metavar": "FILE",
        "help": "a Python file that registers a network, a loss, a method or a data set; may be repeated",
    },
    "--limit": {"metavar": "N", "help": "short for --data.limit: at most N items of each part"},
    "--allow-missing": {"action": "store_true", "help": "leave out listed images that do not exist"},
    "--skip-damaged": {"action": "store_true", "help": "leave out unreadable images; a CSV file lists them"},
    "--paper": {"action": "store_true", "help": "the authors' settings on these data"},
    "--columns": {
        "nargs": "+",
        "metavar": "NAME=COLUMN",
        "help": "columns of a table of texts: text, label, question, answer (default: the run's columns, or these "
        "names)",
    },
}
"""Arguments of several commands."""
_DATA = ("--limit", "--allow-missing", "--skip-damaged")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="lam", description="Make a retrieval network Bayesian.", epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"lam {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)

    def command(name: str, do: Any, help: str, *shared: str) -> Any:
        """Add a command with some shared arguments; what it returns adds its own."""
        added = commands.add_parser(name, help=help, description=help, formatter_class=raw, allow_abbrev=False)
        added.set_defaults(do=do)
        added.add_argument("--quiet", action="store_true", help="show no progress")
        for argument in (*shared, *(() if do is _experiment else ("--plugin",))):
            added.add_argument(argument, **_SHARED[argument])
        return added.add_argument

    what = "DATA METHOD, such as digits laplace_posthoc; a YAML file; or the folder of a run, to continue it"
    add = command(
        "run",
        _run_or_print,
        "Run a configuration: train, fit the posterior, tune, evaluate, report.",
        *_DATA,
        "--paper",
    )
    add("config", nargs="+", help=what)
    add("--print", action="store_true", help="print all settings as YAML and stop")

    add = command("demo", _demo, "Run and calibrate digits, sentences or photographs that other packages ship.", *_DATA)
    add("config", metavar="demo", nargs="*", help=f"one of {', '.join(DEMOS)} (default: digits)")

    add = command(
        "sweep",
        _sweep,
        "Run a configuration with several seeds: mean and standard deviation.",
        *_DATA,
        "--paper",
    )
    add("config", nargs="+", help="DATA METHOD, such as digits laplace_posthoc, or a YAML file")
    add("--seeds", type=int, default=5, help="number of seeds, the first is the configuration's (default: 5)")

    add = command("compare", _compare, "Draw finished runs on the same data together, with a table.")
    add("runs", nargs="+", metavar="RUN", help="the folders of two to 24 finished runs")
    add("-o", "--output", default="comparison", help="the folder to write or replace (default: comparison)")

    add = command(
        "embed",
        _embed,
        "Embed images or texts: an .npz file with mean, kappa, variance and, of a calibrated run, a flag.",
        *("run", "--columns", "--skip-damaged"),
    )
    add("folder", help="images, in class sub-folders or not; for a run on texts a table of them")
    add("-o", "--output", required=True, help="the .npz file to write; each process of torchrun adds -i-of-n")
    add("--shard", metavar="i/n", help="only every n-th image, starting at the i-th (default: all)")

    add = command(
        "index",
        _index,
        "Replace a run's gallery by images, texts or embeddings.",
        *("run", "--columns", "--skip-damaged"),
    )
    add("folder", nargs="?", help="images, in class sub-folders or not; for a run on texts a table, as for --list")
    add(
        "--list",
        "--csv",
        dest="listed",
        metavar="FILE",
        help="a table (CSV, JSON, .xlsx, Parquet) with a column path, or for a run on texts text, or question and "
        "answer; optional are id, label and any others",
    )
    add("--embeddings", metavar="FILE", nargs="+", help="the output of `lam embed`, all shards")
    add("--fuse", action="store_true", help="one entry for the images of one id, or else of one label")
    add("--skip-uncertain", action="store_true", help="leave out images whose kappa is below the flag")
    add("--factory", default="Flat", help="the FAISS type, such as Flat or HNSW32 (default: Flat)")

    add = command("search", _search, "Search a run's gallery for images or texts.", "run", "--skip-damaged")
    add("image", nargs="*", help="image files, or folders of them")
    add("--text", action="append", default=[], help="a text, for a run on texts; may be repeated")
    add("--file", help="a table of texts: column text or question, or the run's column")
    add("-o", "--output", metavar="FILE", help="write .csv, one line per hit, or .json, one entry per image")
    add("-k", type=int, default=5, help="number of hits (default: 5)")

    add = command(
        "calibrate",
        _calibrate,
        "Learn thresholds at given error rates, and P(correct).",
        *("run", "--columns", "--skip-damaged"),
    )
    least = "the rate of the last calibration, or else {}, or the least that the data allow"
    add("--target-far", type=float, help=f"bound on false accepts (default: {least.format(0.001)})")
    add("--target-ood", type=float, help=f"bound on false flags (default: {least.format(0.05)})")
    add("--target-miss", type=float, help="bound on misses of conformal sets (default: likewise, or else 0.05)")
    add(
        "--target-wrong",
        type=float,
        help="bound on the share of wrong answers among those given (default: likewise, or else none; 0: none)",
    )
    add(
        "--flag",
        metavar="SCORE",
        help="abstain by this score: kappa, variance, norm, knn, mahalanobis, relative_mahalanobis, mahalanobis_knn, "
        "global_mahalanobis, radial_mahalanobis, layer_change, cosine, margin, mean_cosine, cosine_spread, votes, "
        "weighted_votes, kappa_epistemic, kappa_aleatoric, p_known, or combined, several as one (default: the flag "
        "last asked for, or else the best in cross-validation)",
    )
    add(
        "--accept",
        metavar="SCORE",
        help="answer by this score: probability, that the first hit is right, or one such as cosine (default: the "
        "score last asked for, or else probability, unless another is better in cross-validation)",
    )
    add(
        "--gallery",
        choices=("held-out", "index"),
        help="search the run's gallery (index) or a part of the held-out data (default: index, unless it holds none of "
        "their classes)",
    )
    add("--folder", help="calibrate on fresh images, or a table of texts (default: the run's validation split)")
    add("--strangers", metavar="FOLDER", help="images or texts without a match, for a bound on their false accepts")
    add(
        "--unlabelled",
        metavar="FOLDER",
        help="queries as they come, strangers among them, to learn P(known) from; `live`: the queries that `lam serve` "
        "kept",
    )
    add(
        "--share-of-strangers",
        type=float,
        help="the share of future queries without a match, unless --unlabelled tells it (default: 0.5)",
    )
    add("--data-root", help="the folder of the run's data, if they have moved")
    add("--reference", type=int, default=5000, help="training items to compare with (default: 5000; 0: none)")

    add = command(
        "experiment",
        _experiment,
        "Compare losses where the truth is known, or repeat a table of a paper: a table and a page.",
    )
    add(
        "config",
        metavar="NAME",
        nargs="+",
        help="posterior-recovery, aninfonce-latents, varcon-accuracy or explicit-concentration, or a YAML file with "
        "such a name and settings",
    )
    add("-o", "--output", help="the folder to write (default: experiments/NAME)")

    add = command("serve", _serve, "Serve a run over HTTP: searches, decisions, a gallery that changes, a page.", "run")
    add("--port", type=int, default=8000, help="(default: 8000)")
    add("--host", default="127.0.0.1", help="any other than this machine needs $LAM_API_KEY")
    add("--device", default="cpu", help="where the network runs (default: cpu)")
    add("--behind-proxy", action="store_true", help="all requests come from a proxy: no limit per address")
    add(
        "--keep-queries",
        type=int,
        metavar="N",
        help="keep the embeddings of N random queries in the run's folder, to calibrate on (default: none)",
    )
    add("--drop-corrupt", action="store_true", help="start without stored items that were altered")
    add(
        "--index",
        metavar="flat|hnsw|ADDRESS",
        action="append",
        default=[],
        help="search exactly (flat), or faster along a graph that may miss a neighbour (hnsw; the start prints how "
        "many it finds), or in a Milvus collection, such as milvus://HOST/COLLECTION (default: flat, or the type that "
        "`lam index --factory` named)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
