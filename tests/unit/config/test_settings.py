"""Settings are declared once: the flag, the variable, the file's key, the check, the forwarding and the reference follow."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import KNOWN, load, main
from penstock.config import reference
from penstock.config.commands import COMMANDS, FrontEndSettings, WorkerSettings
from penstock.config.front_end import Limits, RouterSettings
from penstock.config.resolve import OTHER_VARIABLES, Resolved, add_flags, read_file, resolve, unknown_variables
from penstock.config.setting import build, narrowed, setting, settings_of
from penstock.wire.errors import ConfigError

SOURCE = Path(__file__).parents[3] / "src" / "penstock"
REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"
WORKER = ["worker", "--listen=unix:/w"]
FRONT_END = ["frontend", "--worker=unix:/w"]
SERVE = ["serve", "--engine=simulator"]


def config_file(folder: Path, text: str) -> list[str]:
    path = folder / "penstock.toml"
    path.write_text(text)
    return ["--config", str(path)]


def resolved_by(settings_class: type, words: list[str], environment: Mapping[str, str], file: Mapping[str, Any]) -> Resolved:
    parser = argparse.ArgumentParser()
    add_flags(parser, settings_of(settings_class))
    return resolve(settings_of(settings_class), parser.parse_args(words), environment, file, "penstock.toml")


# One place.


@dataclass(frozen=True)
class WithOneMore(Limits):
    max_dams: int = setting(3, "dams on a river", unit="N", minimum=1, maximum=9)


def test_a_setting_that_is_added_in_one_place_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, settings_of(WithOneMore))
    assert "--max-dams N" in parser.format_help()
    assert "dams on a river (default: 3)" in parser.format_help()
    for words, environment, file, value in (
        ([], {}, {}, 3),
        ([], {}, {"max_dams": 4}, 4),
        ([], {"PENSTOCK_MAX_DAMS": "5"}, {"max_dams": 4}, 5),
        (["--max-dams=6"], {"PENSTOCK_MAX_DAMS": "5"}, {"max_dams": 4}, 6),
    ):
        resolved = resolved_by(WithOneMore, words, environment, file)
        assert resolved.build(WithOneMore) == WithOneMore(max_dams=value)
        assert resolved.arguments_for(WithOneMore) == (() if value == 3 else (f"--max-dams={value}",))
    for words, environment, file, where in (
        ([], {}, {"max_dams": 0}, "max_dams in penstock.toml"),
        ([], {"PENSTOCK_MAX_DAMS": "0"}, {}, "PENSTOCK_MAX_DAMS"),
        (["--max-dams=0"], {}, {}, "--max-dams"),
    ):
        with pytest.raises(ConfigError, match=f"^{where} is 0: expected 1 to 9$"):
            resolved_by(WithOneMore, words, environment, file)
    monkeypatch.setitem(COMMANDS, "serve", WithOneMore)
    assert "| `--max-dams` | 3 | 1 to 9 | Dams on a river. Commands: serve. |" in reference.reference()


def _defaults(path: Path) -> list[tuple[str, str, object]]:
    """Every default in a file that is a value: the name, where it stands, and the value."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            fields = [line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
            found += [(ast.unparse(line.target), node.name, _value(line.value)) for line in fields]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) :] if node.args.defaults else []
            pairs = [*zip(arguments, node.args.defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
            found += [(argument.arg, f"{node.name}()", _value(default)) for argument, default in pairs]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument") and isinstance(node.args[0], ast.Constant):
            flag = str(node.args[0].value).lstrip("-").replace("-", "_")
            found += [(flag, "add_argument()", _value(word.value)) for word in node.keywords if word.arg == "default"]
    return [each for each in found if each[2] not in (None, False, "")]


def _value(node: ast.expr | None) -> object:
    """The literal, also that of `setting(…)` and the like; None where there is none."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Call(args=[first, *_]) | ast.BinOp(left=first):
            return _value(first)
        case _:
            return None


def test_no_default_stands_twice() -> None:
    """Neither in a second dataclass, nor in a signature, nor in `add_argument`."""
    others = {"name", "workers", "role"}  # common words, with other meanings elsewhere
    names = {name for command in COMMANDS.values() for name in settings_of(command)} - others
    places: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name, place, _ in _defaults(path):
            if name in names:
                places.setdefault(name, []).append(f"{path.relative_to(SOURCE)} {place}")
    assert places["max_sessions"] == ["config/engines.py SessionSettings"]
    assert {name: found for name, found in places.items() if len(found) > 1} == {
        "max_batch": ["config/engines.py EmbeddedSettings", "config/engines.py SimulatorConfig"],  # each engine has its own
        "grace": ["config/commands.py ProcessSettings", "config/front_end.py ResumeLimits"],  # the second is --resume-grace
    }


# Precedence.


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = config_file(tmp_path, "port = 1\nmax-queued = 2\nworker_wait = 3\n")
    environment = {"PENSTOCK_PORT": "4", "PENSTOCK_MAX_QUEUED": "5"}
    loaded = load([*FRONT_END, *file, "--port=6"], environment)
    assert (loaded.settings.port, loaded.settings.dispatch.max_queued, loaded.settings.dispatch.worker_wait) == (6, 5, 3.0)
    assert loaded.settings.limits == Limits()
    sources = {name: (each.source, each.where) for name, each in loaded.resolved.given.items()}
    assert sources["port"] == ("flag", "--port")
    assert sources["max_queued"] == ("environment", "PENSTOCK_MAX_QUEUED")
    assert sources["worker_wait"] == ("file", f"worker_wait in {file[1]}")
    assert "host" not in sources


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = config_file(tmp_path, "port = 1")[1]
    assert load(FRONT_END, {"PENSTOCK_CONFIG": path}).settings.port == 1
    other = tmp_path / "other.toml"
    other.write_text("port = 2")
    assert load([*FRONT_END, "--config", str(other)], {"PENSTOCK_CONFIG": path}).settings.port == 2


def test_one_file_serves_all_commands(tmp_path: Path) -> None:
    file = config_file(tmp_path, 'engine = "simulator"\nstep_ms = 5\nport = 1\nworkers = 2\nname = "x"\n')
    assert load([*WORKER, *file], {}).settings.simulator.step_ms == 5.0
    assert load([*FRONT_END, *file], {}).settings.port == 1
    assert load(["serve", *file], {}).settings.workers == 2


def test_switches_and_lists(tmp_path: Path) -> None:
    file = config_file(tmp_path, 'reproducible = true\ncors_origin = ["https://a", "https://b"]\n')
    served = load(["serve", *file], {}).settings
    assert served.worker.embedded.reproducible
    assert served.front_end.cors_origins == ("https://a", "https://b")
    assert not load(["serve", *file, "--no-reproducible"], {}).settings.worker.embedded.reproducible
    assert load(["serve"], {"PENSTOCK_REPRODUCIBLE": "yes"}).settings.worker.embedded.reproducible
    assert load(["serve"], {"PENSTOCK_CORS_ORIGIN": "https://a, *"}).settings.front_end.cors_origins == ("https://a", "*")
    assert load(["serve"], {"PENSTOCK_SERVED_NAME": ""}).settings.worker.served_name is None, "an empty variable is no value"


def test_the_last_of_two_flags_wins() -> None:
    loaded = load([*FRONT_END, "--port=1", "--port=2"], {})
    assert loaded.settings.port == 2
    assert loaded.resolved.arguments_for(FrontEndSettings) == ("--port=2",)


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_a_variable_without_keys_does_not_open_the_server(text: str) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_API_KEY is set but empty: "):
        load(FRONT_END, {"PENSTOCK_API_KEY": text})
    assert load(FRONT_END, {"PENSTOCK_PORT": ""}).settings.port == 8000, "one value that is empty is no value"


def test_units() -> None:
    loaded = load([*FRONT_END, "--resume-memory=0.5", "--transcript-memory=1"], {})
    assert (loaded.settings.resume.memory, loaded.settings.transcript_memory) == (2**19, 2**20)
    assert {"--resume-memory=0.5", "--transcript-memory=1"} <= set(loaded.resolved.arguments_for(FrontEndSettings))


@pytest.mark.parametrize("words", [["model.gguf"], ["--port=1", "model.gguf", "--workers=2"], ["--model", "model.gguf"]])
def test_the_model_is_a_flag_or_an_argument(words: list[str]) -> None:
    assert load(["serve", *words], {}).settings.worker.model == Path("model.gguf")


def test_spellings_of_other_servers() -> None:
    words = ["--max-model-len=99", "--served-model-name=m", "--gpu-memory-utilization=0.9", "--tensor-parallel-size=1"]
    worker = load([*WORKER, *words], {}).settings
    assert (worker.context_length, worker.served_name, worker.embedded.gpu_memory_utilization) == (99, "m", 0.9)
    with pytest.raises(ConfigError, match=r"^--max-model-len is 0: expected 1 or more$"):
        load([*WORKER, "--max-model-len=0"], {})
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size is 2: expected 1; .* use --engine-args"):
        load([*WORKER, "--tensor-parallel-size=2"], {})


# Checks.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port=x"], "--port is x: expected a whole number"),
        (["--port=1.5"], "--port is 1.5: expected a whole number"),
        (["--port=65536"], "--port is 65536: expected 0 to 65,535"),
        (["--stall-timeout=0"], "--stall-timeout is 0: expected more than 0"),
        (["--worker-wait=-1"], "--worker-wait is -1: expected 0 or more"),
        (["--worker-wait=inf"], "--worker-wait is inf: expected less than 9,223,372,036,854,775,808"),
        (["--load-weight=nan"], "--load-weight is nan: expected 0 or more"),
        (["--router=fastest"], "--router is 'fastest': expected one of kv, round-robin, least-loaded, random"),
        (["--router-overload-factor=0.5"], "--router-overload-factor is 0.5: expected 1 or more"),
        (["--worker=nowhere"], "--worker is 'nowhere': expected unix:/path or tcp://host:port"),
        (["--response-store="], "--response-store is '': expected a path, or none"),
        (["--response-store-size=0.5"], "--response-store-size is 0.5: expected 1 or more"),
        ([f"--max-queued=-{10**400}"], f"--max-queued is -{10**400}: expected 0 or more"),
        ([f"--max-queued={2**63}"], f"--max-queued is {2**63}: expected less than {2**63:,}"),
        (["--resume-memory=1e305"], "--resume-memory is 1e305: expected less than 8,796,093,022,208"),
        (["--store=a\0b"], "--store is 'a\\x00b': expected UTF-8 without NUL"),
        (["--name=a\udcff"], "--name is 'a\\udcff': expected UTF-8 without NUL"),
        (["--key-file="], "--key-file is '': expected a path"),
        (["--resume-memory=1e-9"], "--resume-memory is 1e-9: expected more than 0"),
    ],
)
def test_a_value_that_cannot_work_is_named(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*FRONT_END, *words], {})
    assert str(caught.value) == says


def test_the_name_is_that_of_the_place(tmp_path: Path) -> None:
    file = config_file(tmp_path, "port = 70000")
    with pytest.raises(ConfigError, match=rf"^port in {file[1]} is 70000: expected 0 to 65,535$"):
        load([*FRONT_END, *file], {})
    with pytest.raises(ConfigError, match=r"^PENSTOCK_PORT is tcp://10\.0\.0\.1:80: expected a whole number$"):
        load(FRONT_END, {"PENSTOCK_PORT": "tcp://10.0.0.1:80"})
    with pytest.raises(ConfigError, match=r"^PENSTOCK_DEVICE is for --engine embedded, not for simulator$"):
        load([*WORKER, "--engine=simulator"], {"PENSTOCK_DEVICE": "cpu"})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "--max-sesions=3"], "--max-sesions is not a flag of `penstock serve`; did you mean --max-sessions?"),
        (["serve", "--max-model-length", "3"], "--max-model-length is not a flag of `penstock serve`; did you mean --context-length?"),
        (["serve", "--xyzzy"], "--xyzzy is not a flag of `penstock serve`"),
        (
            [*FRONT_END, "--device=cpu"],
            "--device is not a flag of `penstock frontend`; it is a flag of `penstock serve` and `penstock worker`",
        ),
        (["serve", "--listen=unix:/x"], "--listen is not a flag of `penstock serve`; it is a flag of `penstock worker`"),
        (
            ["serve", "--link-secret=geheim"],
            "--link-secret is not a flag of `penstock serve`; it is a secret: put it into the environment as PENSTOCK_LINK_SECRET",
        ),
        (["serve", "a", "b"], "'b' is one argument too many: expected flags and one MODEL"),
        (["serve", "a", "--model=b"], "'a' is one argument too many: expected flags and one MODEL"),
        ([*FRONT_END, "a"], "'a' is one argument too many: expected flags"),
        (["worker"], "a worker needs --listen: expected unix:/path or tcp://host:port"),
        (["frontend"], "a front end needs workers: give --worker ADDRESS, or --store where they register"),
        (
            ["frontend", "--worker=tcp://10.0.0.1:7000"],
            "--worker tcp://10.0.0.1:7000: a link over TCP needs PENSTOCK_LINK_SECRET or TLS (--link-tls-cert)",
        ),
        (
            [*WORKER, "--link-tls-key=k.pem"],
            "--link-tls-key k.pem needs --link-tls-cert and --link-tls-ca: both ends of a link show a certificate and check the other's",
        ),
        ([*SERVE, "--prefill-workers=2"], "--prefill-workers 2 needs --decode-workers as well: one computes prompts for the other"),
        ([*SERVE, "--decode-workers=1"], "--decode-workers 1 needs --prefill-workers as well: one computes prompts for the other"),
        (
            ["serve", "--decode-workers=1", "--prefill-workers=1", "--engine=http", "--url=http://e", "--model=m"],
            "--prefill-workers 1 and --engine http: an engine behind HTTP moves no KV, so nobody could continue its prompts",
        ),
        (
            [*SERVE, "--workers=2", "--decode-workers=1", "--prefill-workers=1"],
            "--workers 2 and --prefill-workers 1: give --workers alone, or --prefill-workers and --decode-workers",
        ),
        (
            ["serve", "--encode-workers=1", "--engine=vllm", "--model=m"],
            "--encode-workers 1 and --engine vllm: this engine encodes images itself",
        ),
        (
            ["worker", "--listen=unix:w", "--role=encode", "--engine=sglang", "--model=m"],
            "--role encode and --engine sglang: this engine encodes images itself. Expected --engine embedded or simulator",
        ),
        ([*WORKER, "--role=decod"], "--role is 'decod': expected one of aggregated, prefill, decode, encode"),
    ],
)
def test_words_that_are_no_settings(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(words, {})
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("words", "open_to_others"),
    [
        (FRONT_END, []),
        (["frontend", "--worker=tcp://127.0.0.1:7000", "--store=redis://localhost"], []),
        ([*FRONT_END, "--host=0.0.0.0"], ["HTTP on --host 0.0.0.0"]),
        (["frontend", "--worker=tcp://10.0.0.1:7000", "--worker=tcp://localhost:1"], ["the links to tcp://10.0.0.1:7000:"]),
        (["frontend", "--worker=tcp://10.0.0.1:7000", "--link-tls-cert=a", "--link-tls-key=b", "--link-tls-ca=c"], []),
        (["frontend", "--store=redis://:geheim@redis.example/1"], ["--store redis://***@redis.example/1: use rediss://"]),
        (["frontend", "--store=rediss://redis.example"], []),
        (["worker", "--listen=tcp://0.0.0.0:7000"], ["the links of --listen tcp://0.0.0.0:7000:"]),
        (["worker", "--listen=tcp://0.0.0.0:7000", "--link-tls-cert=a", "--link-tls-key=b", "--link-tls-ca=c"], []),
    ],
)
def test_what_others_can_read_is_said(words: list[str], open_to_others: list[str]) -> None:
    found = load(words, {"PENSTOCK_LINK_SECRET": "s"}).settings.unencrypted()
    assert len(found) == len(open_to_others)
    for line, part in zip(found, open_to_others, strict=True):
        assert part in line
        assert "geheim" not in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_sesions = 3", "max_sesions in FILE is not a setting; did you mean max_sessions?"),
        ("max_model_len = 3", "max_model_len in FILE is not a setting; did you mean context_length?"),
        ("[router]\npolicy = 3", "router in FILE has several values: expected one"),
        ("port = [1, 2]", "port in FILE has several values: expected one"),
        ('api_key = "geheim"', "api_key in FILE is a secret: put it into the environment as PENSTOCK_API_KEY"),
        ('link-secret = "geheim"', "link-secret in FILE is a secret: put it into the environment as PENSTOCK_LINK_SECRET"),
        ("max-queued = 1\nmax_queued = 2", "max_queued in FILE is given twice"),
        ("port = ", "configuration file FILE: Invalid value (at end of document)"),
    ],
)
def test_a_file_that_cannot_work(tmp_path: Path, text: str, says: str) -> None:
    file = config_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load([*FRONT_END, *file], {})
    assert str(caught.value) == says.replace("FILE", file[1])
    with pytest.raises(ConfigError, match="configuration file /nowhere: No such file or directory"):
        read_file(Path("/nowhere"), KNOWN)


def test_variables_that_look_like_a_setting() -> None:
    found = unknown_variables(["PENSTOCK_MAX_SESIONS", "PENSTOCK_SERVICE_HOST", "PORT", "PENSTOCK_PORT", *OTHER_VARIABLES], KNOWN)
    assert found == ["PENSTOCK_MAX_SESIONS in the environment is not a setting; did you mean PENSTOCK_MAX_SESSIONS?"]


# Children.


def test_children_see_the_values_of_their_parent(tmp_path: Path) -> None:
    file = config_file(tmp_path, 'step_ms = 2.5\nmax_queued = 7\ncors_origin = ["https://a", "https://b"]\nreproducible = false\n')
    environment = {"PENSTOCK_GRACE": "3", "PENSTOCK_STORE": "redis://h:1/0", "PENSTOCK_CONFIG": "/nowhere", "HOME": "/h"}
    loaded = load([*SERVE, *file, "--workers=2", "--port=0"], environment)
    worker, front_end = loaded.resolved.arguments_for(WorkerSettings), loaded.resolved.arguments_for(FrontEndSettings)
    assert set(worker) == {"--engine=simulator", "--step-ms=2.5", "--grace=3", "--no-reproducible"}
    assert set(front_end) == {
        "--port=0",
        "--max-queued=7",
        "--grace=3",
        "--cors-origin=https://a",
        "--cors-origin=https://b",
        "--store=redis://h:1/0",
    }, "a worker of `serve` is not for other machines"
    given = loaded.resolved.environment_for(WorkerSettings, environment)
    assert given == {"HOME": "/h"}, "children read no variable and no file"
    for settings_class in (WorkerSettings, FrontEndSettings):
        alone = {each.variable: "of a worker or front end that is started alone" for each in settings_of(settings_class).values()}
        assert loaded.resolved.environment_for(settings_class, environment | alone) == given
    assert dataclasses.replace(load([*WORKER, *worker], given).settings, listen=None) == dataclasses.replace(
        loaded.settings.worker, store=None
    )
    made = load([*FRONT_END, *front_end], given).settings
    assert dataclasses.replace(made, workers=()) == loaded.settings.front_end


def test_every_setting_can_be_forwarded() -> None:
    """A child takes each flag that its parent can give it."""
    for settings_class, words in ((WorkerSettings, WORKER), (FrontEndSettings, FRONT_END)):
        for name, each in settings_of(settings_class).items():
            engine = f"--engine={each.engines[0]}" if each.engines else "--engine=embedded"
            value = each.defaults.get(each.engines[0] if each.engines else "")
            if value in (None, (), "") or not each.declared.has_flag or name == "engine":
                continue
            flag = each.flag if each.kind is bool else f"{each.flag}={each.shown(value)}"
            extra = (
                []
                if settings_class is FrontEndSettings
                else [engine, "--model=m", "--url=http://x"]
                if "http" in engine
                else [engine, "--model=m"]
            )
            assert load([*words, *extra, flag], {}).resolved.given[name].source == "flag"


# Secrets.


def test_secrets_go_by_the_environment_to_those_who_need_them() -> None:
    environment = {"PENSTOCK_LINK_SECRET": "geheim-1", "PENSTOCK_API_KEY": "geheim-2", "PENSTOCK_ENGINE_API_KEY": "geheim-3"}
    loaded = load(["serve", "--engine=http", "--url=http://x", "--model=m"], environment)
    assert loaded.resolved.environment_for(WorkerSettings, environment) == {
        "PENSTOCK_LINK_SECRET": "geheim-1",
        "PENSTOCK_ENGINE_API_KEY": "geheim-3",
    }
    assert loaded.resolved.environment_for(FrontEndSettings, environment) == {
        "PENSTOCK_LINK_SECRET": "geheim-1",
        "PENSTOCK_API_KEY": "geheim-2",
    }
    assert (loaded.settings.worker.secret, loaded.settings.front_end.secret, loaded.settings.worker.http.api_key) == (
        *("geheim-1", "geheim-1"),
        "geheim-3",
    )
    for settings_class in (WorkerSettings, FrontEndSettings):
        assert "geheim" not in " ".join(loaded.resolved.arguments_for(settings_class))
    assert "geheim" not in repr(loaded) + reference.effective(loaded.resolved)
    for flag in ("--link-secret=x", "--engine-api-key=x"):
        with pytest.raises(ConfigError, match="is not a flag of"):
            load(["serve", flag], {})


@pytest.mark.parametrize("place", ["flag", "environment"])
def test_a_password_in_an_address_goes_by_the_environment(place: str) -> None:
    url = "redis://user:geheim@Host:1/0"
    environment = {"PENSTOCK_STORE": url} if place == "environment" else {}
    loaded = load([*SERVE, *([f"--store={url}"] if place == "flag" else [])], environment)
    words = loaded.resolved.arguments_for(FrontEndSettings)
    assert "geheim" not in " ".join(words) + reference.effective(loaded.resolved)
    assert "# store is redis://***@host:1/0  #" in reference.effective(loaded.resolved)
    given = loaded.resolved.environment_for(FrontEndSettings, environment)
    assert load([*FRONT_END, *words], given).settings.store == url
    assert not loaded.resolved.environment_for(WorkerSettings, environment)


# What is shown.


def test_config_prints_a_file_with_the_effective_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(tmp_path, "max_queued = 7")
    monkeypatch.setenv("PENSTOCK_GRACE", "3")
    monkeypatch.setenv("PENSTOCK_API_KEY", "geheim")
    monkeypatch.setenv("PENSTOCK_MAX_QUEUD", "3")
    assert main(["config", *SERVE, *file, "--cors-origin=*", "--resume-memory=5", "--served-name=Zoë's"]) == 0
    text, warnings = capsys.readouterr()
    for line in (
        "grace = 3  # environment: PENSTOCK_GRACE",
        f"max_queued = 7  # file: max_queued in {file[1]}",
        "resume_memory = 5  # flag: --resume-memory",
        "max_batch = 8192  # default",
        "# device is for --engine embedded",
        "# api_key is set  # environment: PENSTOCK_API_KEY",
        "# link_secret is not set  # default",
        "# context_length is not set: the model's own  # default",
    ):
        assert f"\n{line}\n" in f"\n{text}\n"
    assert "geheim" not in text
    assert warnings == "penstock: PENSTOCK_MAX_QUEUD in the environment is not a setting; did you mean PENSTOCK_MAX_QUEUED?\n"
    again = config_file(tmp_path, text)
    assert tomllib.loads(text)["served_name"] == "Zoë's"
    monkeypatch.undo()
    assert load(["serve", *again], {}).settings == load([*SERVE, *again], {"PENSTOCK_GRACE": "3"}).settings


def test_config_defaults_to_serve_and_refuses_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--engine=simulator"]) == 0
    assert 'engine = "simulator"  # flag: --engine' in capsys.readouterr().out
    assert main(["config", *FRONT_END]) == 0
    assert "step_ms" not in capsys.readouterr().out
    assert main(["config", "--engine=simulator", "frontend"]) == 2
    assert capsys.readouterr().err == "penstock: the command comes first: penstock config frontend …\n"
    assert main(["config", "worker"]) == 2
    assert capsys.readouterr().err == "penstock: a worker needs --listen: expected unix:/path or tcp://host:port\n"


def test_the_reference_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == REFERENCE.read_text(), "run: penstock config --reference > docs/reference/configuration.md"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_flag_and_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for each in settings_of(COMMANDS[command]).values():
        if each.declared.has_flag and (command != "serve" or each.declared.is_forwarded):
            assert all(flag in text for flag in (each.flag, *each.declared.aliases))
            assert each.declared.help


# The mechanism.


def test_narrowed_keeps_common_fields() -> None:
    @dataclass(frozen=True)
    class Small:
        load_weight: float
        other: int

    assert narrowed(RouterSettings(load_weight=0.3), Small, other=4) == Small(0.3, 4)
    assert build(RouterSettings, {"router_max_lead": 5}) == RouterSettings(max_lead=5)
