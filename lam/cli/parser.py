"""The arguments of each command."""

import argparse
from typing import Any

from lam import __version__
from lam.cli import commands

RUNS = ("run", "demo", "sweep")  # the commands that run a configuration
_EXAMPLES = """examples:
  lam demo                                     train, fit, report and calibrate on the digits that ship with lam
  lam demo text                                the same on sentences that ship with Python
  lam demo images                              the same on photographs that ship with scikit-learn
  lam run fashionmnist laplace_posthoc --data.root=DIR
  lam run folder laplace_posthoc --data.root=DIR       your own images, one sub-folder for each class
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
  lam experiment posterior-recovery --n_samples=[1,4,16] --seed=[0,1]      a curve, means over two seeds
  lam serve RUN --port 8000                    searches and decisions over HTTP; other machines need a key"""

_SETTINGS = """\
Any setting can be an option, such as --training.epochs=5 or --output=DIR; it replaces the setting of the file. The
default folder is runs/DATA/METHOD, or runs/DATA/METHOD-sweep for a sweep. A run that is started again with the same
settings continues.

settings, their defaults (and allowed values), and what they mean:"""
_EXPERIMENT_SETTINGS = """\
Any setting can be an option, such as --dimension=10; it replaces the setting of the file. A
list of values, such as --dimension=[2,10], makes a row and a point of a curve for each; several seeds are averaged.

settings, their defaults (and allowed values), and what they mean:"""


class _CommandParser(argparse.ArgumentParser):
    """The parser of a command. If the command takes settings, its help lists them, after slow imports."""

    def format_help(self) -> str:
        do = self.get_default("do")
        if do is commands.experiment:
            from lam.experiments import describe_settings

            self.epilog = f"{_EXPERIMENT_SETTINGS}\n{describe_settings()}"
        elif do in (commands.run_or_print, commands.demo, commands.run_sweep):
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
    "--limit": {"metavar": "N", "help": "short for --data.limit: at most N items of each split"},
    "--allow-missing": {"action": "store_true", "help": "leave out listed images that do not exist"},
    "--skip-damaged": {
        "action": "store_true",
        "help": "leave out unreadable images (listed in a CSV file if there is an output) and empty texts",
    },
    "--paper": {"action": "store_true", "help": "the settings of the paper's authors for these data"},
    "--columns": {
        "nargs": "+",
        "metavar": "NAME=COLUMN",
        "help": "columns of a table of texts: text, label, question, answer (default: the run's columns, or these "
        "names)",
    },
}
"""Arguments that several commands share."""
_DATA = ("--limit", "--allow-missing", "--skip-damaged")
_ON_RUN = ("run", "--columns", "--skip-damaged")


