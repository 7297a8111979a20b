"""The HTTP client: sends one request and records what comes back."""

from __future__ import annotations

import time
from typing import Self

import aiohttp
import msgspec

from penstock.backends.http.client import describe_error
from penstock.backends.http.sse import EventReader, EventTooLarge
from penstock.bench.stream import Stream, error_message
from penstock.wire.errors import ConfigError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LOOKUP_SECONDS = 10.0
MAX_ERROR_BYTES = 65_536


class Details(msgspec.Struct, frozen=True):
    """What a Penstock server adds to OpenAI's fields of a model."""

    engine: str | None = None
    tokenizer: str = ""


class Model(msgspec.Struct):
    id: str
    penstock: Details = Details()


class _Models(msgspec.Struct):
    data: list[Model]


class Client:
    """Connections to one server, kept alive between requests, without a limit. Use it as a context manager."""

    def __init__(self, url: str, endpoint: str, timeout: float, api_key: str | None = None) -> None:
        self._url = url
        self._endpoint = url + PATHS[endpoint]
        self._timeout = timeout
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._timeout, sock_connect=None)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def models(self) -> list[Model]:
        """The server's models. Empty if it has no such endpoint. Raises ConfigError if it cannot be reached or refuses."""
        try:
            timeout = aiohttp.ClientTimeout(total=LOOKUP_SECONDS)
            async with self._session.get(self._url + "/v1/models", timeout=timeout, allow_redirects=False) as response:
                if response.status in (404, 405, 501):
                    return []
                if response.status != 200:
                    raise ConfigError(f"--url {self._url}: GET /v1/models: {await _refusal(response)}")
                return msgspec.json.decode(await response.read(), type=_Models).data
        except (aiohttp.ClientError, OSError) as error:
            raise ConfigError(f"--url {self._url}: {_reason(error, LOOKUP_SECONDS)}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"--url {self._url}: GET /v1/models: the answer is not a list of models: {error}") from error

    async def run(self, body: bytes, stream: Stream) -> None:
        """Sends the request and fills in its stream. A failure becomes the stream's error."""
        stream.started = time.perf_counter()
        try:
            async with self._session.post(self._endpoint, data=body, allow_redirects=False) as response:
                if response.status != 200:
                    stream.error = await _refusal(response)
                elif response.content_type != "text/event-stream":
                    stream.error = f"the answer is {response.content_type}: expected text/event-stream"
                else:
                    await _read(response.content, stream)
        except (aiohttp.ClientError, OSError) as error:
            stream.error = _reason(error, self._timeout)
        except msgspec.DecodeError as error:
            stream.error = f"an event is not a chunk: {error}"
        except EventTooLarge as error:
            stream.error = str(error)
        finally:
            stream.ended = time.perf_counter()


async def _read(content: aiohttp.StreamReader, stream: Stream) -> None:
    """Reads to the end of the response, so that its connection can be used again."""
    reader = EventReader()
    while data := await content.readany():
        stream.take(reader.feed(data), time.perf_counter())
        if stream.error is not None:
            return
    if not stream.done:
        stream.error = "the stream ended without [DONE]"
    elif stream.finish_reason is None:
        stream.error = "the stream ended without a finish reason"


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """The status and the error message of the body."""
    body = await response.content.read(MAX_ERROR_BYTES)
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        content = body.decode("utf-8", "replace").strip() or response.reason
    return f"HTTP {response.status}: {error_message(content)}"


def _reason(error: aiohttp.ClientError | OSError, timeout: float) -> str:
    """A connection error, in words."""
    return f"timeout after {timeout:g} s" if isinstance(error, TimeoutError) else describe_error(error)
