"""The application over ASGI, with a producer that does what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar, cast

import msgspec

from penstock.api.app import Services, make_app
from penstock.api.auth.gate import Gate
from penstock.api.auth.keys import Keyring
from penstock.api.models import Models
from penstock.api.pipeline.admission import Admission
from penstock.api.pipeline.detached import DetachedRuns
from penstock.api.pipeline.images import PictureReader
from penstock.api.pipeline.request import Incoming, PromptContext
from penstock.api.pipeline.runner import Runner
from penstock.api.responses.answers import ResponseObject
from penstock.api.responses.store import SqliteStore
from penstock.cluster.pool import WorkerPool
from penstock.cluster.sessions.sessions import Sessions
from penstock.cluster.sessions.turn import Turn
from penstock.config.front_end import KeySettings, Limits, ResumeLimits
from penstock.metrics.frontend import ClusterReading, FrontEndMetrics, Tally
from penstock.router.affinity import MemoryStore
from penstock.stream.mailbox import Mailbox
from penstock.text.tokenizers.words import WordTokenizer
from penstock.text.transcript import Transcripts
from penstock.wire.errors import GenerationFault, PenstockError
from penstock.wire.images import ImageRules
from penstock.wire.messages import Delta, Fault, Finish, ModelInfo, Submit

WORDS = WordTokenizer()
MODEL = ModelInfo("m", "by hand", "words", WORDS.vocab_size, 1000, 16)

Result = TypeVar("Result")
Produce = Callable[[Submit, Mailbox], Awaitable[None]]


def says(*pieces: str) -> Produce:
    """Every generation is these pieces, each in a delta of its own, and their end."""

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        offset = 0
        for piece in pieces:
            token_ids = tuple(piece.encode())
            mailbox.put(Delta(offset, token_ids))
            offset += len(token_ids)
            await asyncio.sleep(0)
        mailbox.end(Finish("stop"))

    return produce


async def request(body: dict[str, Any], model: ModelInfo = MODEL) -> tuple[Incoming, PromptContext]:
    """What parsing a body takes, apart from any server."""
    models = Models()
    models.live = [model]
    await models.prepare(model)
    tenant = Keyring(KeySettings(), Tally()).nobody
    return Incoming(json.dumps(body).encode(), [], tenant), PromptContext(models, Transcripts(0))


def at_once(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work that waits for nothing but its next turn."""
    try:
        while True:
            work.send(None)
    except StopIteration as ended:
        return cast(Result, ended.value)


class Turns:
    """Counts how often the event loop gets a turn while this is entered as a context."""

    async def __aenter__(self) -> Self:
        self.count = 0
        self._task = asyncio.create_task(self._run())
        await asyncio.sleep(0)
        self.count = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


class FrontEnd:
    """The application, with one model, and a client whose socket the test holds."""

    def __init__(
        self,
        produce: Produce,
        limits: Limits | None = None,
        path: str = "/v1/completions",
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        resume: ResumeLimits | None = None,
        responses: SqliteStore | None = None,
        context_length: int = MODEL.context_length,
        images: ImageRules | None = None,
        media: PictureReader | None = None,
    ) -> None:
        self.path = path
        parsers = replace_parsers(tool_parser, reasoning_parser)
        self.model = msgspec.structs.replace(parsers, context_length=context_length, images=images)
        self.tally = Tally()
        metrics = FrontEndMetrics(self.tally)
        metrics.observe(lambda: ClusterReading())
        self.models = Models()
        self.models.live = [self.model]
        self.admission = Admission(limits or Limits(), self.tally)
        self._produce = produce
        self._generations: set[asyncio.Task[None]] = set()
        pool = WorkerPool([], "test", "", self.models.prepare)
        sessions = Sessions(MemoryStore(), pool, quota=0)
        context = PromptContext(self.models, Transcripts(0), media)
        self.detached = DetachedRuns(resume or ResumeLimits(), self.admission, self.tally)
        runner = Runner(context, sessions, self.produce, self.admission, self.tally, self.detached)
        self.application = app = make_app(Services(context, runner, self.detached, sessions, self.admission, metrics, responses))
        self.app = Gate(app, Keyring(KeySettings(), self.tally), self.tally)
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.socket_open = asyncio.Event()
        self.socket_open.set()

    def produce(self, _: str, turn: Turn, request: Submit, mailbox: Mailbox) -> asyncio.Task[None]:
        self.turn = turn
        task = asyncio.create_task(self._generate(request, mailbox))
        self._generations.add(task)
        task.add_done_callback(self._generations.discard)
        return task

    async def _generate(self, request: Submit, mailbox: Mailbox) -> None:
        try:
            await self._produce(request, mailbox)
        except GenerationFault as error:
            mailbox.end(error.fault)
        except PenstockError as error:
            mailbox.end(Fault(type(error).__name__, str(error)))

    async def post(self, **fields: object) -> None:
        prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in self.path else {"prompt": "x"}
        await self.send("POST", self.path, json.dumps({"model": "m", **prompt, **fields}).encode())

    async def send(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """One request; its answer is in `sent`."""
        await self.models.prepare(self.model)
        self.sent = []
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await self.socket_open.wait()
            self.sent.append(message)

        path, _, query = path.partition("?")
        found = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": found, "root_path": ""}
        try:
            await self.app(scope, receive, send)
        finally:
            if stopping := [task for task in self._generations if task.cancelling()]:
                await asyncio.wait(stopping)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        return [json.loads(line[6:]) for line in self.body.split(b"\n") if line.startswith(b"data: {")]


def response_object(**fields: Any) -> ResponseObject:
    """A Response object of which only a few fields are set."""
    kinds = {"reasoning": {}, "text": {}, "metadata": {}, "output": [], "tools": [], "tool_choice": "auto", "service_tier": "default"}
    flags = {"background": False, "store": True, "parallel_tool_calls": True, "truncation": "disabled"}
    numbers = {"temperature": 1.0, "top_p": 1.0, "top_logprobs": 0, "created_at": 100}
    nothing = {field.name: None for field in msgspec.structs.fields(ResponseObject) if field.required}
    given = {"id": "resp_1", "model": "m", "status": "queued", **fields}
    return msgspec.convert({**nothing, **kinds, **flags, **numbers, **given}, ResponseObject)


def replace_parsers(tool_parser: str | None, reasoning_parser: str | None) -> ModelInfo:
    fields = {name: getattr(MODEL, name) for name in MODEL.__struct_fields__}
    return ModelInfo(**{**fields, "tool_parser": tool_parser, "reasoning_parser": reasoning_parser})
