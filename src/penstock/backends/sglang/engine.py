"""SGLang's Engine in a worker: tokens in, tokens out.

What is used of SGLang beside its public `Engine.async_generate` is the tokenizer manager: its table of requests, to know that the
scheduler has really ended one; its loop that reads what the scheduler says, which we run ourselves, because SGLang's own ends the whole
process where we must first tell every generation; and its coroutines for sessions, because Engine's methods run the event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from penstock.backends.external.child_processes import ChildWatch
from penstock.backends.external.engine import Chunk, EngineDied, EngineFacts, EngineRefused, EngineRequest, EventEndpoints
from penstock.backends.external.errors import first_error, forget_directory, write_logging_config
from penstock.backends.sglang.arguments import check_version, installed_version, make_arguments
from penstock.backends.sglang.chunks import ChunkReader
from penstock.backends.sglang.requests import as_parameters
from penstock.backends.sglang.sessions import StreamingSessions, Turn
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Capability, Fault

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

IPC = "ipc://"
KILL_SECONDS = 60
# While a start that was given up is under way, the processes that it begins are ended so often.
ABANDON_SECONDS = 0.1
# SGLang's limit for what a session's text may come to. It is checked nowhere, but must be there.
SESSION_CAPACITY = 1 << 30
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108, it is where SGLang has it
_LOG_CONFIG = "SGLANG_LOGGING_CONFIG_PATH"
LOGGER = "sglang"
# What it logs when its process fails, and little else. Others log every grammar that they cannot compile.
FAILURES = "sglang.srt.managers.scheduler"


class SglangEngine:
    """See `ExternalEngine`. `has_grammar` and `disaggregation` are known once it has started.

    To be started on the main thread's event loop: SGLang's processes send SIGQUIT to this one when they fail, which must not end it. No
    other signal is touched.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.has_grammar = False
        self.disaggregation = "null"
        self._settings = settings
        self._is_incremental = False
        self._tags_sessions = False
        self._has_priority = False
        self._engine: Any = None
        self._manager: Any = None
        self._streaming: StreamingSessions | None = None
        self._directory: Path | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._loading: asyncio.Future[tuple[Any, EventEndpoints | None]] | None = None
        self._others: frozenset[int | None] = frozenset()
        self._watch: ChildWatch | None = None
        self._handling: asyncio.Task[None] | None = None
        self._on_death: Callable[[str], None] | None = None
        self._death: str | None = None

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        version = installed_version()
        check_version(version, any_version=self._settings.any_version)
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGQUIT, self._told_of_failure)
        self._died: asyncio.Future[None] = self._loop.create_future()
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-sglang-"))
        # The kernel ends SGLang's processes with the thread that has started them: it lives until `close`.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang")
        self._others = frozenset(child.pid for child in multiprocessing.active_children())
        try:
            self._loading = self._loop.run_in_executor(self._thread, _load, self._settings, self._directory, version)
            self._engine, endpoints = await asyncio.shield(self._loading)
            self._run_manager(on_death)
            return await self._establish(endpoints)
        except BaseException as error:
            await self.close()
            if isinstance(error, EngineDied):
                raise ConfigError(f"SGLang does not start: {error}") from error
            raise

    def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        if request.lark is not None and not self.has_grammar:
            raise EngineRefused(Fault("unsupported", "SGLang was started without what structured output needs: see the worker's log"))
        if request.bootstrap is not None and self.disaggregation == "null":
            raise EngineRefused(Fault("unsupported", "SGLang was started without --disaggregation-mode"))
        return self._generate(request)

    async def ping(self) -> None:
        await self._answer(self._manager.get_internal_state())

    async def close_session(self, session_id: str) -> None:
        if self._streaming is not None:
            await self._streaming.close_session(session_id)
        if self._tags_sessions:
            await self._close_engine_session(session_id)

    async def close(self) -> None:
        """Ends what SGLang has started, and nothing else that is a child of this process."""
        if self._thread is None:
            return
        self._on_death = None
        self._die("the engine is being closed")
        if self._watch is not None:
            self._watch.close()
        if self._handling is not None:
            self._handling.cancel()
            await asyncio.wait([self._handling])
        await self._end_processes()
        if self._engine is not None:
            _release(self._engine)
            self._engine = None
        if self._directory is not None:
            if os.environ.get(_LOG_CONFIG, "").startswith(f"{self._directory}/"):
                del os.environ[_LOG_CONFIG]
            forget_directory(self._directory, LOGGER)
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        if self._death is not None:
            raise EngineDied(self._death)
        reader = ChunkReader(request, is_incremental=self._is_incremental)
        turn = None if self._streaming is None else await self._streaming.begin(request)
        try:
            raw_chunks = await self._submit(request, turn)
            try:
                async for raw in raw_chunks:
                    if self._death is not None:
                        raise EngineDied(self._death)
                    chunk = reader.read(raw)
                    if turn is not None:
                        turn.take(chunk.token_ids, is_last=chunk.finish is not None)
                    if chunk.token_ids or chunk.finish is not None:
                        yield chunk
                    if chunk.finish is not None:
                        return
            except ValueError as error:
                # It is how SGLang refuses a request before it has sent it to its scheduler.
                raise EngineRefused(Fault("engine_refused", f"SGLang: {error}")) from error
            finally:
                await self._end(request.id, raw_chunks)
        finally:
            if turn is not None:
                turn.end()

    async def _submit(self, request: EngineRequest, turn: Turn | None) -> AsyncGenerator[dict[str, Any], None]:
        parameters = as_parameters(request, turn, tags_sessions=self._tags_sessions, has_priority=self._has_priority)
        chunks: AsyncGenerator[dict[str, Any], None] = await self._engine.async_generate(**parameters)
        return chunks

    async def _end(self, request_id: str, raw_chunks: AsyncGenerator[dict[str, Any], None]) -> None:
        """Returns when SGLang's scheduler has nothing of this request any more: it tells of the end of every request, also of one that
        it was told to abort, and that takes the request from the table."""
        requests = self._manager.rid_to_state
        state = requests.get(request_id)
        await raw_chunks.aclose()
        if state is None or requests.get(request_id) is not state:
            return
        self._manager.abort_request(request_id)
        while self._death is None and not state.finished:
            state.event.clear()
            await state.event.wait()

    async def _answer(self, question: Awaitable[Answer]) -> Answer:
        """What the scheduler answers; EngineDied when it cannot any more. SGLang itself would wait for ever."""
        asked = asyncio.ensure_future(question)
        try:
            await asyncio.wait((asked, self._died), return_when=asyncio.FIRST_COMPLETED)
            if self._death is not None:
                raise EngineDied(self._death)
            return await asked
        finally:
            asked.cancel()

    def _run_manager(self, on_death: Callable[[str], None]) -> None:
        """Does what SGLang would do at its first request, except that it takes no handler of signals and does not end this process."""
        self._manager = self._engine.tokenizer_manager
        self._on_death = on_death
        self._manager.event_loop = self._loop
        self._handling = self._loop.create_task(self._manager.handle_loop(), name="SGLang's answers")
        self._handling.add_done_callback(self._handling_ended)
        pids = self._engine.get_all_child_pids()
        self._watch = ChildWatch([(pid, "one of SGLang's processes") for pid in pids], self._die)

    async def _establish(self, endpoints: EventEndpoints | None) -> EngineFacts:
        """What this engine does, by what its scheduler says that it was started with."""
        (arguments,) = await self._answer(self._manager.get_internal_state())
        # There is one for every rank of a model that is spread over several devices; SGLang itself goes by the first.
        scheduler = self._engine._scheduler_init_result.scheduler_infos[0]
        self._is_incremental = bool(arguments["incremental_streaming_output"])
        self._has_priority = arguments["radix_eviction_policy"] == "priority"
        self._tags_sessions = bool(arguments["enable_session_radix_cache"])
        self.disaggregation = arguments["disaggregation_mode"]
        self.has_grammar = _has_grammar(arguments)
        if self._settings.streaming_sessions:
            tokenizer = self._manager.tokenizer
            start_id = None if tokenizer is None else tokenizer.bos_token_id
            self._streaming = StreamingSessions(self._open_engine_session, self._close_engine_session, start_id)
        log.info("SGLang's chunks are %s", "incremental" if self._is_incremental else "cumulative")
        block_size = arguments["page_size"] * (arguments["dcp_size"] or 1)
        return EngineFacts(
            # What SGLang takes of prompt and answer together: it keeps some of its context for itself, and would cut answers short.
            context_length=scheduler["max_req_input_len"],
            block_size=block_size,
            kv_blocks=scheduler["max_total_num_tokens"] // block_size,
            max_batch=arguments["effective_max_running_requests_per_dp"] or 0,
            events=endpoints,
            capabilities=self._capabilities(),
        )

    def _capabilities(self) -> tuple[Capability, ...]:
        capabilities: list[Capability] = ["logprobs"]
        # A worker that only decodes never sees the prompt.
        if self.disaggregation != "decode":
            capabilities.append("prompt_logprobs")
        if self.has_grammar:
            capabilities.append("grammar")
        return tuple(capabilities)

    async def _open_engine_session(self, session_id: str) -> bool:
        request = import_module("sglang.srt.managers.io_struct").OpenSessionReqInput(
            capacity_of_str_len=SESSION_CAPACITY, session_id=session_id, streaming=True
        )
        return await self._answer(self._manager.open_session(request)) is not None

    async def _close_engine_session(self, session_id: str) -> None:
        request = import_module("sglang.srt.managers.io_struct").CloseSessionReqInput(session_id=session_id)
        await self._manager.close_session(request)

    def _told_of_failure(self) -> None:
        """SIGQUIT is how SGLang's processes say that they have failed. While it starts, what becomes of them is seen there."""
        log.error("one of SGLang's processes says that it has failed")
        if self._handling is not None:
            self._die("one of SGLang's processes has failed")

    def _handling_ended(self, handling: asyncio.Task[None]) -> None:
        if not handling.cancelled():
            self._die(f"what SGLang's scheduler said was not understood: {handling.exception()!r}")

    def _die(self, reason: str) -> None:
        """Ends every request that waits in here as SGLang would end one: whoever reads it looks whether the engine is still there."""
        if self._death is not None:
            return
        self._death = reason
        self._died.set_result(None)
        requests = {} if self._manager is None else self._manager.rid_to_state
        for request_id, state in requests.items():
            state.finished = True
            finish = {"type": "abort", "message": reason}
            state.out_list.append({"output_ids": [], "meta_info": {"id": request_id, "finish_reason": finish}})
            state.event.set()
        if self._on_death is not None:
            self._on_death(reason)

    async def _end_processes(self) -> None:
        assert self._loading is not None
        assert self._thread is not None
        while not self._loading.done():
            await asyncio.to_thread(self._kill)
            await asyncio.wait([self._loading], timeout=ABANDON_SECONDS)
        if not self._loading.cancelled() and self._loading.exception() is None:
            self._engine = self._loading.result()[0]
        await asyncio.to_thread(self._kill)
        # Nothing of SGLang's is alive any more that the thread's end could take along.
        await asyncio.to_thread(self._thread.shutdown)
        self._thread = None
        self._loop.remove_signal_handler(signal.SIGQUIT)

    def _kill(self) -> None:
        """SGLang's own way would end every child of this process. In a thread: it waits until they are gone."""
        known = None if self._engine is None else set(self._engine.get_all_child_pids())
        for child in multiprocessing.active_children():
            if child.pid in known if known is not None else child.pid not in self._others:
                import_module("sglang.srt.utils").kill_process_tree(child.pid, wait_timeout=KILL_SECONDS)
                child.join()


