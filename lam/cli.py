"""The command `lam`."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lam import __version__
from lam.utils import distributed

DEMO = ("digits", "laplace_posthoc")
RUNS = ("run", "demo", "sweep")
FLAGS = ("--quiet", "--help", "--allow-missing", "--paper", "--print")
_DEMO_TARGETS = {"far": 0.01, "ood": 0.05}  # which the demo's 289 held-out digits are enough for
STOPPED, READER_GONE = 130, 141  # as shells have it for SIGINT and SIGPIPE
_EXAMPLES = """examples:
  lam demo                                     train, fit, report and calibrate on the digits that ship with lam
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
  lam calibrate RUN --target-far 0.01          thresholds for "match", "unknown" and "abstain" at stated error rates
  lam serve RUN --port 8000                    searches and decisions over HTTP, for this machine alone without a key"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 for success, 1 for an error that is said in one line, 2 for wrong usage."""
    try:
        try:
            return _execute(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            print(end="", flush=True)  # while a reader that has gone can still be told from other errors
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes again at its end
        return READER_GONE


def _execute(arguments: list[str]) -> int:
    if arguments and arguments[0] in RUNS:
        arguments = _joined(arguments)
    parsed, rest = _parser().parse_known_args(arguments)
    if parsed.command == "index" and parsed.folder is None and len(rest) == 1 and not rest[0].startswith("-"):
        parsed.folder = rest.pop()  # argparse takes an optional positional only beside the one before it
    if rest and parsed.command not in RUNS:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
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


def _joined(arguments: list[str]) -> list[str]:
    """Write `--name value` as `--name=value`, so that no value is taken for the configuration."""
    joined: list[str] = []
    for argument in arguments:
        before = joined[-1] if joined else ""
        open_setting = before.startswith("--") and "=" not in before and before not in FLAGS
        if open_setting and not argument.startswith("--"):
            joined[-1] = f"{before}={argument}"
        else:
            joined.append(argument)
    return joined


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _complain(f"warning: {message}")


def _complain(message: str) -> None:
    name = "lam" if distributed.is_rank_zero() else f"lam, process {distributed.rank()}"
    print(f"{name}: {message}", file=sys.stderr)


def _config(parsed: argparse.Namespace, overrides: list[str]) -> Any:
    from lam.runs.config_files import load_config

    limit = [] if parsed.limit is None else [f"--data.limit={parsed.limit}"]
    words = [*parsed.config, *(["--paper"] if parsed.paper else [])]
    return load_config(words, [*overrides, *limit], allow_missing=parsed.allow_missing)


def _run_or_print(parsed: argparse.Namespace, overrides: list[str]) -> None:
    if not parsed.print:
        _run(parsed, overrides)
        return
    config = _config(parsed, overrides)
    config.check()
    print(yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True), end="")


def _run(parsed: argparse.Namespace, overrides: list[str]) -> Path:
    config = _config(parsed, overrides)
    from lam.runs.run import run  # heavy: a mistake in the settings is told sooner

    result = run(config, progress=not parsed.quiet)
    if distributed.is_rank_zero():
        for name, value in result.metrics.items():
            if _is_shown(name):
                print(f"{name:<32}{'undefined' if value is None else format(value, '.4f'):>10}")
        print(f"report: {result.report}")
    return result.folder


def _demo(parsed: argparse.Namespace, overrides: list[str]) -> None:
    folder = _run(parsed, overrides)
    if not distributed.is_rank_zero():
        return
    from lam.retrieval.decisions.calibration import Targets
    from lam.runs.calibrate import calibrate_run
    from lam.runs.finished import Run

    if (calibration := Run(folder).calibration) is None:
        if not parsed.quiet:
            print("calibrate ...", file=sys.stderr)
        try:
            calibration = calibrate_run(
                folder, targets=Targets(**_DEMO_TARGETS), flag="combined", progress=not parsed.quiet
            )
        except ValueError as error:
            _complain(f"warning: not calibrated: {error}")
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
    for name, mean in result.mean.items():
        if _is_shown(name):
            print(f"{name:<32}{mean:>10.4f}" + (f" ± {result.std[name]:.4f}" if result.std else ""))
    for name, seeds in result.undefined.items():
        if _is_shown(name):
            print(f"{name:<32}{'undefined':>10} for seed {', '.join(map(str, seeds))}")
    print(f"seeds: {result.folder / SWEEP}")


