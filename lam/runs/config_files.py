"""A configuration from YAML files and overrides.

    configs/methods/METHOD.yaml  a method's settings on any data, if they differ from its defaults
    configs/data/DATA.yaml       a data set, its network and training
    configs/paper/DATA.yaml      the authors' settings on a data set

`lam run DATA METHOD` reads these files in order, the last one only with `--paper`. Later files override earlier ones.
In a file, the section `methods` holds settings for each method, which override the other settings of the file.
With `--paper`, the section `methods` of the authors' file replaces the data set's section.

The section `networks` holds settings for each network. The first installed network of this section replaces the file's
`network`, unless an override, or a file that extends this one, names a network or weights.

A file may extend a configuration (`extends: digits hib`) or a file in the same folder (`extends: base.yaml`). The file
then holds only the differences. Sections and mappings are merged setting by setting; lists and values are replaced.
If a later file names another method, the options of the earlier method are dropped.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from lam import datasets, methods, models
from lam.datasets.texts import FORMS
from lam.runs.config import COMMAND, METHOD, RunConfig, named_method
from lam.runs.folder import CONFIG
from lam.utils.files import read_yaml
from lam.utils.settings import align, describe, parse_setting, unknown_setting

EXTENDS, SECTIONS, NETWORKS, PAPER = "extends", "methods", "networks", "--paper"
SHIPPED = Path(str(files("lam") / "configs"))


def load_config(
    source: str | Path | Sequence[str], overrides: Sequence[str] = (), *, allow_missing: bool = False
) -> RunConfig:
    """Read a configuration and apply overrides, such as `--training.epochs=5`; errors name the wrong setting or file.

    Args:
        source: arguments of `lam run`, in one string or several: `digits hib`, `fashionmnist hib --paper`; a YAML file
            and optionally a method; or the folder of a run, to continue that run.
        allow_missing: whether to set `allow_missing` in every data set and OOD set that has this option.

    Example:
        >>> config = load_config("digits hib", ["--method.n_samples=4", "--training.epochs=5"])
        >>> config.method.n_samples, config.training.epochs, config.network.name
        (4, 5, 'convnet8')
    """
    words = _words(source)
    settings = [_parse_override(override) for override in overrides]
    chosen = _set({METHOD: {}}, settings)
    method, network = named_method(chosen[METHOD])[0], _network_of(chosen.get("network"))
    content = _set(_content(words, method, network=network), settings)
    try:
        config = RunConfig.parsed(content)
    except ValueError as error:
        raise ValueError(f"{words[0]}: {error}" if Path(words[0]).is_file() else str(error)) from None
    if config.output is None and _is_run(words):
        config = replace(config, output=words[0])
    return _allowing_missing(config) if allow_missing else config


def _parse_override(override: str) -> tuple[str, Any]:
    """The name and the value of `--NAME=VALUE`; a single OOD set becomes a list."""
    name, value = parse_setting(override, RunConfig, COMMAND)
    return name, [_ood_set(value)] if name == "data.ood" and isinstance(value, str) else value


def _ood_set(name: str) -> dict[str, str]:
    """Settings of an OOD set from the name of a data set, a folder, or a file of texts."""
    is_texts = name.lower().endswith(FORMS)
    if not is_texts and "/" not in name and not Path(name).is_dir():
        return {"name": name}
    title = re.sub(r"[^\w.+-]+", "-", Path(name).absolute().name)
    return {"name": "texts" if is_texts else "folder", "root": name, "title": title}


def _network_of(section: Any) -> str | None:
    """The network named in a section; "" if the section names only weights; None if it names neither."""
    if not isinstance(section, Mapping):
        return None
    return section.get("name") or ("" if section.get("weights") else None)


def _set(content: dict[str, Any], settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Set settings by dotted name, in place; missing sections are created."""
    for name, value in settings:
        if name == METHOD:
            method, options = named_method(value)
            content[METHOD] |= options if method is None else {"name": method, **options}
            continue
        *above, last = name.split(".")
        section = content
        for part in above:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ValueError(f"there is no setting {name}: {part} is not a section")
        section[last] = value
    return content


def _allowing_missing(config: RunConfig) -> RunConfig:
    """The configuration with `allow_missing` set in every data set and OOD set that has this option."""
    data, parameters = config.data, {name: signature(load).parameters for name, load in datasets.DATASETS.items()}

    def allowing(part: Any) -> Any:
        has_it = "allow_missing" in parameters.get(part.name, ())
        return replace(part, options={**part.options, "allow_missing": True}) if has_it else part

    allowed = replace(allowing(data), ood=[allowing(each) for each in data.ood])
    if allowed == data:
        raise ValueError(f"--allow-missing has no effect: the files of {data.name} are not named in a list")
    return replace(config, data=allowed)


def _words(source: str | Path | Sequence[str]) -> list[str]:
    if isinstance(source, Path):
        return [str(source)]
    if isinstance(source, str):
        return [source] if Path(source).exists() else source.split() or [source]
    return list(source)


def _is_run(words: Sequence[str]) -> bool:
    return len(words) == 1 and (Path(words[0]) / CONFIG).is_file()


def shipped(kind: Literal["data", "methods", "paper"]) -> list[str]:
    """Names of the shipped files of a kind."""
    return sorted(path.stem for path in (SHIPPED / kind).glob("*.yaml"))


