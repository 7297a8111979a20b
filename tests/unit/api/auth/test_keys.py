"""Which keys there are, whose a request is, and that nothing of a key is ever shown."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.api.auth import keys as module
from penstock.api.auth.keys import NOBODY, Headers, Keyring, Tenant, check_name, owner_of, parse_keys, presented_key, read_key_file
from penstock.config.front_end import Key, KeySettings, QuotaLimits, key_digest, read_key
from penstock.config.setting import settings_of
from penstock.kv.blocks import ROOT
from penstock.metrics.frontend import REMOVED_KEYS, Tally
from penstock.wire.errors import ConfigError, RequestError

ALICE = "psk-of-alice"
BOB = "psk-of-bob"


def owner(headers: Headers) -> str:
    return owner_of(presented_key(headers))


def entry(name: str, key: str, **limits: int) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\n' + "".join(f"{limit} = {value}\n" for limit, value in limits.items())


class KeyFile:
    """A key file and a keyring that reads it."""

    def __init__(self, folder: Path, text: str, **settings: Any) -> None:
        self.path = folder / "keys.toml"
        self.path.write_text(text)
        self.tally = Tally()
        self.keyring = Keyring(KeySettings(file=self.path, **settings), self.tally, lambda: 0.0)

    def name_of(self, key: str) -> str | None:
        tenant = self.keyring.tenant_of(key.encode())
        return None if tenant is None else tenant.name

    async def change(self, text: str) -> None:
        """As an editor does that puts a new file in the place of the old."""
        other = self.path.with_name("other.toml")
        other.write_text(text)
        other.replace(self.path)
        await self.keyring.refresh()


def test_a_key_has_the_tenant_of_its_name(tmp_path: Path) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE, concurrency=3) + entry("bob", BOB))
    tenant = file.keyring.tenant_of(ALICE.encode())
    assert tenant is not None
    assert (tenant.name, tenant.quota.limits.concurrency) == ("alice", 3)
    assert tenant.owner == owner([(b"x-api-key", ALICE.encode())])
    assert file.keyring.tenant_of(ALICE.encode()) is tenant, "one object for all its requests"
    assert file.name_of(BOB) == "bob"
    for wrong in ("", "psk-of-carol", ALICE[:-1], ALICE + " ", ALICE.upper(), hashlib.sha256(ALICE.encode()).hexdigest()):
        assert file.name_of(wrong) is None


async def test_a_tenant_has_a_lane_where_there_are_others(tmp_path: Path) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE, weight=3, max_priority=2))

    def alice() -> Tenant:
        tenant = file.keyring.tenant_of(ALICE.encode())
        assert tenant is not None
        return tenant

    assert (alice().lane, alice().weight, alice().quota.limits.max_priority) == ("", 3, 2)
    await file.change(entry("alice", ALICE, weight=5) + entry("bob", BOB))
    assert (alice().lane, alice().weight, alice().quota.limits.max_priority) == ("alice", 5, None)
    stranger = Keyring(KeySettings(), Tally()).tenant_of(b"invented")
    assert stranger is not None
    assert stranger.lane == "", "who invents keys gets no more turns"


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"weight": 0}, "`int` >= 1 - at `$.keys[0].weight`"),
        ({"weight": 1001}, "`int` <= 1000 - at `$.keys[0].weight`"),
        ({"max_priority": 11}, "`int` <= 10 - at `$.keys[0].max_priority`"),
    ],
)
def test_a_wrong_weight_or_priority_is_named(limits: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_keys(entry("alice", ALICE, **limits))
    assert says in str(error.value)


def test_keys_whose_hashes_begin_alike_are_told_apart() -> None:
    digest = key_digest(ALICE.encode())
    other = digest[:-1] + bytes([digest[-1] ^ 1])
    keyring = Keyring(KeySettings((Key("twin", other), Key("alice", digest))), Tally())
    tenant = keyring.tenant_of(ALICE.encode())
    assert tenant is not None
    assert tenant.name == "alice"
    assert Keyring(KeySettings((Key("twin", other),)), Tally()).tenant_of(ALICE.encode()) is None


def test_hashes_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return hmac.compare_digest(first, second)

    monkeypatch.setattr(module, "hmac", type("Recorder", (), {"compare_digest": staticmethod(compare)}))
    keyring = Keyring(KeySettings(tuple(map(read_key, [ALICE]))), Tally())
    assert keyring.tenant_of(ALICE.encode()) is not None
    assert compared == [(key_digest(ALICE.encode()), key_digest(ALICE.encode()))]


def test_without_keys_everyone_comes_in_and_has_sessions_of_their_own() -> None:
    keyring = Keyring(KeySettings(), Tally())
    nobody, alice, bob = (keyring.tenant_of(key) for key in (b"", b"a", b"b"))
    assert keyring.is_open
    assert nobody is not None and alice is not None and bob is not None  # noqa: PT018
    assert nobody.owner == NOBODY
    assert (alice.name, bob.name) == (NOBODY, NOBODY), "metrics know no keys that clients invent"
    assert alice.owner == owner([(b"authorization", b"Bearer a")]) != bob.owner
    assert keyring.tenant_of(b"a") is alice
    nobody.quota.admit(10**6, 10**9)
    alice.quota.admit(10**6, 10**9)
    assert alice.quota.headers() == []


@pytest.mark.parametrize(("shares", "given", "roots"), [(None, (), 1), (None, (ALICE, BOB), 2), (True, (ALICE, BOB), 1), (False, (), 2)])
def test_keys_share_prefixes_only_if_told_so_or_without_keys(shares: bool | None, given: Sequence[str], roots: int) -> None:
    keyring = Keyring(KeySettings(tuple(map(read_key, given)), share_prefixes=shares), Tally())
    tenants = [keyring.tenant_of(key.encode()) for key in (ALICE, BOB, ALICE)]
    found = [tenant.root for tenant in tenants if tenant is not None]
    assert len(found) == 3
    assert len(set(found)) == roots
    assert found[0] == found[2]
    assert (found[0] == ROOT) == (roots == 1) == (keyring.nobody.root == ROOT)


def test_keys_that_clients_invent_do_not_fill_the_memory() -> None:
    keyring = Keyring(KeySettings(), Tally())
    for number in range(module._MAX_STRANGERS + 100):
        keyring.tenant_of(b"%d" % number)
    assert len(keyring._strangers) == module._MAX_STRANGERS
    tenant = keyring.tenant_of(b"0")
    assert tenant is not None
    assert tenant.owner == owner([(b"x-api-key", b"0")]), "forgotten and found again, it has the same sessions"


def test_a_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    file = KeyFile(tmp_path, "")
    assert not file.keyring.is_open
    assert file.name_of("") is None
    assert file.name_of(ALICE) is None


def test_given_keys_and_those_of_a_file_together(tmp_path: Path) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE), given=tuple(map(read_key, [BOB, "third", BOB])), defaults=QuotaLimits(5, None, 7))
    assert [file.name_of(key) for key in (ALICE, BOB, "third")] == ["alice", "api-key-1", "api-key-2"]
    assert len(file.keyring) == 3
    tenant = file.keyring.tenant_of(BOB.encode())
    assert tenant is not None
    assert tenant.quota.limits == QuotaLimits(5, None, 7)
    with pytest.raises(ConfigError, match="'api-key-1' and 'alice' are the same key"):
        KeyFile(tmp_path, entry("alice", ALICE), given=tuple(map(read_key, [ALICE])))


@pytest.mark.parametrize("key", ["", "with space", "with,comma", "ümlaut", "new\nline", "x" * 513])
def test_what_is_no_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key: expected 1 to 512 visible ASCII characters") as caught:
        settings_of(KeySettings)["api_key"].read(["right", key], "--api-key")
    assert not key or key not in str(caught.value)


# Changes of the file.


async def test_a_key_that_is_taken_out_is_refused(tmp_path: Path) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE) + entry("bob", BOB))
    await file.change(entry("bob", BOB))
    assert file.name_of(ALICE) is None
    assert file.name_of(BOB) == "bob"
    await file.change("")
    assert file.name_of(BOB) is None


async def test_a_key_keeps_what_it_has_used_when_the_file_changes(tmp_path: Path) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE, requests_per_minute=2, concurrency=2))
    before = file.keyring.tenant_of(ALICE.encode())
    assert before is not None
    before.quota.charge()
    before.quota.charge()
    before.quota.admit(1, 1)
    await file.change(entry("bob", BOB) + entry("alice", ALICE, requests_per_minute=2, concurrency=1))
    tenant = file.keyring.tenant_of(ALICE.encode())
    assert tenant is not None
    assert tenant.quota.limits.concurrency == 1
    with pytest.raises(RequestError, match="requests_per_minute"):
        tenant.quota.charge()
    tenant.quota.release(1, 1, 0)
    assert tenant.quota.running == 0


@pytest.mark.parametrize("broken", ["[[keys]", '[[keys]]\nname = "x"\n', entry("alice", ALICE) * 2, "\x00"])
async def test_a_broken_file_changes_nothing_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE))
    await file.change(broken)
    await file.keyring.refresh()
    assert file.name_of(ALICE) == "alice"
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "the keys stay as they were" in record.getMessage()
    assert str(file.path) in record.getMessage()
    assert hashlib.sha256(ALICE.encode()).hexdigest() not in caplog.text
    await file.change(entry("bob", BOB))
    assert (file.name_of(ALICE), file.name_of(BOB)) == (None, "bob")


async def test_a_file_that_is_gone_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE))
    file.path.unlink()
    await file.keyring.refresh()
    assert file.name_of(ALICE) == "alice"
    assert "No such file" in caplog.text


async def test_a_file_that_is_the_same_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE))
    monkeypatch.setattr(module, "read_key_file", lambda path: pytest.fail("it was read"))
    await file.keyring.refresh()


async def test_a_file_that_is_changed_in_its_place_is_read(tmp_path: Path) -> None:
    file = KeyFile(tmp_path, entry("alice", ALICE))
    file.path.write_text(entry("bobby", BOB))
    await file.keyring.refresh()
    assert (file.name_of(ALICE), file.name_of(BOB)) == (None, "bobby")


async def test_the_watch_ends_where_there_is_no_file() -> None:
    await Keyring(KeySettings(), Tally()).watch()


# What is in a file.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[keys]]\nsha256 = "00"\nname = "a"', "`$.keys[0].sha256`"),
        ('[[keys]]\nname = "a"', "missing required field `sha256` - at `$.keys[0]`"),
        (entry("a", ALICE, requests_per_minute=0), "`int` >= 1 - at `$.keys[0].requests_per_minute`"),
        (entry("a", ALICE) + "concurrency = 1.5", "`$.keys[0].concurrency`"),
        (entry("a", ALICE) + "tokens = 5", "unknown field `tokens` - at `$.keys[0]`"),
        (entry("a b", ALICE), "key name 'a b': expected 1 to 64 of the characters"),
        (entry("api-key-3", ALICE), "reserved"),
        (entry("nobody", ALICE), "reserved"),
        (entry("a", ALICE) + entry("a", BOB), "two keys have the name 'a'"),
        (entry("a", ALICE) + entry("b", ALICE), "'a' and 'b' are the same key"),
        ("key = 1", "unknown field `key`"),
        ("x = " + "[" * 10_000, "recursion"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    assert str(caught.value).startswith(f"key file {path}: ")
    assert says in str(caught.value)
    assert hashlib.sha256(ALICE.encode()).hexdigest() not in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="expected UTF-8"):
        read_key_file(path)
    with pytest.raises(ConfigError, match="No such file or directory"):
        read_key_file(tmp_path / "nowhere")


def test_capital_hexadecimals_are_the_same() -> None:
    assert parse_keys(entry("alice", ALICE).replace(key_digest(ALICE.encode()).hex(), key_digest(ALICE.encode()).hex().upper())) == (
        Key("alice", key_digest(ALICE.encode())),
    )


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ä", "x" * 65, 'a"', "a\n", "psk-abc", "nobody", "api-key-1"])
def test_names(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name)
    assert check_name("Team_a.b-1" + "x" * 54)


def test_a_key_in_the_place_of_a_name_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        check_name("psk-secret")
    assert "secret" not in str(caught.value)


def test_nothing_of_a_key_is_shown() -> None:
    settings = KeySettings(tuple(map(read_key, [ALICE])))
    tally = Tally()
    keyring = Keyring(settings, tally)
    tenant = keyring.tenant_of(ALICE.encode())
    assert isinstance(tenant, Tenant)
    tenant.quota.admit(1, 1)
    tenant.quota.release(1, 1, 0)
    digest = key_digest(ALICE.encode())
    for shown in (repr(settings), repr(settings.given), repr(tenant), repr(tenant.quota), repr(keyring), repr(tally)):
        for secret in (ALICE, digest.hex(), repr(digest), tenant.owner):
            assert secret not in shown


# The owner.


def test_owner_is_the_key_however_it_comes() -> None:
    key = owner([(b"authorization", b"Bearer sk-1")])
    assert key == owner([(b"authorization", b"bearer  sk-1 ")]) == owner([(b"x-api-key", b"sk-1")]) == owner([(b"authorization", b"sk-1")])
    assert key != owner([(b"authorization", b"Bearer sk-2")])
    assert owner([(b"authorization", b"Bearer sk-1"), (b"x-api-key", b"sk-2")]) == key, "a bearer token goes first"
    assert len(bytes.fromhex(key)) == 16
    assert "sk-1" not in key


def test_nobody() -> None:
    for headers in (
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer")],
        [(b"x-api-key", b"")],
    ):
        assert owner(headers) == NOBODY


def test_a_token_may_contain_the_word() -> None:
    assert owner([(b"authorization", b"Bearer a bearer b")]) != owner([(b"authorization", b"Bearer a b")])


async def test_labels_do_not_grow_with_every_key_that_ever_was(tmp_path: Path) -> None:
    """A key that is removed while its request runs: what the request uses is counted with all removed keys."""
    file = KeyFile(tmp_path, entry("alice", ALICE))
    for number in range(20):
        name, key = f"key-{number}", f"psk-{number}"
        await file.change(entry("alice", ALICE) + entry(name, key))
        tenant = file.keyring.tenant_of(key.encode())
        assert tenant is not None
        tenant.quota.admit(1, 5)
        assert file.keyring.running()[name] == 1
        await file.change(entry("alice", ALICE))
        tenant.quota.release(1, 5, 7)
    assert file.tally.key_requests == {(REMOVED_KEYS,): 20}
    assert file.tally.key_tokens == {(REMOVED_KEYS, "prompt"): 100, (REMOVED_KEYS, "completion"): 140}
    assert file.keyring.running() == {"alice": 0}
