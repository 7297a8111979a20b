"""Where the value of a setting comes from: a flag, else the environment, else the configuration file, else its default."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.config.setting import VARIABLE_PREFIX, Setting, build, settings_of
from penstock.wire.errors import ConfigError

Source = Literal["flag", "environment", "file"]
Settings = TypeVar("Settings")

CONFIG_VARIABLE = "PENSTOCK_CONFIG"
GROUPS = {
    "engine": "The model, what generates its tokens, and how much it may use.",
    "embedded engine": "",
    "simulator": "",
    "vLLM and SGLang": "`penstock doctor` tells which versions work and what each can do.",
    "engine behind HTTP": "",
    "server": "",
    "limits": "",
    "images": "Images come in requests as data URLs, or the server fetches them.",
    "sessions": "",
    "routing": "",
    "resumable streams": "",
    "stored responses": "",
    "API keys": "Without --key-file and without an API key, anyone who reaches the port can use the server.",
    "cluster": "For front ends and workers that are started separately.",
}
"""The groups of settings, in the order of `--help` and the reference."""
OTHER_VARIABLES = {CONFIG_VARIABLE, "PENSTOCK_URL", "PENSTOCK_ENGINES", "PENSTOCK_WORKER_PROCESS"}
"""Variables that are not settings: for clients and tests."""


@dataclass(frozen=True)
class Given:
    """A value that is not a default. `where` is the flag as it was written, the variable, or the key and its file."""

    value: Any = field(repr=False)
    source: Source
    where: str
    texts: tuple[str, ...] = field(repr=False)

    def is_private(self, setting: Setting) -> bool:
        return any(setting.is_private(text) for text in self.texts)


@dataclass(frozen=True)
class Resolved:
    """The settings of a command, and the values that were given for them."""

    settings: Mapping[str, Setting]
    given: Mapping[str, Given]

    def build(self, settings_class: type[Settings]) -> Settings:
        return build(settings_class, {name: each.value for name, each in self.given.items()})

    def value(self, name: str) -> Any:
        """The effective value."""
        if name in self.given:
            return self.given[name].value
        engine = "" if name == "engine" or "engine" not in self.settings else self.value("engine")
        return self.settings[name].default_for(engine)

    def check_engine(self) -> None:
        """Raises ConfigError for a value that the chosen engine would ignore."""
        if "engine" not in self.settings:
            return
        engine = self.value("engine")
        for name, each in self.given.items():
            engines = self.settings[name].engines
            if engines and engine not in engines and each.value not in self.settings[name].defaults.values():
                raise ConfigError(f"{each.where} is for --engine {' or '.join(engines)}, not for {engine}")

    def arguments_for(self, settings_class: type) -> tuple[str, ...]:
        """The flags with which a child process gets the same values. Secrets and passwords are not among them."""
        words = []
        for name, setting in self._forwarded(settings_class).items():
            if self.given[name].is_private(setting):
                continue
            if setting.kind is bool:
                words.append(setting.flag if self.given[name].value else f"--no-{setting.flag[2:]}")
            else:
                words += [f"{setting.flag}={text}" for text in self.given[name].texts]
        return tuple(words)

    def environment_for(self, settings_class: type, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a child process: without our variables, because it gets flags; with the secrets that it needs."""
        ours = {CONFIG_VARIABLE, *(each.variable for each in (*self.settings.values(), *settings_of(settings_class).values()))}
        secrets = {
            setting.variable: ",".join(self.given[name].texts)
            for name, setting in self._forwarded(settings_class).items()
            if self.given[name].is_private(setting)
        }
        return {name: value for name, value in environment.items() if name not in ours} | secrets

    def _forwarded(self, settings_class: type) -> dict[str, Setting]:
        """The settings of a child process that have a value here."""
        return {name: each for name, each in settings_of(settings_class).items() if name in self.given and each.declared.is_forwarded}


def settings_for(settings_class: type, *, is_parent: bool = False) -> dict[str, Setting]:
    """The settings of a command. A parent has no flags for settings that it chooses for its children."""
    return {name: each for name, each in settings_of(settings_class).items() if each.declared.is_forwarded or not is_parent}


def resolve(
    settings: Mapping[str, Setting], flags: argparse.Namespace, environment: Mapping[str, str], file: Mapping[str, Any], file_name: str = ""
) -> Resolved:
    """The value of every setting that is given. `file` is what `read_file` returned. Raises ConfigError."""
    given: dict[str, Given] = {}
    for name, setting in settings.items():
        found = [*_from_flag(setting, flags), *_from_environment(setting, environment)]
        if name in file:
            where = f"{name} in {file_name}"
            found.append(Given(setting.read(file[name], where), "file", where, _texts(file[name])))
        if len(found) > 1 and setting.declared.is_joined:
            value, texts = sum((each.value for each in found), ()), sum((each.texts for each in found), ())
            found = [Given(value, found[0].source, f"{found[0].where} and {found[1].where}", texts)]
        if found:
            given[name] = found[0]
    return Resolved(settings, given)


