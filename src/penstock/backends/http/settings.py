"""What must be known of an engine that runs behind HTTP. Needs no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from penstock.backends.external.engine import EventEndpoints
from penstock.wire.errors import ConfigError

API_KEY_VARIABLE = "PENSTOCK_ENGINE_API_KEY"

Route = Literal["auto", "sglang", "vllm", "openai"]


@dataclass(frozen=True)
class HttpEngineSettings:
    """`url` is where the server is, without the path of an API. `model_name` None: the one that the server has. `route`: whose API is
    spoken, or the best that is found. `events`: where the engine publishes its KV events. `block_size` and `context_length` are for servers
    that do not tell. The key is never shown."""

    url: str
    model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    route: Route = "auto"
    events: EventEndpoints | None = None
    block_size: int | None = None
    context_length: int | None = None
    connect_seconds: float = 10.0
    idle_seconds: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        for name, value in (("block_size", self.block_size), ("context_length", self.context_length)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: expected at least 1")


def checked_url(url: str) -> str:
    """The address without what every route adds itself. Raises ConfigError, which never repeats a password."""
    if "@" in url:
        # Before anything else: what is wrong with it besides could not be said without it.
        raise ConfigError(f"--url has credentials in it, which logs would show: put the key into {API_KEY_VARIABLE} instead")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--url is no address: {error}; expected one such as http://127.0.0.1:8000") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--url is {url!r}: expected an address such as http://127.0.0.1:8000")
    if parts.query or parts.fragment or port == 0 or any(letter.isspace() or not letter.isprintable() for letter in url):
        # Not repeated: a query may have a key in it.
        raise ConfigError(
            "--url has a query, a fragment, spaces or the port 0: expected an address such as http://127.0.0.1:8000, "
            f"with a key, where one is needed, in {API_KEY_VARIABLE}"
        )
    # Most clients of OpenAI's API are given the address with it.
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def api_key_from(environment: Mapping[str, str]) -> str | None:
    """The key for the engine. The environment is the one place for it: a command line can be seen by everybody on the machine."""
    key = environment.get(API_KEY_VARIABLE)
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{API_KEY_VARIABLE} has characters that no header can have")
    return key
