"""The command `lam`."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
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
RUNS = ("run", "demo", "sweep")
FLAGS = ("--quiet", "--help", "--allow-missing", "--skip-damaged", "--paper", "--print")
_DEMO_TARGETS = {"far": 0.01, "ood": 0.05}  # which the demo's 289 held-out digits are enough for
STOPPED, READER_GONE = 130, 141  # as shells have it for SIGINT and SIGPIPE
HEADLINES = {
    "retrieval": ("recall@1", "map@5"),
    "is the first hit right?": ("ausc", "ece"),
    "is it out of distribution?": ("auroc", "auprc"),
}
"""The metrics that commands print; `metrics.json` and the report have all of them."""
_NO_STRANGERS = (
    "not measured: how strangers are told from known queries, as no outsiders are named (--data.ood) and no classes "
    "were set aside and searched for (--data.strangers)"
)
_EXAMPLES = """examples:
  lam demo                                     train, fit, report and calibrate on the digits that ship with lam
  lam demo text                                the same on sentences that ship with Python
  lam demo images                              the same on photographs that ship with scikit-learn
  lam run fashionmnist laplace_posthoc --data.root=DIR
  lam run folder laplace_posthoc --data.root=DIR       your own images, a sub-folder a class
  lam run mine.yaml                            settings of your own; `--print` shows what they come to
  lam sweep fashionmnist laplace_online --seeds 5      mean and standard deviation over seeds
  lam compare RUN RUN RUN -o comparison        all methods in one picture of each kind, and a table
  lam embed RUN FOLDER -o embeddings.npz       RUN is the folder of a run, such as runs/digits/laplace_posthoc, or
                                               the one above it, where it is the only run there
  lam index RUN FOLDER
  lam embed RUN FOLDER --shard 1/4 -o part-1.npz, and so on, then lam index RUN --embeddings part-*.npz
  lam search RUN IMAGE -k 5
  lam run texts laplace_posthoc --data.root=FILE   a table with columns text and label, or question and answer
  lam search RUN --text "where is my card?"
  lam calibrate RUN --target-far 0.01          thresholds for "match", "unknown" and "abstain" at stated error rates
  lam experiment posterior-recovery --set dimension=10 learning_rate=1e-4
  lam serve RUN --port 8000                    searches and decisions over HTTP, for this machine alone without a key"""

_SETTINGS = """\
Any setting can be given as an option, such as --training.epochs=5 or --output=DIR, and stands above the
file. The folder is runs/DATA/METHOD, of a sweep runs/DATA/METHOD-sweep, unless --output says otherwise;
started again with the same settings, a run continues.

settings, their defaults (and what they may be):"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 for success, 1 for an error that is said in one line, 2 for wrong usage."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: not every terminal has every name of a file
    try:
        try:
            words = list(sys.argv[1:] if arguments is None else arguments)
            with block_hangups() if words[:1] == ["serve"] else nullcontext():  # what it imports takes a second
                return _execute(words)
        finally:
            print(end="", flush=True)  # while a reader that has gone can still be told from other errors
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes again at its end
        return READER_GONE


def _execute(arguments: list[str]) -> int:
    if arguments and arguments[0] in RUNS:
        arguments = _attach_values(arguments)
    parsed, rest = _parser().parse_known_args(arguments)
    if parsed.command in RUNS:  # argparse takes a setting that has a space in it for a word of the configuration
        rest += [word for word in parsed.config if word.startswith("--")]
        parsed.config = [word for word in parsed.config if not word.startswith("--")]
        if not parsed.config and parsed.command != "demo":
            _parser().error("say what to run, such as digits laplace_posthoc")
    if parsed.command == "index" and parsed.folder is None and len(rest) == 1 and not rest[0].startswith("-"):
        parsed.folder = rest.pop()  # argparse takes an optional positional only beside the one before it
    if rest and parsed.command not in RUNS:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, category, *_, **__: _complain(
            f"{'note' if issubclass(category, Note) else 'warning'}: {message}"
        )
        try:
            if "run" in parsed:
                from lam.runs.folder import run_at

                parsed.run = str(run_at(Path(parsed.run)))
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


