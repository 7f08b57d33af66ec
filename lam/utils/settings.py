"""Settings of the command line, `--NAME=VALUE`, and the dataclasses that they fill."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

_LIKE = 0.75  # least similarity of a suggested name
_ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
"""Names and text of an entry in a section of a docstring, such as `Attributes:`."""


def settings_of(record: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """The dotted name and the field of each setting of a dataclass, and of its sections, the nested dataclasses."""
    for setting in fields(record):
        if is_dataclass(setting.type):
            yield from settings_of(setting.type, f"{prefix}{setting.name}.")
        else:
            yield f"{prefix}{setting.name}", setting


def parse_setting(argument: str, record: Any, command: str) -> tuple[str, Any]:
    """Name and value of `--NAME=VALUE`, a setting of the dataclass `record`; errors name the command.

    The value is parsed as YAML, unless the setting is of type text.
    """
    name, equals, value = argument.removeprefix("--").partition("=")
    if not argument.startswith("--"):
        raise ValueError(unknown_setting(argument, command))
    if not equals:
        raise ValueError(f"{name} needs a value, such as --{name}=...")
    setting = dict(settings_of(record)).get(name)
    if setting is not None and setting.type in (str, str | None) and value not in ("", "null"):
        return name, value
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: {value} is not valid YAML: {' '.join(str(error).split())}") from None


def unknown_setting(name: str, command: str, known: Sequence[str] = ()) -> str:
    """Error message for a setting that does not exist, with the most similar one of the known settings."""
    near = get_close_matches(name, known, 1, _LIKE) or [each for each in known if each.endswith(f".{name}")]
    suggestion = f"; did you mean {near[0]}?" if near else ""
    return f"there is no setting {name}; `{command} --help` lists the settings{suggestion}"


def validated(record: Any, settings: Mapping[str, Any], command: str, *, prefix: str = "") -> Any:
    """A dataclass filled from settings by name, with mappings as sections; a leading `~/` becomes the home folder.

    Raises:
        ValueError: naming, with the prefix, every setting that is unknown, missing, of another type or out of range.
    """
    from pydantic import TypeAdapter, ValidationError  # a tenth of a second to import

    try:
        return TypeAdapter(record).validate_python(_expand_home(settings))
    except ValidationError as error:
        problems = [_describe_problem(each, record, command, prefix) for each in error.errors(include_url=False)]
    raise ValueError("; ".join(problems))


def describe(record: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Name of each setting, with its default as a user can give it, the values of a choice, and its meaning."""
    rows, meanings = list[tuple[str, str]](), _meanings(record)
    for setting in fields(record):
        name = f"{prefix}{setting.name}"
        if is_dataclass(setting.type):
            rows += describe(setting.type, f"{name}.")
        else:
            meaning = meanings.get(setting.name)
            rows.append((name, _describe_default(setting) + (f": {meaning}" if meaning else "")))
    return rows


def align(rows: Sequence[tuple[str, str]]) -> str:
    """Names and descriptions as the lines of a help text."""
    width = max(len(name) for name, _ in rows)
    further = " " * (width + 4)
    lines = (f"  {name:<{width}}  {description}".rstrip() for name, description in rows)
    return "\n".join(textwrap.fill(line, 120, subsequent_indent=further, break_on_hyphens=False) for line in lines)


def _meanings(record: type) -> dict[str, str]:
    """The first sentence on each attribute in the docstrings of a class and of its bases."""
    found = dict[str, str]()
    for each in reversed(record.__mro__):
        for names, text in _ATTRIBUTE.findall(inspect.cleandoc(each.__doc__ or "")):
            meaning = re.split(r"[.;](?: |$)", " ".join(text.split()))[0].replace("`", "")
            found |= dict.fromkeys(names.split(", "), meaning)
    return found


def _describe_default(setting: Field[Any]) -> str:
    if setting.default is not MISSING:
        value = "null" if setting.default is None else str(setting.default)
    else:
        value = "required" if setting.default_factory is MISSING else "empty"
    known = get_args(setting.type) if get_origin(setting.type) is Literal else setting.metadata.get("known", ())
    return value + (f"  ({', '.join(map(str, known))})" if known else "")


def _expand_home(settings: Any) -> Any:
    """Expand a leading `~/` in every text, because a shell does not expand it after an equals sign."""
    if isinstance(settings, Mapping):
        return {name: _expand_home(value) for name, value in settings.items()}
    if isinstance(settings, list):
        return [_expand_home(value) for value in settings]
    return str(Path(settings).expanduser()) if isinstance(settings, str) and settings.startswith("~/") else settings


def _describe_problem(problem: Mapping[str, Any], record: Any, command: str, prefix: str) -> str:
    """The message for a problem that the record's own check or pydantic found."""
    kind, place = problem["type"], prefix + ".".join(map(str, problem["loc"]))
    if kind == "unexpected_keyword_argument":
        return unknown_setting(place, command, [name for name, _ in settings_of(record, prefix)])
    if kind == "value_error":
        section = place.removesuffix(".")
        return f"{section}.{problem['ctx']['error']}" if section else str(problem["ctx"]["error"])
    sections: dict[str, Any] = {f"{prefix}{each.name}": each.type for each in fields(record)}
    if kind == "dataclass_type" and place in sections:
        first = fields(sections[place])[0].name
        return f"{place} is a section: give one of its settings, such as {place}.{first}, got {problem['input']!r}"
    return f"{place}: {problem['msg']}" + ("" if kind == "missing" else f", got {problem['input']!r}")