def command_parser() -> argparse.ArgumentParser:
    """The parser of all commands; a command is called as `parsed.do(parsed, settings)`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="lam", description="Make a retrieval network Bayesian.", epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"lam {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)

    def command(name: str, do: Any, *shared: str) -> Any:
        """Add a command with some shared arguments; returns the function that adds further arguments."""
        added = subparsers.add_parser(
            name, help=do.__doc__, description=do.__doc__, formatter_class=raw, allow_abbrev=False
        )
        added.set_defaults(do=do)
        added.add_argument("--quiet", action="store_true", help="show no progress")
        for argument in (*shared, *(() if do is commands.experiment else ("--plugin",))):
            added.add_argument(argument, **_SHARED[argument])
        return added.add_argument

    add = command("run", commands.run_or_print, *_DATA, "--paper")
    what = "DATA METHOD, such as digits laplace_posthoc; a YAML file; or the folder of a run, to continue it"
    add("config", nargs="+", help=what)
    add("--print", action="store_true", help="print all settings as YAML and stop")

    add = command("demo", commands.demo, *_DATA)
    add("config", metavar="demo", nargs="*", help=f"one of {', '.join(commands.DEMOS)} (default: digits)")

    add = command("sweep", commands.run_sweep, *_DATA, "--paper")
    add("config", nargs="+", help="DATA METHOD, such as digits laplace_posthoc, or a YAML file")
    add("--seeds", type=int, default=5, help="number of seeds, starting at the configuration's (default: 5)")

    add = command("compare", commands.compare_runs)
    add("runs", nargs="+", metavar="RUN", help="the folders of two to 24 finished runs")
    add("-o", "--output", default="comparison", help="the folder to write or replace (default: comparison)")

    add = command("embed", commands.embed, *_ON_RUN)
    add("folder", help="images, in class sub-folders or not; for a run on texts a table of them")
    add("-o", "--output", required=True, help="the .npz file to write; under torchrun, its name gets -i-of-n")
    add("--shard", metavar="i/n", help="only every n-th image, starting at the i-th (default: all)")

    add = command("index", commands.index, *_ON_RUN)
    add("folder", nargs="*", help="images, in class sub-folders or not; for a run on texts a table, as for --list")
    what = (
        "a table (CSV, JSON, .xlsx, Parquet) with a column path, or for texts the columns text, or question and "
        "answer; further columns, such as id and label, are optional"
    )
    add("--list", "--csv", dest="listed", metavar="FILE", help=what)
    add("--embeddings", metavar="FILE", nargs="+", help="the output of `lam embed`, all shards")
    add("--fuse", action="store_true", help="fuse the images of one id into one item; without ids, of one label")
    add("--skip-uncertain", action="store_true", help="leave out images whose kappa is below the flag")
    add("--factory", default="Flat", help="the FAISS type, such as Flat or HNSW32 (default: Flat)")

    add = command("search", commands.search_gallery, *_ON_RUN)
    add("image", nargs="*", help="image files, or folders of them")
    add("--text", action="append", default=[], help="a text, for a run on texts; may be repeated")
    add("--file", help="a table of texts: column text or question, or the run's column")
    add("-o", "--output", metavar="FILE", help="write .csv, one line per hit, or .json, one entry per image")
    add("-k", type=int, default=5, help="number of hits (default: 5)")

    add = command("calibrate", commands.calibrate, *_ON_RUN)
    least = "the rate of the last calibration, or else {0}; if the data do not allow {0}, the least possible rate"
    add("--target-far", type=float, help=f"bound on false accepts (default: {least.format(0.001)})")
    add("--target-ood", type=float, help=f"bound on false flags (default: {least.format(0.05)})")
    last = "the rate of the last calibration, or else"
    add("--target-miss", type=float, help=f"bound on misses of conformal sets (default: {last} 0.05)")
    what = f"bound on the share of wrong answers (default: {last} no bound; 0: no bound)"
    add("--target-wrong", type=float, help=what)
    what = (
        "abstain by this score: kappa, variance, norm, knn, mahalanobis, relative_mahalanobis, mahalanobis_knn, "
        "global_mahalanobis, radial_mahalanobis, layer_change, cosine, margin, mean_cosine, cosine_spread, votes, "
        "weighted_votes, kappa_epistemic, kappa_aleatoric, p_known, or combined, which joins several (default: the "
        "score of the last --flag, or else combined, unless a score is far better in cross-validation)"
    )
    add("--flag", metavar="SCORE", help=what)
    what = (
        "answer by this score: probability (that the first hit is right), or a single score, such as cosine "
        "(default: the score of the last --accept, or else probability, unless another is better in cross-validation)"
    )
    add("--accept", metavar="SCORE", help=what)
    what = (
        "search the run's gallery (index) or half of the held-out data (default: index; if the gallery holds places "
        "or none of the data's classes, half of the data replace as many of its items)"
    )
    add("--gallery", choices=("held-out", "index"), help=what)
    add("--folder", help="calibrate on fresh images, or a table of texts (default: the run's validation split)")
    add("--strangers", metavar="FOLDER", help="images or texts without a match, for a bound on their false accepts")
    what = "typical queries, known ones and strangers, to learn P(known) from; `live`: queries that `lam serve` kept"
    add("--unlabelled", metavar="FOLDER", help=what)
    what = "the share of future queries without a match, unless --unlabelled determines it (default: 0.5)"
    add("--share-of-strangers", type=float, help=what)
    add("--data-root", help="the folder of the run's data, if it has moved")
    add("--reference", type=int, default=5000, help="number of training items to compare with (default: 5000; 0: none)")

    add = command("experiment", commands.experiment)
    what = (
        "posterior-recovery, aninfonce-latents, augmentation-readout, varcon-accuracy, explicit-concentration, or "
        "a YAML file with such a name and settings"
    )
    add("config", metavar="NAME", nargs="+", help=what)
    add("-o", "--output", help="the folder to write (default: experiments/NAME)")

    add = command("backup", commands.back_up_run, "run")
    add("folder", help="the new folder, which `lam serve` opens")

    add = command("serve", commands.serve_run)
    add("runs", metavar="RUN", nargs="+", help="RUN or NAME=RUN, served under /runs/NAME/; the first at the root, too")
    add("--port", type=int, default=8000, help="(default: 8000)")
    add("--host", default="127.0.0.1", help="address; if other machines reach it, give a key (default: 127.0.0.1)")
    what = "keys with rights: lines such as `read KEY`, `write KEY` or `admin KEY`; $LAM_API_KEY has all rights"
    add("--keys", metavar="FILE", help=what)
    add("--access-log", metavar="FILE", help="log requests as lines of JSON; - for standard error (default: no log)")
    what = "mark slower requests in the log; without --access-log, log only these (default: none)"
    add("--slow", dest="slow_seconds", type=float, metavar="SECONDS", help=what)
    add("--traces", action="store_true", help="trace requests by OpenTelemetry, set up by `opentelemetry-instrument`")
    what = "let web pages of this origin, such as https://example.org, use the service; may be repeated"
    add("--cors-origin", dest="cors_origins", action="append", default=[], metavar="URL", help=what)
    add("--device", default="cpu", help="where the network runs (default: cpu)")
    add("--behind-proxy", action="store_true", help="all requests come from a proxy: no limit per address")
    what = "keep the embeddings of N random queries in the run's folder, to calibrate on (default: none)"
    add("--keep-queries", type=int, metavar="N", help=what)
    add("--drop-corrupt", action="store_true", help="delete altered items instead of stopping at the first")
    what = (
        "search exactly (flat), or faster along a graph that may miss a neighbour (hnsw; the start prints the "
        "share that it finds), or in a Milvus collection, such as milvus://HOST/COLLECTION (default: flat, or the type "
        "that `lam index --factory` named)"
    )
    add("--index", metavar="flat|hnsw|ADDRESS", action="append", default=[], help=what)
    what = "only read the run: another service on the same machine writes it, or its folder is read-only"
    add("--replica", action="store_true", help=what)
    return parser