def _attach_values(arguments: list[str]) -> list[str]:
    """Write `--name value` as `--name=value`, so that no value is taken for the configuration."""
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
    words = [*parsed.config, *(["--paper"] if parsed.paper else [])]
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
    from lam.runs.run import run  # slow to import: mistakes in settings are told before

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
    """Print the headlines among metrics by flat key, in groups: of each OOD set, by the encoder's own score alone."""
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
    promised = calibration.facts["false_accepts"]
    print(f"calibrated: false accepts {_DEMO_TARGETS['far']:.0%} ({promised}), false flags {_DEMO_TARGETS['ood']:.0%}")
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
    """What to do with image files that cannot be read: they are listed beside the output, or else named."""
    from lam.gallery.damaged import DamagedFiles

    if output is None:
        return DamagedFiles(skip=parsed.skip_damaged)
    output = Path(output).absolute()
    return DamagedFiles(output.with_name(f"{output.stem}-damaged.csv"), parsed.skip_damaged)


def _columns(words: Sequence[str] | None) -> Any:
    """The columns that NAME=COLUMN say; None where there are none."""
    from dataclasses import fields

    from lam.datasets.texts import Columns

    if words is None:
        return None
    known = [field.name for field in fields(Columns)]
    columns: dict[str, str] = {}
    for name, _, column in (word.partition("=") for word in words):
        if name not in known or not column or name in columns:
            raise ValueError(
                f"columns must be NAME=COLUMN, each NAME once of {', '.join(known)}, got {' '.join(words)}"
            )
        columns[name] = column
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
        skipped_or_kept = "skipped" if parsed.skip_uncertain else "kept"
        print(f"uncertain, kappa below the flag, {skipped_or_kept}: {len(enrolled.uncertain)}")
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
    finally:  # beside damaged files the others were searched for
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
    """One line in which what a terminal would obey, or read backwards, is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(said))


def _calibrate(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.retrieval.decisions.density_ratio import SHARE
    from lam.retrieval.decisions.flags import needs_reference
    from lam.runs.calibrate import CalibrationOptions, calibrate_run, current_calibration
    from lam.runs.calibration_report import described

    previous = current_calibration(parsed.run)
    flag = previous.facts.get("asked_flag") if parsed.flag is None and previous is not None else parsed.flag
    if parsed.flag is None and flag is not None and parsed.reference == 0 and needs_reference(flag):
        _complain(f"warning: flag {flag} compares with training features, and --reference 0 asks for none: kappa flags")
        flag = None
    accept = previous.facts.get("asked_accept") if parsed.accept is None and previous is not None else parsed.accept
    rates = {"far": parsed.target_far, "ood": parsed.target_ood, "conformal_miss": parsed.target_miss}
    rates["wrong"] = parsed.target_wrong
    if previous is not None:
        for name in previous.facts.get("asked_rates", rates):
            rates[name] = getattr(previous.targets, name) if rates[name] is None else rates[name]
    options = CalibrationOptions(
        targets={name: rate for name, rate in rates.items() if rate is not None and (name, rate) != ("wrong", 0)},
        flag=flag,
        accept=accept,
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
    calibration = calibrate_run(parsed.run, options, progress=not parsed.quiet)
    print("\n".join(described(calibration)))
    print(f"calibration: {Path(parsed.run) / 'calibration'}")


def _serve(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.service.settings import ServiceSettings

    try:
        from lam.service.server import serve
    except ImportError as error:
        raise ValueError(f"serving needs more than is installed ({error}): {install_command('serve')}") from None

    if len(parsed.index) > 1:
        raise ValueError(
            f"give --index once, got {', '.join(parsed.index)}: flat or hnsw is for the service's own index; a Milvus "
            "collection has the structure that it was made with"
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


def _experiment(parsed: argparse.Namespace, _: list[str]) -> None:
    from tqdm import tqdm

    from lam.experiments import conduct, configured
    from lam.experiments.base import cell_text

    experiment = configured(parsed.name, parsed.set)
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
    """A command; the help of those that run a configuration lists the settings, which are looked up only then."""

    def format_help(self) -> str:
        if self.get_default("do") in (_run_or_print, _demo, _sweep):
            from lam.runs.config_files import describe_settings

            self.epilog = f"{_SETTINGS}\n{describe_settings()}"
        return super().format_help()


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="lam", description="Make a retrieval network Bayesian.", epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"lam {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)

    def command(name: str, do: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, formatter_class=raw, allow_abbrev=False)
        added.add_argument("--quiet", action="store_true", help="show no progress")
        added.set_defaults(do=do)
        return added

    def with_columns(of: argparse.ArgumentParser) -> None:
        of.add_argument(
            "--columns",
            nargs="+",
            metavar="NAME=COLUMN",
            help="columns of a table of texts: text, label, question, answer (default: the run's, or of these names)",
        )

    def with_damaged(of: argparse.ArgumentParser) -> None:
        of.add_argument(
            "--skip-damaged", action="store_true", help="leave out images that cannot be read; a CSV file lists them"
        )

    def configured(name: str, do: Any, help: str) -> argparse.ArgumentParser:
        added = command(name, do, help)
        added.add_argument("--limit", metavar="N", help="short for --data.limit: at most N items of each part")
        added.add_argument("--allow-missing", action="store_true", help="leave out listed images that do not exist")
        with_damaged(added)
        return added

    what = "DATA METHOD, such as digits laplace_posthoc; a YAML file; or the folder of a run, to continue it"
    run = configured("run", _run_or_print, "Run a configuration: train, fit the posterior, tune, evaluate, report.")
    run.add_argument("config", nargs="+", help=what)
    run.add_argument("--print", action="store_true", help="show all settings as a YAML file, and do no more")
    demo = configured(
        "demo", _demo, "Run digits, sentences or photographs that ship with other packages, and calibrate."
    )
    demo.add_argument("config", metavar="demo", nargs="*", help=f"one of {', '.join(DEMOS)} (default: digits)")
    demo.set_defaults(paper=False)
    sweep = configured("sweep", _sweep, "Run a configuration from several seeds: mean and standard deviation.")
    sweep.add_argument("config", nargs="+", help="DATA METHOD, such as digits laplace_posthoc, or a YAML file")
    for command_of_data in (run, sweep):
        command_of_data.add_argument("--paper", action="store_true", help="the authors' settings on these data")
    sweep.add_argument("--seeds", type=int, default=5, help="how many, from the configuration's on (default: 5)")
    compare = command("compare", _compare, "Draw finished runs on the same data together, with a table.")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="the folders of finished runs, two to 24")
    compare.add_argument(
        "-o", "--output", default="comparison", help="the folder to write, or replace (default: comparison)"
    )
    embed = command(
        "embed",
        _embed,
        "Embed the images of a folder, or texts: an .npz file with mean, kappa, variance and, calibrated, a flag.",
    )
    embed.add_argument("run", help="the folder of a finished run")
    embed.add_argument("folder", help="images, in class sub-folders or not; of a run on texts, a table of them")
    with_columns(embed)
    embed.add_argument(
        "-o", "--output", required=True, help="the .npz file to write; torchrun's processes add -i-of-n to its name"
    )
    with_damaged(embed)
    embed.add_argument("--shard", metavar="i/n", help="only every n-th image, from the i-th on (default: all)")
    index = command("index", _index, "Fill a run's gallery anew: with images or texts, or what is embedded already.")
    index.add_argument("run", help="the folder of a finished run")
    index.add_argument("folder", nargs="?", help="images, in class sub-folders or not; or as --list, of a run on texts")
    index.add_argument(
        "--list",
        "--csv",
        dest="listed",
        metavar="FILE",
        help="a table (CSV, JSON, .xlsx, Parquet) with path, or of a run on texts text, or question and answer, and if "
        "wanted id, label and any others",
    )
    with_columns(index)
    index.add_argument("--embeddings", metavar="FILE", nargs="+", help="what `lam embed` wrote, all shards")
    with_damaged(index)
    index.add_argument("--fuse", action="store_true", help="one entry for the images of one id, or else label")
    index.add_argument("--skip-uncertain", action="store_true", help="leave out images whose kappa is below the flag")
    index.add_argument("--factory", default="Flat", help="the FAISS type, such as Flat or HNSW32 (default: Flat)")
    search = command("search", _search, "Search a run's gallery for images or texts.")
    search.add_argument("run", help="the folder of a finished run")
    search.add_argument("image", nargs="*", help="image files, or folders of them")
    search.add_argument("--text", action="append", default=[], help="a text, of a run on texts; may be repeated")
    search.add_argument("--file", help="a table of many texts: column text or question, or the run's")
    with_damaged(search)
    search.add_argument("-o", "--output", metavar="FILE", help="write .csv, a line a hit, or .json, an entry an image")
    search.add_argument("-k", type=int, default=5, help="how many hits (default: 5)")
    calibrate = command("calibrate", _calibrate, "Learn thresholds at stated error rates, and P(correct).")
    calibrate.add_argument("run", help="the folder of a finished run")
    calibrate.add_argument(
        "--target-far",
        type=float,
        help="false accepts (default: as asked for last, or else 0.001, or the least that the data can promise)",
    )
    calibrate.add_argument(
        "--target-ood", type=float, help="false flags (default: likewise, or else 0.05, or the least)"
    )
    calibrate.add_argument("--target-miss", type=float, help="of conformal sets (default: likewise, or else 0.05)")
    calibrate.add_argument(
        "--target-wrong",
        type=float,
        help="of the answers, what share may be wrong (default: as asked for last, or else none is promised; 0: none)",
    )
    calibrate.add_argument(
        "--flag",
        metavar="SCORE",
        help="to abstain by: kappa, variance, norm, knn, mahalanobis, relative_mahalanobis, mahalanobis_knn, "
        "global_mahalanobis, radial_mahalanobis, layer_change, cosine, margin, mean_cosine, cosine_spread, votes, "
        "weighted_votes, kappa_epistemic, kappa_aleatoric, p_known, or combined, several as one (default: the one "
        "asked for last, or what tells strangers best in cross-validation)",
    )
    calibrate.add_argument(
        "--accept",
        metavar="SCORE",
        help="to answer by: probability, that the first hit is right, or a score such as cosine (default: the one "
        "asked for last, or else probability, unless a single score does better in cross-validation)",
    )
    calibrate.add_argument(
        "--gallery",
        choices=("held-out", "index"),
        help="what is searched: the run's gallery, or a part of the held-out data (default: the gallery, unless it "
        "holds none of their classes)",
    )
    calibrate.add_argument(
        "--folder", help="fresh images, or a table of texts, to calibrate on (default: the run's validation split)"
    )
    calibrate.add_argument(
        "--strangers", metavar="FOLDER", help="images or texts without a match, to promise false accepts of"
    )
    calibrate.add_argument(
        "--unlabelled",
        metavar="FOLDER",
        help="queries as they come, strangers among them, to learn P(known) from; `live`: those that the service kept",
    )
    calibrate.add_argument(
        "--share-of-strangers",
        type=float,
        help="without a match, among the queries to come, where --unlabelled does not tell it (default: 0.5)",
    )
    with_columns(calibrate)
    with_damaged(calibrate)
    calibrate.add_argument("--data-root", help="where the run's data are, if they have moved")
    calibrate.add_argument(
        "--reference", type=int, default=5000, help="training items to compare with (default: 5000; 0: none)"
    )
    experiment = command(
        "experiment",
        _experiment,
        "Try losses where the truth is known, or by the papers' own tables; a table and a page.",
    )
    experiment.add_argument(
        "name",
        help="posterior-recovery, aninfonce-latents, varcon-accuracy or explicit-concentration, or a YAML file with "
        "such a name and settings",
    )
    experiment.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings, such as dimension=10 (lam.experiments)"
    )
    experiment.add_argument("-o", "--output", help="the folder to write (default: experiments/NAME)")
    serve = command("serve", _serve, "Serve a run over HTTP: searches, decisions, a gallery that changes, a page.")
    serve.add_argument("run", help="the folder of a finished run")
    serve.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    serve.add_argument("--host", default="127.0.0.1", help="another than this machine needs $LAM_API_KEY")
    serve.add_argument("--device", default="cpu", help="where the network runs (default: cpu)")
    serve.add_argument(
        "--behind-proxy",
        action="store_true",
        help="all requests come from a proxy: no cap on connections of one address",
    )
    serve.add_argument(
        "--keep-queries",
        type=int,
        metavar="N",
        help="keep the embeddings of N queries, drawn from all, in the run's folder, to calibrate on (default: none)",
    )
    serve.add_argument("--drop-corrupt", action="store_true", help="go on without stored items that were altered")
    serve.add_argument(
        "--index",
        metavar="flat|hnsw|ADDRESS",
        action="append",
        default=[],
        help="search exactly, or faster along a graph that may miss a neighbour, of which the start says how many it "
        "finds; or in a Milvus collection, such as milvus://HOST/COLLECTION (default: flat, or what `lam index "
        "--factory` named)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
