"""How a setting is declared: `setting()` makes a field of a frozen dataclass that knows its help text, bounds and spellings.

The dataclasses of this package are the only place where a setting is declared. Its field gives the flag, the environment variable, the key
in the configuration file, the check, what `penstock serve` passes to its children, and the reference.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from penstock.wire.errors import ConfigError

VARIABLE_PREFIX = "PENSTOCK_"
SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_KEY = "setting"
# Messages between processes, and the database of responses, have no larger whole numbers.
_TOO_LARGE = 2**63
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The arguments of `setting()`.

    `name` is the setting's public name; by default, the field's name. `unset` says in words what None means. `scale` is how many of the
    field's units are one `unit`: 2**20 for a field in bytes that is given in MiB. `parse` turns text into a value. It raises ValueError, or
    ConfigError for a message that must not show the text; with `is_whole` it turns one text into the whole tuple. `hint` ends the message
    of a failed check. A secret is never read from the file and never shown. `without_password` makes a text that can be shown. With
    `is_joined`, the values of flag and variable are joined. Only `engines` have the setting; by default, all engines of its class. Without
    `is_forwarded`, `serve` itself sets the value for its children.
    """

    help: str
    name: str = ""
    group: str = ""
    unit: str = ""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    unset: str = ""
    scale: int = 1
    parse: Callable[[str], Any] | None = None
    is_whole: bool = False
    hint: str = ""
    is_secret: bool = False
    without_password: Callable[[str], str] | None = None
    is_joined: bool = False
    has_flag: bool = True
    is_forwarded: bool = True


def setting(default: Any, help: str, **details: Any) -> Any:  # noqa: A002
    """A field of a settings dataclass. `details` are those of `Declaration`."""
    declaration = Declaration(help=help, **details)
    return field(default=default, repr=not declaration.is_secret, metadata={_KEY: declaration})


seconds = partial(setting, unit="SECONDS", minimum=0)
count = partial(setting, unit="N", minimum=0)


@dataclass(frozen=True)
class Setting:
    """A declared setting. `defaults` are by engine, under "" if all engines have the same."""

    name: str
    kind: type
    is_list: bool
    group: str
    declared: Declaration
    defaults: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{VARIABLE_PREFIX}{self.name.upper()}"

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that have the setting. Empty: all engines, or it is not about the engine."""
        return () if "" in self.defaults else tuple(self.defaults)

    def default_for(self, engine: str) -> Any:
        return self.defaults.get(engine, self.defaults.get(""))

    def read(self, given: object, where: str) -> Any:
        """The checked value. `where` is the flag, variable or key that has it. Raises ConfigError, which names `where`."""
        if isinstance(given, list | tuple):
            return tuple(self._read_one(_text(each), where) for each in given)
        value = self._read_one(_text(given), where)
        return (value,) if self.is_list else value

    def shown(self, value: Any) -> str:
        """A value as a flag would have it."""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int | float):
            value = value / self.declared.scale if self.declared.scale != 1 else value
            return f"{value:.12g}" if isinstance(value, float) else str(value)
        return str(value)

    def is_private(self, text: str) -> bool:
        """Whether other users may not read it. The letters of a host may be shown in another case."""
        without_password = self.declared.without_password
        return self.declared.is_secret or (without_password is not None and without_password(text).lower() != text.lower())

    def _read_one(self, text: str, where: str) -> Any:
        declared = self.declared
        try:
            value = self._converted(text)
        except ValueError as error:
            self._refuse(where, text, str(error))
        if declared.choices and value not in declared.choices:
            self._refuse(where, text, f"expected one of {', '.join(declared.choices)}")
        if self.kind in (int, float):
            if declared.maximum is None and value * declared.scale >= _TOO_LARGE:
                self._refuse(where, text, f"expected less than {_TOO_LARGE // declared.scale:,}")
            if not self._is_within(value):
                self._refuse(where, text, f"expected {self.bounds}")
        return round(value * declared.scale) if declared.scale != 1 else value

    def _converted(self, text: str) -> Any:
        if self.declared.parse is not None:
            return self.declared.parse(text)
        if "\0" in text or (self.kind is not Path and _has_surrogate(text)):
            # The first cannot be handed to a child process, the second cannot be sent to another process.
            raise ValueError("expected UTF-8 without NUL")
        if self.kind is Path and not text:
            # It would be the current directory.
            raise ValueError("expected a path")
        try:
            return SWITCH[text.lower()] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            raise ValueError(f"expected {_KINDS.get(self.kind, self.kind.__name__)}") from None

    def _is_within(self, value: float) -> bool:
        """NaN is not. Nor is a size above 0 that is less than one byte."""
        declared = self.declared
        return (
            (declared.minimum is None or value >= declared.minimum)
            and (declared.above is None or (value > declared.above and (declared.scale == 1 or value * declared.scale >= 1)))
            and (declared.maximum is None or value <= declared.maximum)
            and math.isfinite(value)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words, "" if there are none."""
        declared = self.declared
        if declared.maximum is not None:
            if declared.minimum is None:
                return f"more than {declared.above:,}, at most {declared.maximum:,}"
            return f"{declared.minimum:,} to {declared.maximum:,}" if declared.minimum != declared.maximum else f"{declared.maximum:,}"
        if declared.minimum is not None:
            return f"{declared.minimum:,} or more"
        return "" if declared.above is None else f"more than {declared.above:,}"

    def _refuse(self, where: str, text: str, expected: str) -> typing.NoReturn:
        is_number = self.kind in (int, float) and text.strip()
        shown = "" if self.declared.is_secret else f" is {text if is_number else repr(text)}"
        hint = f"; {self.declared.hint}" if self.declared.hint else ""
        raise ConfigError(f"{where}{shown}: {expected}{hint}")