def _load(settings: EngineSettings, directory: Path, version: str) -> tuple[Any, EventEndpoints | None]:
    """In the thread of its own: SGLang's Engine, and where its KV events are. Raises ConfigError."""
    # Logprobs are of the model's own distribution, as everywhere in Penstock.
    os.environ.setdefault("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    # Processes inherit it. Who presses Ctrl-C means the worker, which ends what it does before its engine goes.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    events = EventEndpoints(f"{IPC}{directory}/events", f"{IPC}{directory}/replay")
    try:
        server_args = import_module("sglang.srt.server_args").ServerArgs
        arguments, endpoints = make_arguments(settings, server_args, events, version)
        logging.getLogger(LOGGER).setLevel(arguments.log_level.upper())
        if _LOG_CONFIG not in os.environ:
            os.environ[_LOG_CONFIG] = str(write_logging_config(directory, LOGGER, arguments.log_level.upper(), FAILURES))
        return _start_engine(arguments), endpoints
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"--engine sglang: SGLang cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        reason = first_error(directory) or f"{type(error).__name__}: {error}"
        raise ConfigError(f"SGLang cannot run --model {settings.model}: {reason}") from error


def _start_engine(arguments: Any) -> Any:
    engine_class = import_module("sglang.srt.entrypoints.engine").Engine
    engine = engine_class.__new__(engine_class)
    try:
        engine.__init__(server_args=arguments)
    finally:
        # At the end of this process it would end every child of it.
        atexit.unregister(engine.shutdown)
    # It ends this process as soon as one of SGLang's own has ended.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    # Made for this thread, which runs none.
    engine.loop.close()
    return engine


def _has_grammar(arguments: dict[str, Any]) -> bool:
    """Said once where it is off, so that no answer is ever without the structure that was asked for and nobody knows why."""
    if arguments["skip_tokenizer_init"]:
        log.warning("structured output is off: SGLang was told to --skip-tokenizer-init, and follows no grammar without its tokenizer")
    elif arguments["grammar_backend"] != "llguidance":
        log.warning("structured output is off: SGLang's --grammar-backend is %s, not llguidance", arguments["grammar_backend"])
    else:
        return True
    return False


def _release(engine: Any) -> None:
    """The sockets and files that SGLang leaves behind. Nobody will read what was said last, so nothing may wait for that."""
    manager, ports = engine.tokenizer_manager, engine.port_args
    sockets = (manager.send_to_scheduler, manager.recv_from_detokenizer, engine.send_to_rpc)
    for context in {socket.context for socket in sockets if socket is not None}:
        context.destroy(linger=0)
    if manager.mm_processor is not None:
        manager.mm_processor.shutdown()
    manager.cuda_vmm_feature_transport.shutdown()
    files = [Path(name.removeprefix(IPC)) for name in vars(ports).values() if isinstance(name, str) and name.startswith(IPC)]
    for file in [*files, *SHARED_MEMORY.glob(f"sglang_loads_{ports.instance_id}_*")]:
        file.unlink(missing_ok=True)