def _content(
    words: Sequence[str], method: str | None = None, extending: tuple[Path, ...] = (), *, network: str | None = None
) -> dict[str, Any]:
    """The settings for `words`, the arguments of `lam run`; `network` chooses a section of `networks`."""
    where, *rest = [word for word in words if word != PAPER] or [""]
    if len(rest) > 1:
        raise ValueError(unknown_setting(rest[1], COMMAND))
    method = method or (rest[0] if rest else None)
    if method is not None:
        methods.find(method)
    path = SHIPPED / "data" / f"{where}.yaml"
    if where not in shipped("data") or _is_run(words):
        if PAPER in words:
            raise ValueError(f"{PAPER} is for {', '.join(shipped('paper'))}, got {where}")
        return _of_file(_file_of(where), method, extending, network)
    if method is None:
        raise ValueError(f"which method on {where}? `lam run {where} METHOD`; METHOD is {', '.join(methods.METHODS)}")
    if PAPER not in words:
        return _of_file(path, method, extending, network)
    if where not in shipped("paper"):
        raise ValueError(f"the authors have no settings for {where}; they have {', '.join(shipped('paper'))}")
    common, _ = _read(path)
    settings, sections = _read(SHIPPED / "paper" / f"{where}.yaml")
    if method not in sections:
        raise ValueError(f"the authors have no settings for {method} on {where}; they have {', '.join(sections)}")
    return _merge(_of_method(method), common, settings, sections[method])


def _file_of(where: str) -> Path:
    """The path of a configuration file, or of the configuration in a run's folder."""
    path = Path(where)
    if where and path.is_dir():
        if (path / CONFIG).is_file():
            return path / CONFIG
        hint = f"for a folder of your data give `lam run folder METHOD --data.root={where}`"
        raise ValueError(f"{path} is not a run of lam: it has no {CONFIG}; {hint}")
    if path.is_file():
        return path
    raise ValueError(
        f"there is no configuration {where}: give DATA METHOD, a YAML file or the folder of a run; DATA is "
        f"{', '.join(shipped('data'))}; METHOD is {', '.join(methods.METHODS)}"
    )


def _of_file(path: Path, method: str | None, extending: tuple[Path, ...], network: str | None) -> dict[str, Any]:
    """The settings of a file, merged over the configuration that the file extends, or over its method's file."""
    settings, sections = _read(path, network)
    network = _network_of(settings.get("network")) if network is None else network
    extends = settings.pop(EXTENDS, None)
    method = method or named_method(settings.get(METHOD))[0]
    if extends is None:
        base = {} if method is None or METHOD in settings else _of_method(method)
    else:
        base = _extended(path, extends, method, (*extending, path.resolve()), network)
    merged = _merge(base, settings)
    method = method or merged[METHOD].get("name")
    return merged if method is None else _merge(merged, sections.get(method, {}), {METHOD: method})


def _extended(
    path: Path, extends: Any, method: str | None, chain: tuple[Path, ...], network: str | None
) -> dict[str, Any]:
    if not isinstance(extends, str):
        raise ValueError(f"{path}: {EXTENDS} must be one configuration, such as `digits hib`, got {extends!r}")
    beside = path.parent / extends
    if beside.is_file() and beside.resolve() in chain:
        raise ValueError(f"{path}: {EXTENDS}: {extends} extends this file: files must not extend each other")
    try:
        return _content([str(beside)] if beside.is_file() else extends.split(), method, chain, network=network)
    except ValueError as error:
        raise ValueError(f"{path}: {EXTENDS}: {error}") from None


def _of_method(name: str) -> dict[str, Any]:
    """Settings of a method on any data; most methods have no file."""
    path = SHIPPED / "methods" / f"{name}.yaml"
    return _merge({METHOD: name}, _read(path)[0] if path.is_file() else {})


def _read(path: Path, network: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a file, merged with its section for the network; and its sections for methods."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a configuration: it must hold settings, such as `margin: 0.7`")
    methods_of_it, networks = (_sections(path, content, name) for name in (SECTIONS, NETWORKS))
    if network is None:
        network = _installed(path, networks)
    own = {} if network not in networks else _merge_mappings({"network": {"name": network}}, networks[network])
    return _merge_mappings(content, own), methods_of_it


def _sections(path: Path, content: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Remove the section `name` from the content of a file; return its settings for each method or network."""
    sections = content.pop(name, {})
    if not isinstance(sections, dict) or not all(isinstance(of, dict | None) for of in sections.values()):
        kind = name.removesuffix("s")
        raise ValueError(f"{path}: {name} must hold a section of settings for each {kind}, got {sections!r}")
    return {of: settings or {} for of, settings in sections.items()}


def _installed(path: Path, networks: Mapping[str, Any]) -> str | None:
    """The first installed network; a warning says how to install the networks before it."""
    for name in networks:
        if (reason := models.why_missing(name)) is None:
            return name
        warnings.warn(
            f"{path.stem}: {reason}; the network trained instead knows much less of photographs", stacklevel=2
        )
    return None


def _merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings; later ones override earlier ones."""
    merged: dict[str, Any] = {METHOD: {}}
    for layer in layers:
        name, options = named_method(layer.get(METHOD))
        other = name is not None and merged[METHOD].get("name") not in (None, name)
        method = {**({} if other else merged[METHOD]), **({} if name is None else {"name": name}), **options}
        merged = {**_merge_mappings(merged, layer), METHOD: method}
    return merged


def _merge_mappings(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **above}
    for name in base.keys() & above.keys():
        if isinstance(base[name], Mapping) and isinstance(above[name], Mapping):
            merged[name] = _merge_mappings(base[name], above[name])
    return merged


def describe_settings() -> str:
    """Lines of help: each setting of a run, its default, its meaning and, if they are few, its allowed values."""
    rows = [
        (f"{METHOD}.name", f"required  ({', '.join(methods.METHODS)}): source of the uncertainty"),
        *describe(RunConfig),
    ]
    for name, method in methods.METHODS.items():
        if options := describe(method, f"{METHOD}."):
            rows += [(f"of {name}:", ""), *options]
    return align(rows)