def settings_of(settings_class: type) -> dict[str, Setting]:
    """Every setting of a settings class and of the settings classes in it, by name, in the order of their declaration."""
    found: dict[str, Setting] = {}
    for owner, each, hint in _declared(settings_class):
        declared: Declaration = each.metadata[_KEY]
        kind, is_list = _kind_of(hint)
        kind = float if declared.scale != 1 else kind
        engines = declared.engines or getattr(owner, "ENGINES", ("",))
        name = declared.name or each.name
        group = declared.group or getattr(owner, "GROUP", "")
        before = found[name].defaults if name in found else {}
        defaults = {**before, **dict.fromkeys(engines, each.default)}
        found[name] = (
            dataclasses.replace(found[name], defaults=defaults)
            if before
            else Setting(name, kind, is_list and not declared.is_whole, group, declared, defaults)
        )
    return found


def build(settings_class: type[Settings], values: Mapping[str, Any]) -> Settings:
    """An object of a settings class, with the values by the names of settings. What has no value keeps its default."""
    arguments: dict[str, Any] = {}
    hints = typing.get_type_hints(settings_class)
    for each in dataclasses.fields(settings_class):  # type: ignore[arg-type]
        if _KEY in each.metadata:
            name = each.metadata[_KEY].name or each.name
            if name in values:
                arguments[each.name] = values[name]
        elif dataclasses.is_dataclass(hints[each.name]):
            arguments[each.name] = build(typing.cast(type, hints[each.name]), values)
    return settings_class(**arguments)


def without_password(url: str) -> str:
    """The URL without user, password and query. `***` for a URL that cannot be parsed safely."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
    except ValueError:
        return "***"
    if not parts.scheme or "@" in parts.path + parts.query + parts.fragment or not (host or parts.scheme == "unix"):
        return "***"
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{host}{port}{parts.path}"


def narrowed(source: Any, settings_class: type[Settings], **changes: Any) -> Settings:
    """An object of another settings class, with the fields that both have, and the changes."""
    names = {each.name for each in dataclasses.fields(source)} & {each.name for each in dataclasses.fields(settings_class)}  # type: ignore[arg-type]
    return settings_class(**{name: getattr(source, name) for name in names} | changes)


def _declared(settings_class: type) -> Iterator[tuple[type, dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(settings_class)
    for each in dataclasses.fields(settings_class):
        hint = hints[each.name]
        if _KEY in each.metadata:
            yield settings_class, each, hint
        elif dataclasses.is_dataclass(hint):
            yield from _declared(typing.cast(type, hint))


def _kind_of(hint: Any) -> tuple[type, bool]:
    """The type of one value, and whether there can be several."""
    if isinstance(hint, types.UnionType):
        hint = next(each for each in typing.get_args(hint) if each is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return _kind_of(typing.get_args(hint)[0])[0], True
    if hint in (int, float, bool, Path):
        return hint, False
    return str, False


def _has_surrogate(text: str) -> bool:
    """Python has bytes of the command line that are not UTF-8 as surrogates."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _text(given: object) -> str:
    return str(given).lower() if isinstance(given, bool) else str(given)
