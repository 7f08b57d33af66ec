"""The command `lam`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lam import __version__

DEMO = "configs/digits/laplace_posthoc.yaml"
SHOWN = ("recall", "map", "ece", "ausc")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 for success, 1 for an error that is said in one line, 2 for wrong usage."""
    parsed, rest = _parser().parse_known_args(arguments)
    if rest and parsed.command not in ("run", "demo"):
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        parsed.do(parsed, rest)
    except (ValueError, OSError) as error:
        print(f"lam: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lam: stopped; start it again to continue", file=sys.stderr)
        return 130
    return 0


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Read a configuration and apply overrides such as `--training.epochs=5`.

    Raises:
        ValueError: saying what is wrong, and where.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    from lam.config import RunConfig, find_config

    parser = ArgumentParser(prog="lam run CONFIG", exit_on_error=False)
    parser.add_argument("--config", action="config", help=argparse.SUPPRESS)
    parser.add_class_arguments(RunConfig)
    try:
        parsed = parser.instantiate_classes(parser.parse_args([f"--config={find_config(path)}", *overrides]))
    except ArgumentError as error:
        raise ValueError(str(error)) from None
    return RunConfig(**{field.name: parsed[field.name] for field in fields(RunConfig)})


def _run(parsed: argparse.Namespace, overrides: list[str]) -> None:
    from lam.run import run

    result = run(load_config(parsed.config, overrides), progress=not parsed.quiet)
    for name, value in result.metrics.items():
        if name.partition("@")[0] in SHOWN or name.startswith(("auroc", "auprc")):
            print(f"{name:<32}{'undefined' if value is None else format(value, '.4f'):>10}")
    print(f"report: {result.report}")


def _embed(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam import gallery

    images, embeddings = gallery.embed_folder(gallery.open_run(parsed.run), parsed.folder, progress=not parsed.quiet)
    gallery.save_embeddings(parsed.output, images, embeddings)
    print(f"{len(embeddings)} embeddings: {parsed.output}")


def _index(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam import gallery

    count = gallery.index_folder(parsed.run, parsed.folder, factory=parsed.factory, progress=not parsed.quiet)
    print(f"{count} images: {Path(parsed.run) / 'index'}")


def _search(parsed: argparse.Namespace, _: list[str]) -> None:
    from lam import gallery

    found = gallery.search(parsed.run, parsed.image, k=parsed.k)
    query = found.query
    print(f"query: kappa {float(query.kappa[0]):.4g}, variance {float(query.variance[0]):.4g}")
    print(f"{'score':>8} {'kappa':>10}  label  path")
    for score, kappa, item in zip(found.hits.scores[0], found.hits.kappa[0], found.items, strict=True):
        print(f"{float(score):8.4f} {float(kappa):10.4g}  {item['label']}  {item['path']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lam", description="Make a retrieval network Bayesian.")
    parser.add_argument("--version", action="version", version=f"lam {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, do: Any, help: str, **options: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, **options)
        added.add_argument("--quiet", action="store_true", help="show no progress")
        added.set_defaults(do=do)
        return added

    overriding = "Any setting can be given as an option, such as --training.epochs=5 or --output=DIR."
    command("run", _run, "Run a configuration.", epilog=overriding).add_argument("config", help="a YAML file")
    demo = command("demo", _run, "Run the embedded digits data set.", epilog=overriding)
    demo.set_defaults(config=DEMO)
    embed = command("embed", _embed, "Embed the images of a folder.")
    embed.add_argument("run", help="the folder of a run")
    embed.add_argument("folder", help="images, in class sub-folders or not")
    embed.add_argument("-o", "--output", required=True, help="the .npz file to write")
    index = command("index", _index, "Replace a run's index by the images of a folder.")
    index.add_argument("run", help="the folder of a run")
    index.add_argument("folder", help="images, in class sub-folders or not")
    index.add_argument("--factory", default="Flat", help="the FAISS type, such as Flat or HNSW32")
    search = command("search", _search, "Search a run's index for an image.")
    search.add_argument("run", help="the folder of a run")
    search.add_argument("image", help="an image file")
    search.add_argument("-k", type=int, default=5, help="how many hits")
    return parser


if __name__ == "__main__":
    sys.exit(main())
