"""`penstock key`, and the flags about keys."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.api.auth.keys import read_key_file
from penstock.cli.keys import new_key, remove_key
from penstock.cli.main import load, main
from penstock.config.commands import FrontEndSettings, WorkerSettings
from penstock.config.front_end import NO_LIMITS, QuotaLimits
from penstock.wire.errors import ConfigError

SERVE = ["serve", "--engine", "simulator"]
FRONT_END = ["frontend", "--worker", "unix:/run/worker.sock"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_new_key_is_printed_once_and_only_its_hash_is_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "alice", "--file", str(path), "--requests-per-minute", "60", "--concurrency", "2"]) == 0
    out, err = capsys.readouterr()
    key = out.strip()
    assert out == f"{key}\n"
    assert key.startswith("psk-")
    assert len(key) == len("psk-") + 43, "256 bits"
    assert key not in err
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert key not in text
    assert f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"' in text
    (found,) = read_key_file(path)
    assert (found.name, found.limits) == ("alice", QuotaLimits(60, None, 2))
    assert [entry.name for entry in path.parent.iterdir()] == ["keys.toml"], "nothing is left beside it"


def test_no_two_keys_are_the_same(path: Path) -> None:
    assert new_key(path, "alice", NO_LIMITS) != new_key(path, "bob", NO_LIMITS)
    assert [key.name for key in read_key_file(path)] == ["alice", "bob"]


def test_list_shows_names_and_limits_and_no_hash(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_key(path, "alice", QuotaLimits(60, 1000, 2))
    new_key(path, "b", NO_LIMITS)
    assert main(["key", "list", "--file", str(path)]) == 0
    assert capsys.readouterr().out == (
        "name   requests_per_minute  tokens_per_minute  concurrency  max_priority  weight\n"
        "alice  60                   1000               2            -             1\n"
        "b      -                    -                  -            -             1\n"
    )


def test_weight_and_priority_are_written_and_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "alice", "--file", str(path), "--weight", "3", "--max-priority=-2"]) == 0
    (found,) = read_key_file(path)
    assert (found.weight, found.limits.max_priority) == (3, -2)
    capsys.readouterr()
    assert main(["key", "list", "--file", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["alice", "-", "-", "-", "-2", "3"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["new", "alice"], "it already has a key 'alice'"),
        (["new", "a/b"], "key name 'a/b': expected 1 to 64 of the characters"),
        (["new", "bob", "--concurrency", "0"], "--concurrency is 0: expected 1 to"),
        (["new", "bob", "--weight", "0"], "--weight is '0': expected a whole number from 1 to 1,000"),
        (["new", "bob", "--weight", "1.5"], "--weight is '1.5': expected a whole number from 1 to 1,000"),
        (["new", "bob", "--max-priority", "11"], "--max-priority is 11: expected -10 to 10"),
        (["remove", "bob"], "it has no key 'bob'"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    new_key(path, "alice", NO_LIMITS)
    before = path.read_bytes()
    assert main(["key", *arguments, "--file", str(path)]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert not out
    assert path.read_bytes() == before


def test_a_file_or_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["list"], ["remove", "alice"]):
        assert main(["key", *arguments, "--file", str(tmp_path / "keys.toml")]) == 2
    assert main(["key", "new", "alice", "--file", str(tmp_path / "nowhere" / "keys.toml")]) == 2
    assert capsys.readouterr().err.count("No such file or directory") == 3
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_broken_is_left_alone(path: Path) -> None:
    path.write_text("[[keys]")
    with pytest.raises(ConfigError, match="at line 1"):
        new_key(path, "alice", NO_LIMITS)
    assert path.read_text() == "[[keys]"


def test_removing_keeps_the_rest_as_it_is(path: Path) -> None:
    for name in ("alice", "bob", "carol"):
        new_key(path, name, NO_LIMITS)
    _, bob, carol = read_key_file(path)
    head, first, second, third = path.read_text().split("\n[[keys]]")
    path.write_text(f"{head}\n[[keys]]{first}\n# Bob, of the second floor.\n[[keys]]{second}# was: [[keys]]\n\n[[keys]]{third}# The end.\n")
    remove_key(path, "alice")
    assert read_key_file(path) == (bob, carol)
    remove_key(path, "carol")
    assert read_key_file(path) == (bob,)
    text = path.read_text()
    assert text == f"{head}\n# Bob, of the second floor.\n[[keys]]{second}# was: [[keys]]\n# The end.\n"
    new_key(path, "dave", NO_LIMITS)
    remove_key(path, "dave")
    assert path.read_text() == text, "nothing adds up"


def test_a_file_in_another_spelling_is_not_guessed_at(path: Path) -> None:
    text = 'keys = [{name = "a", sha256 = "' + "0" * 64 + '"}]\n'
    path.write_text(text)
    for change in (lambda: remove_key(path, "a"), lambda: new_key(path, "b", NO_LIMITS)):
        with pytest.raises(ConfigError, match="edit it by hand"):
            change()
    assert path.read_text() == text


def test_the_mode_of_a_file_and_a_link_to_it_stay(path: Path) -> None:
    new_key(path, "alice", NO_LIMITS)
    path.chmod(0o640)
    link = path.with_name("link.toml")
    link.symlink_to(path)
    new_key(link, "bob", NO_LIMITS)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert len(read_key_file(path)) == 2


def test_commands_at_the_same_time_lose_no_key(path: Path) -> None:
    threads = [threading.Thread(target=new_key, args=(path, f"key{number}", NO_LIMITS)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_key_file(path)} == {f"key{number}" for number in range(20)}


# Flags.


def test_keys_go_to_the_front_end_by_the_environment() -> None:
    arguments = [*SERVE, "--api-key", "psk-first", "--api-key", "psk-second", "--cors-origin", "*", "--key-concurrency", "3"]
    loaded = load(arguments, {"PENSTOCK_API_KEY": "psk-third, psk-fourth,"})
    words, environment = loaded.resolved.arguments_for(FrontEndSettings), loaded.resolved.environment_for(FrontEndSettings, {})
    assert environment == {"PENSTOCK_API_KEY": "psk-first,psk-second,psk-third,psk-fourth"}
    assert {"--cors-origin=*", "--key-concurrency=3"} <= set(words)
    assert loaded.resolved.environment_for(WorkerSettings, {"PENSTOCK_API_KEY": "psk-third", "HOME": "/h"}) == {"HOME": "/h"}
    assert "psk-" not in repr(loaded)
    assert "psk-" not in " ".join((*words, *loaded.resolved.arguments_for(WorkerSettings)))
    front_end = load([*FRONT_END, *words], environment).settings
    assert [key.name for key in front_end.keys.given] == ["api-key-1", "api-key-2", "api-key-3", "api-key-4"]
    assert front_end.keys.given[3].digest == hashlib.sha256(b"psk-fourth").digest()
    assert front_end.keys.defaults == QuotaLimits(None, None, 3)
    assert front_end.cors_origins == ("*",)
    assert "psk-" not in repr(front_end)
    assert hashlib.sha256(b"psk-fourth").hexdigest() not in repr(front_end)


def test_a_key_file_is_forwarded_and_read_first(path: Path) -> None:
    new_key(path, "alice", NO_LIMITS)
    loaded = load([*SERVE, "--key-file", str(path), "--tokens-per-minute", "9"], {})
    assert {f"--key-file={path}", "--tokens-per-minute=9"} <= set(loaded.resolved.arguments_for(FrontEndSettings))
    path.write_text("[[keys]\n")
    with pytest.raises(ConfigError, match=r"keys\.toml: .*at line 1"):
        load([*SERVE, "--key-file", str(path)], {})


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--requests-per-minute", "5"], {}, "--requests-per-minute is 5, but there are no keys"),
        (["--tokens-per-minute", "0"], {"PENSTOCK_API_KEY": "x"}, "--tokens-per-minute is 0: expected 1 to"),
        (["--key-concurrency", "-1", "--api-key", "x"], {}, "--key-concurrency is -1: expected 1 to"),
        ([], {"PENSTOCK_API_KEY": ""}, "PENSTOCK_API_KEY is set but empty"),
        ([], {"PENSTOCK_API_KEY": " , "}, "PENSTOCK_API_KEY is set but empty"),
        (["--api-key", ""], {}, "--api-key: expected 1 to 512 visible ASCII characters"),
        (["--key-file", "/nowhere/keys.toml"], {}, "key file /nowhere/keys.toml: No such file or directory"),
        (["--cors-origin", "example.org"], {}, "--cors-origin is 'example.org': expected scheme://host"),
    ],
)
def test_settings_that_cannot_work(arguments: list[str], environment: dict[str, str], says: str) -> None:
    for base in (SERVE, FRONT_END):
        with pytest.raises(ConfigError) as caught:
            load([*base, *arguments], environment)
        assert says in str(caught.value)


def test_help_says_how_to_keep_a_key_and_shows_none() -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env={"PENSTOCK_API_KEY": "psk-hidden"})
    text = " ".join(done.stdout.split())
    assert "can read command lines: prefer PENSTOCK_API_KEY" in text
    assert "psk-hidden" not in text
