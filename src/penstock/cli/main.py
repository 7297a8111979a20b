"""The `penstock` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from penstock import __version__
from penstock.cli.bench import add_bench_parser
from penstock.cli.doctor import add_doctor_parser, run_doctor
from penstock.cli.keys import add_key_parser, run_key
from penstock.cluster.supervise import EXIT_CONFIG
from penstock.config.commands import COMMANDS
from penstock.config.reference import effective, reference
from penstock.config.resolve import CONFIG_VARIABLE, Resolved, add_flags, nearest_name, read_file, resolve, settings_for, unknown_variables
from penstock.config.setting import settings_of
from penstock.wire.errors import ConfigError

log = logging.getLogger(__name__)

HELP = {
    "serve": "the whole stack on this machine: workers and a front end, restarted when they die",
    "worker": "one worker, which runs the engine; front ends connect to it",
    "frontend": "one front end, which serves the API and connects to workers",
}
TAKES_MODEL = ("serve", "worker")
MODEL = "MODEL"
EPILOG = (
    "Every flag is also an environment variable (--max-sessions: PENSTOCK_MAX_SESSIONS) and a key of the configuration file "
    "(max_sessions). Flags win over variables, variables over the file. `penstock config` shows the result."
)
KNOWN = {name: each for settings_class in COMMANDS.values() for name, each in settings_of(settings_class).items()}
"""Every setting of every command."""


@dataclass(frozen=True)
class Loaded:
    """A command with its settings, checked."""

    command: str
    settings: Any
    resolved: Resolved


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left, as `head` does. Nothing more can be written, not even what Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    if words[:1] == ["config"] and not {"-h", "--help"} & set(words):
        return _print_config(words[1:])
    parser = make_parser()
    parsed, rest = parser.parse_known_args(words)
    if parsed.command in COMMANDS:
        return _run_server(_load(parsed, rest, os.environ))
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    match parsed.command:
        case "bench":
            # Its libraries are heavy, and only it needs them.
            from penstock.cli.bench import run_bench

            return run_bench(parsed)
        case "key":
            return run_key(parsed)
        case _:
            return run_doctor(parsed)


def _run_server(loaded: Loaded) -> int:
    if loaded.command == "serve" or not loaded.settings.exit_with_parent:
        # The children of `serve` have its environment, and it has warned already.
        for warning in unknown_variables(os.environ, KNOWN):
            log.warning("%s", warning)
    # Wiring imports everything; `--help` and mistakes do not wait for it.
    from penstock.cli import compose

    match loaded.command:
        case "worker":
            return uvloop.run(compose.run_worker(loaded.settings))
        case "frontend":
            return uvloop.run(compose.run_front_end(loaded.settings))
        case _:
            return uvloop.run(compose.run_serve(loaded.settings, loaded.resolved))


def _print_config(words: list[str]) -> int:
    if words == ["--reference"]:
        print(reference(), end="", flush=True)
        return 0
    if words[:1] == [] or words[0] not in COMMANDS:
        words = ["serve", *words]
    resolved = load(words, os.environ).resolved
    model = resolved.given.get("model")
    if model is not None and model.where == MODEL and model.texts[0] in COMMANDS:
        raise ConfigError(f"the command comes first: penstock config {model.texts[0]} …")
    print(effective(resolved), flush=True)
    for warning in unknown_variables(os.environ, KNOWN):
        print(f"penstock: {warning}", file=sys.stderr)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="An LLM serving stack with the OpenAI and Anthropic APIs.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, settings_class in COMMANDS.items():
        usage = f"penstock {name} [MODEL] [flags]" if name in TAKES_MODEL else f"penstock {name} [flags]"
        about = f"Runs {HELP[name]}." + (" MODEL is the same as --model MODEL." if name in TAKES_MODEL else "")
        command = commands.add_parser(name, help=HELP[name], usage=usage, description=about, epilog=EPILOG, allow_abbrev=False)
        command.add_argument(
            "--config", type=Path, metavar="FILE", help=f"configuration file, in TOML (default: {CONFIG_VARIABLE}, or none)"
        )
        add_flags(command, settings_for(settings_class, is_parent=name == "serve"))
    commands.add_parser(
        "config",
        help="the effective settings of a command, and where each comes from",
        usage="penstock config [serve|worker|frontend] [flags] | penstock config --reference",
        description="Prints the effective settings as a configuration file, and where each comes from. --reference: describes all of them.",
    )
    add_bench_parser(commands)
    add_key_parser(commands)
    add_doctor_parser(commands)
    return parser


def load(words: Sequence[str], environment: Mapping[str, str]) -> Loaded:
    """The settings of `serve`, `worker` or `frontend`, from flags, environment and file. Raises ConfigError."""
    parsed, rest = make_parser().parse_known_args(words)
    return _load(parsed, rest, environment)


def _load(parsed: argparse.Namespace, rest: Sequence[str], environment: Mapping[str, str]) -> Loaded:
    command = parsed.command
    _take_rest(parsed, rest)
    settings = settings_for(COMMANDS[command], is_parent=command == "serve")
    path = parsed.config or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    file = {} if path is None else read_file(path, KNOWN)
    resolved = resolve(settings, parsed, environment, file, str(path))
    resolved.check_engine()
    built: Any = resolved.build(COMMANDS[command])
    built.check()
    _check_parts(command, built)
    return Loaded(command, built, resolved)


def _take_rest(parsed: argparse.Namespace, rest: Sequence[str]) -> None:
    """Takes MODEL. Raises ConfigError for any other word that is not a flag of the command."""
    for word in rest:
        if word.startswith("-"):
            raise ConfigError(f"{word.partition('=')[0]} is not a flag of `penstock {parsed.command}`{_nearest_flag(word)}")
    if not rest:
        return
    if parsed.command not in TAKES_MODEL or len(rest) > 1 or hasattr(parsed, "model"):
        raise ConfigError(
            f"{rest[-1]!r} is one argument too many: expected flags" + (" and one MODEL" if parsed.command in TAKES_MODEL else "")
        )
    parsed.model = (MODEL, [*rest])


def _nearest_flag(word: str) -> str:
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    if name in KNOWN and not KNOWN[name].declared.has_flag:
        return f"; it is a secret: put it into the environment as {KNOWN[name].variable}"
    takers = [
        f"`penstock {command}`"
        for command, settings_class in COMMANDS.items()
        if name in settings_for(settings_class, is_parent=command == "serve")
    ]
    nearest = nearest_name(name, KNOWN)
    return f"; it is a flag of {' and '.join(takers)}" if takers else f"; did you mean {KNOWN[nearest].flag}?" if nearest else ""


def _check_parts(command: str, settings: Any) -> None:
    """Checks that only the parts themselves can make, before a child process starts. Raises ConfigError."""
    if command != "frontend":
        from penstock.text.formats.make import check_formats

        parsers = (settings.worker if command == "serve" else settings).parsers
        check_formats(parsers.tool, parsers.reasoning)
    if command != "worker":
        from penstock.api.auth.keys import Keyring
        from penstock.metrics.frontend import Tally

        Keyring((settings.front_end if command == "serve" else settings).keys, Tally())