def _from_flag(setting: Setting, flags: argparse.Namespace) -> list[Given]:
    if not hasattr(flags, setting.name):
        return []
    where, texts = getattr(flags, setting.name)
    return [
        Given(setting.read(texts if setting.is_list else texts[-1], where), "flag", where, tuple(texts if setting.is_list else texts[-1:]))
    ]


def _from_environment(setting: Setting, environment: Mapping[str, str]) -> list[Given]:
    """An empty variable is no value. For a list it is an error, because an empty list of API keys would open the server."""
    text = environment.get(setting.variable)
    if text is None or (not text and not setting.is_list):
        return []
    texts = tuple(part for each in text.split(",") if (part := each.strip())) if setting.is_list else (text,)
    if not texts:
        raise ConfigError(f"{setting.variable} is set but empty: expected values separated by commas; unset it for none")
    return [Given(setting.read(texts if setting.is_list else text, setting.variable), "environment", setting.variable, texts)]


def read_file(path: Path, known: Mapping[str, Setting]) -> dict[str, Any]:
    """The keys of a configuration file by the names of settings, `-` or `_` alike. Raises ConfigError, for unknown keys too."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from error
    found = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in known:
            nearest = nearest_name(name, known)
            raise ConfigError(f"{key} in {path} is not a setting" + (f"; did you mean {nearest}?" if nearest else ""))
        if known[name].declared.is_secret:
            raise ConfigError(f"{key} in {path} is a secret: put it into the environment as {known[name].variable}")
        if isinstance(value, dict) or (isinstance(value, list) and not known[name].is_list):
            raise ConfigError(f"{key} in {path} has several values: expected one")
        if name in found:
            raise ConfigError(f"{key} in {path} is given twice")
        found[name] = value
    return found


def nearest_name(name: str, known: Mapping[str, Setting]) -> str:
    """The setting with the nearest spelling, "" if none is near."""
    spellings = {alias.lstrip("-").replace("-", "_"): each.name for each in known.values() for alias in (each.flag, *each.declared.aliases)}
    return next((spellings[each] for each in difflib.get_close_matches(name, spellings, 1)), "")


def unknown_variables(environment: Iterable[str], known: Mapping[str, Setting]) -> list[str]:
    """Warnings for variables that look like a misspelled setting. Others with our prefix may belong to somebody else."""
    ours = {setting.variable for setting in known.values()} | OTHER_VARIABLES
    warnings = []
    for name in sorted(set(environment) - ours):
        nearest = difflib.get_close_matches(name, ours, 1, 0.8) if name.startswith(VARIABLE_PREFIX) else []
        warnings += [f"{name} in the environment is not a setting; did you mean {near}?" for near in nearest]
    return warnings


# Flags.


class StoreText(argparse.Action):
    """Keeps the flag as it was written and all its texts; they are read and checked later."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002
        spelled = option_string or ""
        text = values if self.nargs is None else str(not spelled.startswith("--no-")).lower()
        _, before = getattr(namespace, self.dest, ("", []))
        setattr(namespace, self.dest, (spelled, [*before, text]))


def add_flags(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    """A flag for every setting, by groups."""
    found = [setting.group for setting in settings.values()]
    for group in sorted(dict.fromkeys(found), key=lambda name: [*GROUPS, *found].index(name)):
        members = [each for each in settings.values() if each.group == group]
        place = parser.add_argument_group(group, GROUPS.get(group) or None)
        for each in members:
            if each.declared.has_flag:
                _add_flag(place, each)


def _add_flag(group: Any, setting: Setting) -> None:
    names = [*(alias for alias in setting.declared.aliases if not alias.startswith("--")), setting.flag]
    names += [alias for alias in setting.declared.aliases if alias.startswith("--")]
    text = f"{setting.declared.help} (default: {described_default(setting)})".replace("%", "%%")
    details: dict[str, Any] = {"dest": setting.name, "action": StoreText, "default": argparse.SUPPRESS, "help": text}
    if setting.kind is bool:
        group.add_argument(*names, f"--no-{setting.flag[2:]}", nargs=0, **details)
    else:
        choices = setting.declared.choices
        group.add_argument(*names, metavar=f"{{{','.join(choices)}}}" if choices else setting.declared.unit or "TEXT", **details)


def described_default(setting: Setting) -> str:
    """The default in words, or the default of each engine."""
    by_text: dict[str, list[str]] = {}
    for engine, value in setting.defaults.items():
        by_text.setdefault(_default_text(setting, value), []).append(engine)
    if len(by_text) == 1:
        return next(iter(by_text))
    return "; ".join(f"{text} for {', '.join(engines)}" for text, engines in by_text.items())


def _default_text(setting: Setting, value: Any) -> str:
    if value is None or value in ((), ""):
        return setting.declared.unset or "none"
    return setting.shown(value)


def _texts(value: Any) -> tuple[str, ...]:
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    return tuple(str(each).lower() if isinstance(each, bool) else str(each) for each in values)