def _compare(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.runs.comparison import compare
    from lam.runs.folder import run_at

    made = compare([run_at(Path(run)) for run in parsed.runs], parsed.output)
    print(made)
    for path in made.written:
        print(path)


def _is_shown(name: str) -> bool:
    from lam.retrieval.metrics.registry import describe

    return "command line" in describe(name).shown


def _embed(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.gallery.embed import embed_folder
    from lam.gallery.shards import Shard, save_embeddings
    from lam.runs.finished import Run
    from lam.runs.index import calibration_of
    from lam.utils.files import check_output

    output = Path(parsed.output)
    check_output(output)
    distributed.join()
    if distributed.world_size() > 1:
        if parsed.shard is not None:
            raise ValueError("torchrun gives each process its shard: leave --shard out")
        shard = Shard.of_process()
        output = output.with_stem(f"{output.stem}-{shard.number}-of-{shard.count}")
    else:
        shard = Shard() if parsed.shard is None else Shard.parse(parsed.shard)
    run = Run(parsed.run)
    calibration = calibration_of(run)
    made = embed_folder(run.encoder, parsed.folder, shard=shard, calibration=calibration, progress=not parsed.quiet)
    options: dict[str, Any] = {"encoder": run.fingerprint, "shard": shard, "flagged": made.flagged}
    save_embeddings(output, made.images, made.embeddings, **options)
    flagged = "" if made.flagged is None else f", {int(made.flagged.sum())} flagged"
    print(f"{len(made.embeddings)} embeddings{flagged}: {output}")


def _index(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.runs.folder import GALLERY
    from lam.runs.index import index_images

    made = index_images(
        parsed.run,
        folder=parsed.folder,
        listed=parsed.csv,
        embedded=parsed.embeddings,
        factory=parsed.factory,
        fuse=parsed.fuse,
        skip_uncertain=parsed.skip_uncertain,
        progress=not parsed.quiet,
    )
    if made.uncertain:
        print(f"uncertain, kappa below the flag, {'skipped' if made.skipped else 'kept'}: {len(made.uncertain)}")
        for path, kappa in made.uncertain:
            print(f"{kappa:10.4g}  {path}")
    print(f"{len(made)} {'identities' if parsed.fuse else 'images'}: {Path(parsed.run) / GALLERY}")


def _search(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.runs import index
    from lam.runs.found_files import check_suffix, write_found
    from lam.utils.files import check_output

    if parsed.output is not None:
        check_suffix(parsed.output)
        check_output(parsed.output)
    found = index.search(parsed.run, *parsed.image, k=parsed.k, progress=not parsed.quiet)
    if parsed.output is not None:
        write_found(parsed.output, found)
        print(f"{len(found.images)} images: {parsed.output}")
        return
    for row, image in enumerate(found.images):
        if len(found.images) > 1:
            print(f"image: {image}" if row == 0 else f"\nimage: {image}")
        _show_answer(found, row)


def _show_answer(found: Any, row: int) -> None:
    print(f"query: kappa {float(found.queries.kappa[row]):.4g}, variance {float(found.queries.variance[row]):.4g}")
    if (decisions := found.decisions) is not None:
        stale = ", calibration: stale" if decisions.stale else ""
        print(f"decision: {decisions.decision[row]}, probability {float(decisions.probability[row]):.3f}{stale}")
    print(f"{'score':>8} {'kappa':>10}  label  path")
    for score, kappa, item in zip(found.hits.scores[row], found.hits.kappa[row], found.items[row], strict=True):
        print(f"{float(score):8.4f} {float(kappa):10.4g}  {item.label}  {item.path}")


def _calibrate(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.retrieval.decisions.calibration import Targets
    from lam.runs.calibrate import calibrate_run, current_calibration

    before = current_calibration(parsed.run)
    flag = before.flag if parsed.flag is None and before is not None else parsed.flag
    if parsed.flag is None and flag not in (None, "kappa") and parsed.reference == 0:
        _complain(f"warning: flag {flag} compares with training features, and --reference 0 asks for none: kappa flags")
        flag = "kappa"
    given = {"far": parsed.target_far, "ood": parsed.target_ood, "conformal_miss": parsed.target_miss}
    wanted = {name: target for name, target in given.items() if target is not None}
    made = calibrate_run(
        parsed.run,
        targets=replace(Targets() if before is None else before.targets, **wanted),
        flag=flag,
        gallery=parsed.gallery,
        folder=parsed.folder,
        strangers=parsed.strangers,
        data_root=parsed.data_root,
        reference=parsed.reference,
        progress=not parsed.quiet,
    )
    far, (low, high) = made.false_accept_rate(made.accept_above)
    left_out = f", {made.facts['unlabelled']} more without label left out" if made.facts["unlabelled"] else ""
    print(f"gallery: {made.gallery_size} items{left_out}; calibrated on {made.facts['queries']} queries")
    print(
        f"match: cosine above {made.accept_above:.9g}; false accepts {far:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    )
    print(f"       {made.facts['false_accepts']}")
    flagged = (
        f"kappa below {made.kappa_below:.6g}" if made.flag == "kappa" else f"{made.flag} above {made.flag_above:.6g}"
    )
    print(f"abstain: {flagged}; false flags at most {made.targets.ood:g}")
    print(f"P(correct): cross-validated ECE {made.reliability.expected_error:.4f}")
    if made.depth is None:
        print(
            "too few queries had a match to say how many hits hold one with probability "
            f"{1 - made.targets.conformal_miss:g}"
        )
    else:
        print(f"a match is among the first {made.depth} hits with probability {1 - made.targets.conformal_miss:g}")
    print(f"calibration: {Path(parsed.run) / 'calibration'}")


def _serve(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam.service.settings import ServiceSettings

    try:
        from lam.service.server import serve
    except ImportError as error:
        raise ValueError(f"serving needs more than is installed ({error}): pip install 'lam[serve]'") from None

    serve(
        parsed.run,
        host=parsed.host,
        port=parsed.port,
        device=parsed.device,
        drop_corrupt=parsed.drop_corrupt,
        index=parsed.index,
        settings=ServiceSettings(client_connections=None) if parsed.behind_proxy else None,
    )


class _CommandParser(argparse.ArgumentParser):
    """A command; the help of those that run a configuration lists the settings, which are looked up only then."""

    def format_help(self) -> str:
        if self.get_default("do") in (_run_or_print, _demo, _sweep):
            self.epilog = _settings_help()
        return super().format_help()


def _settings_help() -> str:
    from lam.runs.config_files import describe_settings

    return (
        "Any setting can be given as an option, such as --training.epochs=5 or --output=DIR, and stands above the\n"
        "file. The folder is runs/DATA/METHOD, of a sweep runs/DATA/METHOD-sweep, unless --output says otherwise;\n"
        "started again with the same settings, a run continues.\n\n"
        f"settings, their defaults (and what they may be):\n{describe_settings()}"
    )


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

    def configured(name: str, do: Any, help: str) -> argparse.ArgumentParser:
        added = command(name, do, help)
        added.add_argument("--limit", metavar="N", help="short for --data.limit: at most N items of each part")
        added.add_argument("--allow-missing", action="store_true", help="leave out listed images that do not exist")
        return added

    what = "DATA METHOD, such as digits laplace_posthoc; a YAML file; or the folder of a run, to continue it"
    run = configured("run", _run_or_print, "Run a configuration: train, fit the posterior, tune, evaluate, report.")
    run.add_argument("config", nargs="+", help=what)
    run.add_argument("--print", action="store_true", help="show all settings as a YAML file, and do no more")
    demo = configured("demo", _demo, "Run the embedded digits data set and calibrate it, in a minute or two.")
    demo.set_defaults(config=DEMO, paper=False)
    sweep = configured("sweep", _sweep, "Run a configuration from several seeds: mean and standard deviation.")
    sweep.add_argument("config", nargs="+", help="DATA METHOD, such as digits laplace_posthoc, or a YAML file")
    for command_of_data in (run, sweep):
        command_of_data.add_argument("--paper", action="store_true", help="the authors' settings on these data")
    sweep.add_argument("--seeds", type=int, default=5, help="how many, from the configuration's on (default: 5)")
    compare = command("compare", _compare, "Draw finished runs on the same data together, with a table.")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="the folders of finished runs, two to twelve")
    compare.add_argument(
        "-o", "--output", default="comparison", help="the folder to write, or replace (default: comparison)"
    )
    embed = command(
        "embed",
        _embed,
        "Embed the images of a folder: an .npz file with mean, kappa, variance and, calibrated, a flag.",
    )
    embed.add_argument("run", help="the folder of a finished run")
    embed.add_argument("folder", help="images, in class sub-folders or not")
    embed.add_argument(
        "-o", "--output", required=True, help="the .npz file to write; torchrun's processes add -i-of-n to its name"
    )
    embed.add_argument("--shard", metavar="i/n", help="only every n-th image, from the i-th on (default: all)")
    index = command("index", _index, "Fill a run's gallery anew with images: of a folder, a list, or already embedded.")
    index.add_argument("run", help="the folder of a finished run")
    index.add_argument("folder", nargs="?", help="images, in class sub-folders or not")
    index.add_argument("--csv", metavar="FILE", help="a list: path, and if wanted id, label and any other columns")
    index.add_argument("--embeddings", metavar="FILE", nargs="+", help="what `lam embed` wrote, all shards")
    index.add_argument("--fuse", action="store_true", help="one entry for the images of one id, or else label")
    index.add_argument("--skip-uncertain", action="store_true", help="leave out images whose kappa is below the flag")
    index.add_argument("--factory", default="Flat", help="the FAISS type, such as Flat or HNSW32 (default: Flat)")
    search = command("search", _search, "Search a run's gallery for images.")
    search.add_argument("run", help="the folder of a finished run")
    search.add_argument("image", nargs="+", help="image files, or folders of them")
    search.add_argument("-o", "--output", metavar="FILE", help="write .csv, a line a hit, or .json, an entry an image")
    search.add_argument("-k", type=int, default=5, help="how many hits (default: 5)")
    calibrate = command("calibrate", _calibrate, "Learn thresholds at stated error rates, and P(correct).")
    calibrate.add_argument("run", help="the folder of a finished run")
    calibrate.add_argument(
        "--target-far", type=float, help="false accepts (default: that of the run's calibration, or else 0.001)"
    )
    calibrate.add_argument("--target-ood", type=float, help="false flags (default: likewise, or else 0.05)")
    calibrate.add_argument("--target-miss", type=float, help="of conformal sets (default: likewise, or else 0.05)")
    calibrate.add_argument(
        "--flag",
        choices=("kappa", "knn", "combined"),
        help="to abstain by (default: likewise, or else the encoder's)",
    )
    calibrate.add_argument(
        "--gallery",
        choices=("held-out", "index"),
        default="index",
        help="what is searched: the run's gallery (default), or a part of the held-out data",
    )
    calibrate.add_argument("--folder", help="fresh images to calibrate on (default: the run's validation split)")
    calibrate.add_argument("--strangers", metavar="FOLDER", help="images without a match, to promise false accepts of")
    calibrate.add_argument("--data-root", help="where the run's data are, if they have moved")
    calibrate.add_argument(
        "--reference", type=int, default=1000, help="training items for k-NN (default: 1000; 0: none)"
    )
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
    serve.add_argument("--drop-corrupt", action="store_true", help="go on without stored items that were altered")
    serve.add_argument(
        "--index", metavar="ADDRESS", help="search in a Milvus collection, such as milvus://HOST/COLLECTION"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
