"""An engine that already runs behind HTTP: SGLang, vLLM, or any server with OpenAI's completions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from penstock.backends.external.engine import Chunk, EngineDied, EngineFacts, EngineImage, EngineReport, EngineRequest, PromptImages
from penstock.backends.external.image_events import KeyedImages
from penstock.backends.external.images import BYTES_PER_PIXEL, MIB, Kept, Placeholder, data_url
from penstock.backends.http.client import Broken, EngineClient, Silent, Stream, Unreachable
from penstock.backends.http.completions import VllmDialect
from penstock.backends.http.dialects import Body, Reader, lost, refused
from penstock.backends.http.probe import Found, find_route
from penstock.config.engines import HttpEngineSettings
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import ConfigError
from penstock.wire.images import IMAGE_NAME_BYTES

log = logging.getLogger(__name__)

# An idle engine is pinged every WATCH_SECONDS. It counts as dead after DEATH_SECONDS of failed pings.
WATCH_SECONDS = 5.0
DEATH_SECONDS = 10.0
# A ping without an answer is sent again after this time: it may be lost.
PING_SECONDS = 30.0
RETRY_SECONDS = 0.5
ABORT_SECONDS = 10.0
# Choices of one request, and turns of one conversation, have the same pictures.
MAX_URL_BYTES = 64 * MIB
# A picture that every processor takes.
GREY_PIXELS = 64
GREY = bytes([127]) * (BYTES_PER_PIXEL * GREY_PIXELS**2)


async def probe(settings: HttpEngineSettings) -> EngineReport:
    """Which server answers at this address, by which route, and what that route can do."""
    client = EngineClient(settings)
    client.open()
    try:
        return (await find_route(client, settings)).report
    except ConfigError as error:
        return EngineReport("engine over HTTP", "nothing found", "SGLang, vLLM, or OpenAI's completions", problem=str(error))
    finally:
        await client.close()


class HttpEngine:
    """See `ExternalEngine`. A generation is one POST with a streamed answer. Leaving it early closes the connection and, if the server has
    a route for that, aborts the request. The engine is not ours: `close` ends only our connections."""

    def __init__(
        self,
        settings: HttpEngineSettings,
        tokenizer: Tokenizer,
        placeholder: Placeholder | None = None,
        *,
        watch_seconds: float = WATCH_SECONDS,
        death_seconds: float = DEATH_SECONDS,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        self._urls: Kept[str] = Kept(MAX_URL_BYTES)
        self._watch_seconds = watch_seconds
        self._death_seconds = death_seconds
        self._client = EngineClient(settings)
        self._found: Found | None = None
        self._watch: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        # The number of answers that are being read.
        self._answers = 0

    @property
    def report(self) -> EngineReport:
        """What the engine can do. Known after the start."""
        assert self._found is not None
        return self._found.report

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        self._client.open()
        try:
            found = self._found = await self._find()
            self._dialect = found.make_dialect(self._tokenizer)
        except BaseException:
            await self._client.close()
            raise
        self._log_route(found)
        facts = found.facts if self._placeholder is None else await self._with_images(found.facts, self._placeholder)
        self._watch = asyncio.create_task(self._watch_over(on_death), name="watching the engine's server")
        return facts

    async def _with_images(self, facts: EngineFacts, placeholder: Placeholder) -> EngineFacts:
        """Whether the server reads images is found out with a grey one."""
        if not self._dialect.reads_images:
            log.warning("images are refused: they need SGLang, or vLLM with --enable-scale-out")
            return replace(facts, reads_images=False)
        events = facts.events
        if events is not None and isinstance(self._dialect, VllmDialect):
            events = replace(events, images=KeyedImages(placeholder.position))
        images = PromptImages(placeholder.ids, [EngineImage(bytes(IMAGE_NAME_BYTES), (GREY_PIXELS, GREY_PIXELS), GREY)])
        request = EngineRequest(secrets.token_hex(16), placeholder.ids, 1, None)
        body = self._dialect.body(request) | await self._image_fields(images) | {"stream": False}
        answer = await self._client.ask(self._dialect.path, body, PING_SECONDS)
        if answer.status != 200:
            log.warning("images are refused: the server answered one with %d: %s", answer.status, answer.message[:200])
        return replace(facts, events=events, reads_images=answer.status == 200)

    async def _image_fields(self, images: PromptImages) -> Body:
        return self._dialect.image_fields(images, [await self._url(picture) for picture in images.pictures])

    async def _url(self, picture: EngineImage) -> str:
        url = self._urls.get(picture.name)
        if url is None:
            url = await asyncio.to_thread(data_url, picture)
            self._urls.put(picture.name, url, len(url))
        return url

    async def _find(self) -> Found:
        found = await find_route(self._client, self._settings)
        if not found.facts.context_length:
            raise ConfigError(f"--url {self._settings.url}: the server does not report its context length: set --context-length")
        return found

    def _log_route(self, found: Found) -> None:
        report = found.report
        log.info("%s %s at %s, by %s", report.engine, report.version, self._settings.url, self._dialect.path)
        for hint in found.hints:
            log.info("%s", hint)
        missing = [f"{feature.name} ({feature.detail})" for feature in report.features if not feature.is_available]
        if missing:
            log.warning("the engine, with its version and settings, does not support: %s", "; ".join(missing))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        body, reader = self._dialect.body(request), self._dialect.reader(request)
        if request.images is not None:
            body |= await self._image_fields(request.images)
        try:
            async with self._client.stream(self._dialect.path, body) as stream:
                if stream.refusal is not None:
                    reader.is_over = True
                    raise refused(stream.refusal.message, stream.refusal.status)
                self._answers += 1
                try:
                    async with contextlib.aclosing(_chunks(stream, reader)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                finally:
                    self._answers -= 1
        except Unreachable as error:
            reader.is_over = True
            raise await self._unreachable(error) from error
        except Broken as error:
            raise lost(f"the engine was lost: {error}") from error
        finally:
            if not reader.is_over:
                await self._stop(request.id)

    def pulled_bytes(self) -> int:
        return 0

    async def ping(self) -> None:
        """Raises EngineDied if the server is unreachable, or its engine broken, for `death_seconds`. Waits for a silent server: it may be
        in a very long step."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (problem := await self._problem()) is not None:
            if loop.time() - began >= self._death_seconds:
                raise self._died(problem)
            await asyncio.sleep(min(RETRY_SECONDS, self._death_seconds / 4))

    async def close_session(self, session_id: str) -> None:
        assert self._found is not None
        if self._found.session_path is not None:
            await self._tell(self._found.session_path, {"session_id": session_id})

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._telling:
            await asyncio.wait(self._telling)
        await self._client.close()

    async def _watch_over(self, on_death: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(self._watch_seconds)
            try:
                await self.ping()
            except EngineDied as error:
                on_death(str(error))
                return

    async def _problem(self) -> str | None:
        """What is wrong with the server now. Any answer below 500 means that it works."""
        assert self._found is not None
        path = self._found.ping_path
        while True:
            try:
                answer = await self._client.ask(path, None, PING_SECONDS)
            except Silent:
                continue
            except (Unreachable, Broken) as error:
                return f"GET {path}: {error}"
            return f"GET {path} answered {answer.status}" if answer.status >= 500 else None

    async def _unreachable(self, error: Unreachable) -> Exception:
        """One failed connect does not mean that the engine is dead, above all while other answers are coming."""
        if not self._answers and await self._problem() is not None:
            return self._died(str(error))
        return lost(f"the engine could not be reached: {error}")

    def _died(self, why: str) -> EngineDied:
        """Clients learn the reason, but not the address."""
        log.error("the engine at %s is gone: %s", self._settings.url, why)
        return EngineDied(f"its server is gone: {why}")

    async def _stop(self, request_id: str) -> None:
        """Aborts the request if the server has a route for it, and waits for the answer. Cancelling the wait does not cancel the abort."""
        abort = self._dialect.abort(request_id)
        if abort is not None:
            task = asyncio.create_task(self._tell(*abort), name=f"abort {request_id}")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
            await asyncio.shield(task)

    async def _tell(self, path: str, body: dict[str, object]) -> None:
        """Posts what the engine would also notice by itself later, so a failure is only logged."""
        try:
            answer = await self._client.ask(path, body, ABORT_SECONDS)
        except (Unreachable, Broken) as error:
            log.info("POST %s: %s", path, error)
            return
        if answer.status >= 400:
            log.warning("POST %s was answered with %d: %s", path, answer.status, answer.message[:200])


async def _chunks(stream: Stream, reader: Reader) -> AsyncGenerator[Chunk, None]:
    try:
        async with contextlib.aclosing(stream.events()) as events:
            async for event in events:
                chunk = reader.read(event)
                if chunk is not None:
                    yield chunk
                if reader.is_finished:
                    if not reader.is_over:
                        # Our reader ended it at a stop token. It must be aborted there, too.
                        break
                    stream.end_soon()
    except Broken:
        if not reader.is_finished:
            raise
    if not reader.is_finished:
        raise lost("the engine's answer ended without a finish")
    yield reader.last()
