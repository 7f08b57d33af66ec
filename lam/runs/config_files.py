"""A configuration from a YAML file and settings given beside it, with errors that a user can act on.

A file may begin where another ends: with `extends: deterministic.yaml` it says only what differs from that file, which
is looked for beside it and then among those that ship, and which may extend another itself. Sections and mappings are
joined setting by setting; whatever else both files give, lists too, is that of the file that extends.

What the settings are is `lam.runs.config`.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from lam import datasets
from lam.runs.config import OodConfig, RunConfig
from lam.runs.folder import CONFIG

EXTENDS = "extends"

_EXAMPLE = "configs/digits/laplace_posthoc.yaml"
_LIST = "`lam run --help` lists the settings"


def load_config(path: str | Path, overrides: Sequence[str] = (), *, allow_missing: bool = False) -> RunConfig:
    """Read a configuration and apply overrides such as `--training.epochs=5`.

    Args:
        path: a YAML file, one that lam ships (`configs/digits/laplace_posthoc.yaml`), or the folder of a run, which is
            then continued.
        overrides: settings by name.
        allow_missing: set the option of that name in every data set and OOD set that has one.

    Raises:
        ValueError: saying what is wrong, and where.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    found = find_config(path)
    content = yaml.safe_dump(_content(found))
    parser = ArgumentParser(prog="lam run", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(RunConfig)
    try:
        settings = parser.parse_args([f"--config={content}", *map(_as_list, overrides)])
        _check_sections(settings)
        parsed = parser.instantiate(settings)
    except ArgumentError as error:
        raise ValueError(_explain(str(error), found)) from None
    config = RunConfig(**{field.name: parsed[field.name] for field in fields(RunConfig)})
    _read_nested(config, overrides)
    if config.output is None and Path(path).is_dir():
        config.output = str(path)
    if allow_missing:
        _allow_missing(config)
    return config


def _as_list(override: str) -> str:
    """`--data.ood=DIR` and `--data.ood=NAME` stand for a list of that one set, a folder being called by its name."""
    name, _, value = override.partition("=")
    if name != "--data.ood" or not (value and isinstance(yaml.safe_load(value), str)):
        return override
    found = {"name": value}
    if "/" in value or Path(value).is_dir():
        title = re.sub(r"[^\w.+-]+", "-", Path(value).absolute().name)
        found = {"name": "folder", "root": value, "title": title}
    return f"{name}={yaml.safe_dump([found], default_flow_style=True, width=math.inf).strip()}"


def _read_nested(config: RunConfig, overrides: Sequence[str]) -> None:
    """Options below options, such as `--data.options.preprocessing.size=32`, as YAML: the parser leaves them text."""
    for override in overrides:
        if found := re.fullmatch(r"--(data|network)\.options\.(.+)\.([^.=]+)=(.*)", override, re.DOTALL):
            options = getattr(config, found[1]).options
            for part in found[2].split("."):
                options = options[part]
            options[found[3]] = yaml.safe_load(found[4])


def _allow_missing(config: RunConfig) -> None:
    having = [part for part in (config.data, *config.data.ood) if _takes(part.name, "allow_missing")]
    if not having:
        raise ValueError(f"--allow-missing is of no use: the files of {config.data.name} are not named in a list")
    for part in having:
        part.options = {**part.options, "allow_missing": True}


def _takes(name: str, option: str) -> bool:
    loader = datasets.DATASETS.get(name)
    return loader is not None and option in inspect.signature(loader).parameters


def _check_sections(settings: Any) -> None:
    """Make every section that checks itself once, so that an error says which it is in."""
    for section in fields(RunConfig):
        kind: Any = section.type
        if hasattr(kind, "__post_init__"):
            try:
                kind(**settings[section.name].as_dict())
            except ValueError as error:
                raise ValueError(f"{section.name}.{error}") from None


def find_config(path: str | Path) -> Path:
    """Find a configuration file: as given, in the folder of a run, or among those that lam ships.

    Raises:
        ValueError: naming the ones that ship, where there is none.
    """
    path = Path(path)
    if path.is_dir():
        if (path / CONFIG).is_file():
            return path / CONFIG
        raise ValueError(f"{path} is no run of lam: it has no {CONFIG}")
    if path.is_file():
        return path
    shipped = Path(str(files("lam") / "configs"))
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    inside = shipped.joinpath(*parts)
    if inside.is_file():
        return inside
    if inside.parent.is_dir() and inside.parent != shipped:
        known = ", ".join(sorted(f"configs/{found.relative_to(shipped)}" for found in inside.parent.glob("*.yaml")))
    else:
        folders = sorted(found.name for found in shipped.iterdir() if found.is_dir())
        known = f"configs/DATA/METHOD.yaml, such as {_EXAMPLE}; DATA is {', '.join(folders)}"
    raise ValueError(f"there is no configuration {path}; lam ships {known}")


def describe_settings() -> str:
    """List every setting with its default and, where they are few, the values allowed: one a line."""
    settings = dict(_settings(RunConfig))
    width = max(map(len, settings))
    return "\n".join(f"  {name:<{width}}  {_default(setting)}" for name, setting in settings.items())


def _settings(record: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    for found in fields(record):
        if is_dataclass(found.type):
            yield from _settings(found.type, f"{prefix}{found.name}.")
        else:
            yield f"{prefix}{found.name}", found


def _default(setting: Field[Any]) -> str:
    if setting.default is not MISSING:
        value = "none" if setting.default is None else str(setting.default)
    else:
        value = "required" if setting.default_factory is MISSING else "empty"
    return value + (f"  ({', '.join(get_args(setting.type))})" if get_origin(setting.type) is Literal else "")


def _content(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file together with those that it extends."""
    chain = (*extending, path.resolve())
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no configuration: it must hold settings, such as `margin: 0.7`")
    if EXTENDS not in content:
        return content
    name = content.pop(EXTENDS)
    if not isinstance(name, str):
        raise ValueError(f"{path}: {EXTENDS} must be the name of one file, got {name!r}")
    try:
        base = path.parent / name if (path.parent / name).is_file() else find_config(name)
    except ValueError as error:
        raise ValueError(f"{path}: {EXTENDS}: {error}") from None
    if base.resolve() in chain:
        raise ValueError(f"{path}: {EXTENDS}: {name} extends this file itself")
    return _joined(_content(base, chain), content)


def _joined(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**base, **above}
    for name in base.keys() & above.keys():
        if isinstance(base[name], Mapping) and isinstance(above[name], Mapping):
            joined[name] = _joined(base[name], above[name])
    return joined


def _explain(message: str, path: Path) -> str:
    """Say in one line, in a user's words, what jsonargparse found."""
    value = re.findall(r"(?:Got|Given) value:(.*)", message)
    message = " ".join(message.split())
    key = ".".join(dict.fromkeys(re.findall(r'Parser key "(.*?)"', message)))
    within = f"{key}." if key else ""
    if found := re.search(r"[Uu]nrecognized arguments: (.*)", message):
        return f"there is no setting {found[1]}; {_LIST}"
    if found := re.search(r"Group '(.*)' does not accept option '(.*)'", message):
        return f"{path}: there is no setting {found[1]}.{found[2]}; {_LIST}"
    if found := re.search(r"(?:Key|Option) '(.*?)' is not (?:expected|accepted)", message):
        return f"there is no setting {within}{found[1]}; {_LIST}"
    if found := re.search(r"arguments are required: (.*)", message):
        return f"{path} lacks {within}{found[1]}"
    if found := re.search(r"argument --(\S+): expected one argument", message):
        return f"{found[1]} needs a value, such as --{found[1]}=..."
    settings = dict([*_settings(RunConfig), *_settings(OodConfig, "data.ood.")])
    if value and key in settings:
        return f"{key} must be {_in_words(settings[key].type)}, got {value[-1].strip() or 'nothing'}"
    if key in {field.name for field in fields(RunConfig)}:
        return f"{key} is a section: give its settings by name, such as --{key}.NAME=VALUE; {_LIST}"
    return f"{path}: {message}"


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if NoneType in get_args(kind):
        return f"{_in_words(get_args(kind)[0])} or null"
    if get_origin(kind) is Sequence:
        return "a list"
    words: dict[Any, str] = {bool: "true or false", float: "a number", int: "a whole number", str: "text"}
    words |= {dict: "a mapping", list: "a list of mappings"}
    return words[get_origin(kind) or kind]
