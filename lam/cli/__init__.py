"""The command `lam`: parses the command line, calls the command, and prints each warning and error in one line."""

import errno
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from lam.cli.commands import complain
from lam.cli.parser import RUNS, command_parser
from lam.service.hangups import block_hangups
from lam.utils.notes import Note

__all__ = ["main"]
CONFIGURED = (*RUNS, "experiment")  # the commands that take settings as options, such as `--training.epochs=5`
SEVERAL = {"index": "folder", "search": "image", "compare": "runs", "serve": "runs"}
"""The positional arguments that may be repeated, by command."""
FLAGS = ("--quiet", "--help", "--allow-missing", "--skip-damaged", "--paper", "--print")  # the options without a value
STOPPED, READER_GONE = 130, 141  # the shell's exit statuses for SIGINT and SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 (error), 130 (Ctrl-C) or 141 (broken pipe). Wrong usage exits with 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: a terminal may lack letters of a file name
    try:
        try:
            words = list(sys.argv[1:] if arguments is None else arguments)
            with block_hangups() if words[:1] == ["serve"] else nullcontext():  # its imports take a second
                return _execute(words)
        finally:
            print(end="", flush=True)  # here a broken pipe can still be told from other errors
    except OSError as error:  # stdout cannot be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
        if isinstance(error, BrokenPipeError):
            return READER_GONE
        complain(f"the output cannot be written ({error}): send it elsewhere")
        return 1


def _execute(arguments: list[str]) -> int:
    takes_settings = bool(arguments) and arguments[0] in CONFIGURED
    parsed, rest = command_parser().parse_known_args(_attach_values(arguments) if takes_settings else arguments)
    if (name := "config" if takes_settings else SEVERAL.get(parsed.command)) is not None:
        further = [word for word in rest if not word.startswith("-")]  # argparse leaves out words after an option
        setattr(parsed, name, [*getattr(parsed, name), *further])
        rest = [word for word in rest if word.startswith("-")]
    if takes_settings:  # argparse reads a setting with a space in it as a positional argument
        rest += [word for word in parsed.config if word.startswith("--")]
        parsed.config = [word for word in parsed.config if not word.startswith("--")]
        if not parsed.config and parsed.command != "demo":
            command_parser().error("say what to run, such as digits laplace_posthoc")
    if rest and not takes_settings:
        command_parser().error(f"unrecognized arguments: {' '.join(rest)}")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, category, *_, **__: complain(
            f"{'note' if issubclass(category, Note) else 'warning'}: {message}"
        )
        try:
            if "run" in parsed:
                from lam.runs.folder import run_at

                parsed.run = str(run_at(Path(parsed.run)))
            if "plugin" in parsed:
                from lam.runs.plugins import load_file, load_installed

                load_installed()  # before a run is opened
                for file in parsed.plugin:
                    load_file(file)
            parsed.do(parsed, rest)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = ": free some space and start it again" if is_full else ""
            complain(" ".join(line.strip() for line in str(error).splitlines()) + advice)
            return 1
        except KeyboardInterrupt:
            complain("stopped; start it again to continue")
            return STOPPED
    return 0


def _attach_values(arguments: list[str]) -> list[str]:
    """Join `--name value` to `--name=value`, because argparse would read the value as a positional argument."""
    joined: list[str] = []
    for argument in arguments:
        last = joined[-1] if joined else ""
        lacks_value = last.startswith("--") and "=" not in last and last not in FLAGS
        if lacks_value and not argument.startswith("--"):
            joined[-1] = f"{last}={argument}"
        else:
            joined.append(argument)
    return joined
