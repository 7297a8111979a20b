"""SGLang's Engine in a worker: tokens in, tokens out.

Beside the public `Engine.async_generate` this uses SGLang's tokenizer manager:
- its table of requests, to know that the scheduler has really ended one;
- its loop that reads the scheduler's output. We run it ourselves: SGLang's own ends the whole process when it fails, and we must first
  tell every generation;
- its coroutines for sessions: the methods of Engine run the event loop themselves.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import inspect
import logging
import multiprocessing
import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.backends.external.engine import Chunk, EngineFacts, EngineImage, EngineRefused, EngineRequest, EventEndpoints, KvMoves
from penstock.backends.external.images import Placeholder, pil_image
from penstock.backends.external.in_process import InProcessEngine
from penstock.backends.sglang.arguments import PACKAGE, make_arguments
from penstock.backends.sglang.requests import ChunkReader, PriorityUse, as_parameters, image_parameters, meeting_parameters, priority_use
from penstock.backends.sglang.sessions import StreamingSessions
from penstock.config.engines import EngineSettings
from penstock.wire.address import TcpAddress
from penstock.wire.messages import Capability, Fault

log = logging.getLogger(__name__)

IPC = "ipc://"
KILL_SECONDS = 60
# SGLang's limit for the text of a session. SGLang requires it and never checks it.
SESSION_CAPACITY = 1 << 30
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108, SGLang uses it


class SglangEngine(InProcessEngine):
    """See `ExternalEngine`. `has_grammar` and `disaggregation` are known after the start.

    Must be started on the main thread's event loop: SGLang's processes send SIGQUIT to this process when they fail, which must not end
    it. No other signal is touched.
    """

    package = PACKAGE

    def __init__(self, settings: EngineSettings, placeholder: Placeholder | None = None) -> None:
        super().__init__(settings, placeholder)
        self.has_grammar = False
        self.disaggregation = "null"
        self._address = ""
        self._is_incremental = False
        self._tags_sessions = False
        self._priority: PriorityUse = "none"
        self._manager: Any = None
        self._endpoints: EventEndpoints | None = None
        self._streaming: StreamingSessions | None = None
        self._other_children: frozenset[int | None] = frozenset()
        self._handling: asyncio.Task[None] | None = None

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._on_sigquit)
        self._other_children = frozenset(child.pid for child in multiprocessing.active_children())
        try:
            return await super().start(on_death)
        except BaseException:
            loop.remove_signal_handler(signal.SIGQUIT)
            raise

    def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        if request.lark is not None and not self.has_grammar:
            raise EngineRefused(Fault("unsupported", "SGLang has no grammar on this worker: see the worker's log"))
        return self._generate(request)

    def pulled_bytes(self) -> int:
        """SGLang does not tell."""
        return 0

    async def ping(self) -> None:
        await self._answer(self._manager.get_internal_state())

    async def close_session(self, session_id: str) -> None:
        if self._streaming is not None:
            await self._streaming.close_session(session_id)
        if self._tags_sessions:
            await self._close_engine_session(session_id)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        self._check_alive()
        reader = ChunkReader(request, is_incremental=self._is_incremental)
        turn = None if self._streaming is None else await self._streaming.begin(request)
        try:
            parameters = as_parameters(request, turn, tags_sessions=self._tags_sessions, priority=self._priority)
            if request.images is not None:
                # Converted in a thread. SGLang prepares them in one of its own, and puts them in place of the placeholders.
                parameters |= image_parameters(request.images, await asyncio.to_thread(_pil_images, request.images.pictures))
            raw_chunks = await self._engine.async_generate(**parameters, **meeting_parameters(request, self._address))
            try:
                async for raw in raw_chunks:
                    self._check_alive()
                    chunk = reader.read(raw)
                    if turn is not None:
                        turn.take(chunk.token_ids, is_last=chunk.finish is not None)
                    if chunk.token_ids or chunk.finish is not None:
                        yield chunk
                    if chunk.finish is not None:
                        return
            except ValueError as error:
                # SGLang refuses a request this way before it sends it to its scheduler.
                raise EngineRefused(Fault("engine_refused", f"SGLang: {error}")) from error
            finally:
                await self._end(request.id, raw_chunks)
        finally:
            if turn is not None:
                turn.end()

    async def _end(self, request_id: str, raw_chunks: AsyncGenerator[dict[str, Any], None]) -> None:
        """Returns when SGLang's scheduler has ended the request. The scheduler reports the end of every request, also of an aborted
        one, and the report removes it from the table."""
        requests = self._manager.rid_to_state
        state = requests.get(request_id)
        await raw_chunks.aclose()
        if state is None or requests.get(request_id) is not state:
            return
        self._manager.abort_request(request_id)
        while self._death is None and not state.finished:
            state.event.clear()
            await state.event.wait()

    def _load(self, directory: Path) -> Any:
        # Logprobs are those of the model's own distribution, as everywhere in Penstock.
        os.environ.setdefault("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
        # How often an engine that waits for KV asks whether the other one lives. It gives up after two failures.
        os.environ.setdefault("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "1")
        # SGLang's processes inherit this. Ctrl-C is for the worker, which finishes its work before it ends the engine.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        events = EventEndpoints(f"{IPC}{directory}/events", f"{IPC}{directory}/replay")
        server_args = import_module("sglang.srt.server_args").ServerArgs
        arguments, self._endpoints = make_arguments(self._settings, server_args, events, PACKAGE.version() or "")
        logging.getLogger(PACKAGE.logger).setLevel(arguments.log_level.upper())
        self._set_up_logging(directory, arguments.log_level)
        return _make_engine(arguments)

    async def _establish(self) -> EngineFacts:
        """Does what SGLang does at its first request, but installs no signal handlers and does not end this process."""
        loop, self._manager = asyncio.get_running_loop(), self._engine.tokenizer_manager
        self._manager.event_loop = loop
        self._handling = loop.create_task(self._manager.handle_loop(), name="SGLang's answers")
        self._handling.add_done_callback(self._handling_ended)
        self._watch_processes(self._engine.get_all_child_pids(), "one of SGLang's processes")
        (arguments,) = await self._answer(self._manager.get_internal_state())
        return self._facts(arguments)

    def _facts(self, arguments: dict[str, Any]) -> EngineFacts:
        """Reads what the scheduler was started with."""
        # There is one entry per rank of a model on several devices. SGLang itself uses the first.
        scheduler = self._engine._scheduler_init_result.scheduler_infos[0]
        self._is_incremental = bool(arguments["incremental_streaming_output"])
        self._priority = priority_use(arguments)
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
            # The limit for prompt and answer together. SGLang reserves a part of its context, and would cut longer answers short.
            context_length=scheduler["max_req_input_len"],
            block_size=block_size,
            kv_blocks=scheduler["max_total_num_tokens"] // block_size,
            max_batch=arguments["effective_max_running_requests_per_dp"] or 0,
            events=self._endpoints,
            capabilities=self._capabilities(),
            moves=self._moves(arguments),
        )

    def _moves(self, arguments: dict[str, Any]) -> KvMoves | None:
        if self.disaggregation == "null":
            return None
        if self.disaggregation == "prefill":
            self._address = str(TcpAddress(arguments["host"], arguments["disaggregation_bootstrap_port"]))
        names = ("dtype", "kv_cache_dtype", "page_size", "model_path")
        meaning = (self.package.version(), *(arguments[name] for name in names))
        fingerprint = hashlib.blake2b(repr(meaning).encode(), digest_size=16).digest()
        return KvMoves("meeting", fingerprint, self._address, computes=False)

    def _capabilities(self) -> tuple[Capability, ...]:
        capabilities: list[Capability] = ["logprobs"]
        # A worker that only decodes never sees the prompt.
        if self.disaggregation != "decode":
            capabilities.append("prompt_logprobs")
        if self.has_grammar:
            capabilities.append("grammar")
        if "cache_salt" in inspect.signature(self._engine.async_generate).parameters:
            capabilities.append("isolation")
        return tuple(capabilities)

    async def _open_engine_session(self, session_id: str) -> bool:
        request = import_module("sglang.srt.managers.io_struct").OpenSessionReqInput(
            capacity_of_str_len=SESSION_CAPACITY, session_id=session_id, streaming=True
        )
        return await self._answer(self._manager.open_session(request)) is not None

    async def _close_engine_session(self, session_id: str) -> None:
        request = import_module("sglang.srt.managers.io_struct").CloseSessionReqInput(session_id=session_id)
        await self._manager.close_session(request)

    def _on_sigquit(self) -> None:
        """SGLang's processes report a failure with SIGQUIT. While SGLang loads, it notices failures itself."""
        log.error("one of SGLang's processes reports a failure")
        if self._handling is not None:
            self._die("one of SGLang's processes has failed")

    def _handling_ended(self, handling: asyncio.Task[None]) -> None:
        if not handling.cancelled():
            self._die(f"the output of SGLang's scheduler could not be read: {handling.exception()!r}")

    def _die(self, reason: str) -> None:
        """Also ends every request as SGLang ends one. Its reader then finds that the engine is dead."""
        requests = {} if self._manager is None or self._death is not None else self._manager.rid_to_state
        for request_id, state in requests.items():
            state.finished = True
            finish = {"type": "abort", "message": reason}
            state.out_list.append({"output_ids": [], "meta_info": {"id": request_id, "finish_reason": finish}})
            state.event.set()
        super()._die(reason)

    async def _shut_down(self) -> None:
        if self._handling is not None:
            self._handling.cancel()
            await asyncio.wait([self._handling])
        await asyncio.to_thread(self._kill_processes)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        if self._engine is not None:
            _release(self._engine)

    def _kill_processes(self) -> None:
        """Kills SGLang's processes and waits for their end. SGLang's own way would end every child of this process."""
        known = None if self._engine is None else set(self._engine.get_all_child_pids())
        for child in multiprocessing.active_children():
            if child.pid in known if known is not None else child.pid not in self._other_children:
                import_module("sglang.srt.utils").kill_process_tree(child.pid, wait_timeout=KILL_SECONDS)
                child.join()


def _make_engine(arguments: Any) -> Any:
    engine_class = import_module("sglang.srt.entrypoints.engine").Engine
    engine = engine_class.__new__(engine_class)
    try:
        engine.__init__(server_args=arguments)
    finally:
        # At exit it would end every child of this process.
        atexit.unregister(engine.shutdown)
    # It would end this process when one of SGLang's processes ends.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    # A loop for this thread, which does not run one.
    engine.loop.close()
    return engine


def _pil_images(pictures: Sequence[EngineImage]) -> list[Any]:
    return [pil_image(picture) for picture in pictures]


def _has_grammar(arguments: dict[str, Any]) -> bool:
    if arguments["skip_tokenizer_init"]:
        log.warning("structured output is off: SGLang runs with --skip-tokenizer-init, and needs its tokenizer to follow a grammar")
    elif arguments["grammar_backend"] != "llguidance":
        log.warning("structured output is off: SGLang's --grammar-backend is %s, not llguidance", arguments["grammar_backend"])
    else:
        return True
    return False


def _release(engine: Any) -> None:
    """Closes the sockets and deletes the files that SGLang leaves behind. Unsent messages are dropped: nobody would read them."""
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
