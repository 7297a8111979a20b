"""The HTTP client: one request in, everything that was seen of its stream out."""

from __future__ import annotations

import time
from array import array
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from penstock.bench.sse import EventParser
from penstock.wire.errors import ConfigError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LOOKUP_SECONDS = 10.0
MOST_ERROR_BYTES = 65_536
MOST_MESSAGE = 300


class Details(msgspec.Struct):
    """What a Penstock server tells of a model beyond OpenAI's fields."""

    engine: str = ""
    tokenizer: str = ""


class Model(msgspec.Struct):
    id: str
    penstock: Details | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class Stream:
    """What was seen of one request. It is filled in as it runs, so that what was interrupted is kept, too.

    `times` and `sizes` have, for each read that carried text, when it was and how many characters it had.
    """

    __slots__ = (
        "completion_tokens",
        "done",
        "ended",
        "error",
        "events",
        "finish_reason",
        "number",
        "parts",
        "seed",
        "sizes",
        "started",
        "times",
    )

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.seed = seed
        self.started = self.ended = 0.0
        self.times = array("d")
        self.sizes = array("L")
        self.parts: list[str] = []
        self.events = 0
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def is_complete(self) -> bool:
        """It came to its end. One that neither is complete nor has an error was interrupted by ourselves."""
        return self.done and self.error is None

    @property
    def tokens(self) -> int:
        """As the server counted them; where it did not, an event with text counts as one."""
        return len(self.parts) if self.completion_tokens is None else self.completion_tokens

    def take(self, payloads: list[bytes], now: float) -> None:
        """Takes the events of one read. Raises msgspec.DecodeError for one that is no chunk."""
        characters = 0
        for payload in payloads:
            if payload == b"[DONE]":
                self.done = True
                continue
            chunk = _CHUNKS.decode(payload)
            self.events += 1
            if chunk.error is not None:
                self.error = f"error event: {_message(chunk.error)}"
            if chunk.usage is not None:
                self.completion_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                characters += self._take_choice(choice)
        if characters:
            self.times.append(now)
            self.sizes.append(characters)

    def _take_choice(self, choice: _Choice) -> int:
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
        if self.finish_reason is not None and (text or choice.finish_reason is not None):
            self.error = "the stream went on after its finish"
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        if not text:
            return 0
        self.parts.append(text)
        return len(text)


class Client:
    """Connections to one server, kept alive between requests, as many as are asked for. Use it as a context."""

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

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self._session.close()

    async def models(self) -> list[Model]:
        """The server's models; none when it does not tell. Raises ConfigError when it cannot be reached or refuses."""
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
            raise ConfigError(f"--url {self._url}: GET /v1/models: the answer is no list of models: {error}") from error

    async def run(self, body: bytes, stream: Stream) -> None:
        """Sends the request and fills in its stream. What goes wrong becomes the stream's error."""
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
            stream.error = f"an event is no chunk: {error}"
        finally:
            stream.ended = time.perf_counter()


async def _read(content: aiohttp.StreamReader, stream: Stream) -> None:
    """Reads to the end of the response, so that its connection can be used again."""
    parser = EventParser()
    while data := await content.readany():
        stream.take(parser.feed(data), time.perf_counter())
        if stream.error is not None:
            return
    if not stream.done:
        stream.error = "the stream ended without [DONE]"
    elif stream.finish_reason is None:
        stream.error = "the stream ended without a finish reason"


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """The status, and what the body says."""
    body = await response.content.read(MOST_ERROR_BYTES)
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        content = body.decode("utf-8", "replace").strip() or response.reason
    if isinstance(content, dict):
        content = content.get("error") or content.get("detail") or content
    return f"HTTP {response.status}: {_message(content)}"


def _message(error: Any) -> str:
    """The message of an error in OpenAI's shape, or whatever came instead."""
    message = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    return message if len(message) <= MOST_MESSAGE else message[:MOST_MESSAGE] + "…"


def _reason(error: aiohttp.ClientError | OSError, timeout: float) -> str:
    """An error of the connection, in words."""
    match error:
        case TimeoutError():
            return f"timeout after {timeout:g} s"
        case aiohttp.ClientConnectorError():
            return f"cannot connect: {error.os_error.strerror or error.os_error}"
        case aiohttp.ServerDisconnectedError():
            return "connection cut before the answer"
        case aiohttp.ClientPayloadError() | ConnectionError():
            return "connection cut in mid-answer"
        case aiohttp.InvalidURL():
            return "expected an address such as http://127.0.0.1:8000"
        case _:
            return f"{type(error).__name__}: {error}"
