"""Finds the server behind a URL and its best route: SGLang's own, else one that answers with token ids, else text completions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.backends.external.engine import EngineFacts, EngineRefused, EngineReport, EventEndpoints, Feature
from penstock.backends.external.in_process import version_numbers
from penstock.backends.http.client import Answer, Broken, EngineClient, Unreachable
from penstock.backends.http.completions import FOR_LLGUIDANCE, ID_MARK, CompletionsDialect, VllmDialect, read_event
from penstock.backends.http.dialects import Body, Dialect, SglangDialect, SglangTraits
from penstock.backends.http.text import TextDialect, byte_tokens
from penstock.backends.sglang.arguments import MERGES_FROM
from penstock.backends.sglang.requests import PriorityUse, priority_use
from penstock.config.engines import ENGINE_KEY_VARIABLE, HttpEngineSettings
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Capability

PROBE_SECONDS = 60.0
# vLLM's default on a GPU.
USUAL_BLOCK_SIZE = 16
# SGLang reserves this many tokens of the context per request.
SGLANG_RESERVE = 4
# Every model has it.
ANY_TOKEN = 0
SOME_GRAMMAR = FOR_LLGUIDANCE + 'start: "a"'

_RETENTION: dict[PriorityUse, str] = {
    "eviction": "as priority",
    "scheduling": "not with --enable-priority-scheduling",
    "none": "start SGLang with --radix-eviction-policy priority",
}
_CACHE_LABELS = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

UNKNOWN_VERSION = "unknown version"
# Where SGLang describes itself, and a field that shows that it is SGLang.
SGLANG_INFO = {"/server_info": "max_total_num_tokens", "/get_server_info": "max_total_num_tokens", "/model_info": "is_generation"}


@dataclass(frozen=True)
class Found:
    """A route and its engine. `ping_path` answers after the engine's own loop. `session_path` closes a session, None without sessions.
    `hints` are for the log."""

    make_dialect: Callable[[Tokenizer], Dialect]
    facts: EngineFacts
    report: EngineReport
    ping_path: str
    session_path: str | None = None
    hints: tuple[str, ...] = ()


class _Model(msgspec.Struct):
    """A model of `/v1/models`, with fields that some servers add to OpenAI's."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    penstock: dict[str, Any] | None = None
    # From llama.cpp.
    meta: dict[str, Any] | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def find_route(client: EngineClient, settings: HttpEngineSettings) -> Found:
    """Identifies the server and generates a few tokens. Raises ConfigError that says what was tried and what came back."""
    probe = _Probe(client, settings)
    if settings.route in ("auto", "sglang"):
        info = await _sglang_info(probe)
        if info is not None:
            return await _sglang(probe, *info)
    if settings.route == "sglang":
        raise probe.failure("SGLang was not found")
    model = await _model(probe)
    if settings.route in ("auto", "vllm"):
        found = await _vllm(probe, model) or await _completions(probe, model)
        if found is not None:
            return found
    if settings.route == "vllm":
        raise probe.failure("no route answers with token ids")
    return await _text(probe, model)


class _Probe:
    """Sends requests and remembers what came back."""

    def __init__(self, client: EngineClient, settings: HttpEngineSettings) -> None:
        self._client = client
        self.settings = settings
        self.tried: list[str] = []

    def failure(self, why: str) -> ConfigError:
        return ConfigError(f"--url {self.settings.url}: {why}; tried {'; '.join(self.tried)}")

    async def info(self, path: str) -> dict[str, Any]:
        """The JSON object at this path. Empty if there is none."""
        answer = await self.ask(path)
        content = None if answer is None else answer.json
        return content if isinstance(content, dict) else {}

    async def ask(self, path: str, body: Body | None = None) -> Answer | None:
        """The answer if its status is 200. Raises ConfigError if nothing answers or the API key is wrong."""
        request = f"{'GET' if body is None else 'POST'} {path}"
        try:
            answer = await self._client.ask(path, body, PROBE_SECONDS)
        except Unreachable as error:
            raise ConfigError(f"--url {self.settings.url}: {request}: {error}") from error
        except Broken as error:
            self.tried.append(f"{request}: {error}")
            return None
        if answer.status == 200:
            self.tried.append(f"{request}: 200")
            return answer
        self.tried.append(f"{request}: {answer.status} {answer.message[:200]}")
        if answer.status == 401:
            what = "needs an API key" if self.settings.api_key is None else "rejects the API key"
            raise ConfigError(f"--url {self.settings.url}: the engine {what}; set {ENGINE_KEY_VARIABLE}: {answer.message[:200]}")
        return None

    async def takes_salt(self, path: str, body: Body) -> bool:
        """Whether the server reads `cache_salt`: it takes a text, and calls a number a mistake. Other servers ignore unknown fields, and
        share KV, or refuse them."""
        if await self.ask(path, body | {"cache_salt": "0"}) is None:
            return False
        try:
            answer = await self._client.ask(path, body | {"cache_salt": 0}, PROBE_SECONDS)
        except (Unreachable, Broken):
            return False
        self.tried.append(f"POST {path} with a bad cache_salt: {answer.status}")
        return answer.status in (400, 422)

    async def make(self, path: str, body: Body) -> Mapping[str, Any] | None:
        """Generates something and returns the only choice."""
        answer = await self.ask(path, body)
        if answer is None:
            return None
        raw = answer.json
        with contextlib.suppress(EngineRefused):
            if read_event(answer.body).choices and isinstance(raw, dict):
                return dict(raw["choices"][0])
        self.tried.append(f"POST {path}: the answer is not a completion")
        return None

    def facts(
        self,
        context_length: int | None,
        block_size: int | None,
        capabilities: tuple[Capability, ...],
        max_batch: int = 0,
        kv_blocks: int = 0,
    ) -> EngineFacts:
        """The user's settings are used if the engine reports nothing. They may also reduce the context. 0: an unknown context."""
        settings = self.settings
        return EngineFacts(
            context_length=min(filter(None, (context_length, settings.context_length)), default=0),
            block_size=block_size or settings.block_size or USUAL_BLOCK_SIZE,
            events=None if settings.kv_events is None else EventEndpoints(settings.kv_events, settings.kv_replay),
            capabilities=capabilities,
            max_batch=max_batch or settings.max_batch or 0,
            kv_blocks=kv_blocks,
        )

    def isolation(self, takes_salt: bool) -> Feature:
        detail = "by cache_salt" if takes_salt else "the server ignores cache_salt: API keys need --share-prefixes"
        return Feature("isolation", takes_salt, detail)

    def events(self, hint: str = "if the server has them, set --kv-events") -> Feature:
        known = self.settings.kv_events
        return Feature("KV events", known is not None, hint if known is None else f"from {known}")


# SGLang.


async def _sglang_info(probe: _Probe) -> tuple[str, dict[str, Any]] | None:
    """The path of SGLang's information, and what it contains."""
    for path, field in SGLANG_INFO.items():
        info = await probe.info(path)
        if field in info:
            return path, info
    return None


async def _sglang(probe: _Probe, info_path: str, info: dict[str, Any]) -> Found:
    if not info.get("is_generation", True) or info.get("is_embedding"):
        raise ConfigError(f"--url {probe.settings.url}: this SGLang serves an embedding model, which generates no text")
    version = str(info.get("version") or "")
    is_incremental = await _is_incremental(probe, info, version)
    traits = SglangTraits(
        is_incremental=is_incremental,
        has_grammar=info.get("grammar_backend") == "llguidance" and not info.get("skip_tokenizer_init"),
        has_sessions=bool(info.get("enable_session_radix_cache")),
        priority=priority_use(info),
    )
    page_size, states = info.get("page_size") or None, info.get("internal_states") or [{}]
    takes_salt = await probe.takes_salt(SglangDialect.path, {"input_ids": [ANY_TOKEN], "sampling_params": {"max_new_tokens": 1}})
    capabilities = _capabilities(has_logprobs=True, has_grammar=traits.has_grammar, takes_salt=takes_salt)
    facts = probe.facts(
        await _sglang_context(probe, info),
        page_size,
        capabilities,
        kv_blocks=info.get("max_total_num_tokens", 0) // (page_size or USUAL_BLOCK_SIZE),
        max_batch=int(info.get("max_running_requests") or states[0].get("effective_max_running_requests_per_dp") or 0),
    )
    features = (*_sglang_features(probe, traits, info), probe.isolation(takes_salt))
    report = EngineReport("SGLang over HTTP", version or None, "any that has /generate", features=features)
    return Found(
        lambda _: SglangDialect(traits),
        facts,
        report,
        info_path,
        "/close_session" if traits.has_sessions else None,
        () if is_incremental else ("every event repeats all tokens so far: better start SGLang with --incremental-streaming-output",),
    )


async def _is_incremental(probe: _Probe, info: Mapping[str, Any], version: str) -> bool:
    """Whether events have only new tokens. Raises ConfigError if that is unknown, or if the server would lose tokens."""
    known = info.get("incremental_streaming_output", info.get("stream_output"))
    if known is None:
        known = await _seen_incremental(probe)
    if known and version and version_numbers(version) < MERGES_FROM:
        raise ConfigError(
            f"--url {probe.settings.url}: SGLang {version} streams only new tokens, and drops those that a busy reader has not read: "
            "start it without --stream-output, or install a newer one"
        )
    return bool(known)


async def _seen_incremental(probe: _Probe) -> bool:
    """Finds out by a test: the events repeat the tokens so far, or not."""
    count = 8
    body = {"input_ids": [ANY_TOKEN], "stream": True, "sampling_params": {"max_new_tokens": count, "ignore_eos": True, "temperature": 0}}
    answer = await probe.ask(SglangDialect.path, body)
    found = re.findall(rb'"output_ids":\s*\[([^\]]*)\]', b"" if answer is None else answer.body)
    counts = [len(ids.split(b",")) for ids in found]
    if len(counts) < 2 or (counts[-1] == count) == (sum(counts) == count):
        raise probe.failure("SGLang does not report whether its events repeat earlier tokens, and a test did not show it")
    return sum(counts) == count


async def _sglang_context(probe: _Probe, info: Mapping[str, Any]) -> int | None:
    """The limit for prompt and answer together, so that SGLang silently shortens neither."""
    longest = info.get("max_req_input_len")
    if longest:
        return int(longest) + (0 if info.get("allow_auto_truncate") else SGLANG_RESERVE)
    models = _models_in(await probe.ask("/v1/models"))
    return models[0].max_model_len - 2 if models and models[0].max_model_len else None


def _sglang_features(probe: _Probe, traits: SglangTraits, info: Mapping[str, Any]) -> tuple[Feature, ...]:
    events = info.get("kv_events")
    if isinstance(events, dict):
        hint = f"published on port {events.get('endpoint_port_base')}: set --kv-events"
    else:
        hint = "start SGLang with --kv-events-config, and set --kv-events"
    return (
        Feature("exact token ids", True, f"{SglangDialect.path}, {'incremental' if traits.is_incremental else 'cumulative'}"),
        Feature("logprobs", True),
        Feature("prompt logprobs", True, "such answers are not streamed"),
        Feature("grammar", traits.has_grammar, "llguidance" if traits.has_grammar else "start SGLang with --grammar-backend llguidance"),
        Feature(
            "sessions",
            True,
            "tagged KV" if traits.has_sessions else "as affinity only; for more, start SGLang with --enable-session-radix-cache",
        ),
        Feature("retention", traits.priority == "eviction", _RETENTION[traits.priority]),
        probe.events(hint),
        Feature("cached tokens", True),
        Feature("disaggregation", False, "not over HTTP: use --engine sglang with --role"),
    )


# vLLM, and all others.


def _models_in(answer: Answer | None) -> list[_Model]:
    try:
        return [] if answer is None else msgspec.json.decode(answer.body, type=_Models).data
    except (ValueError, RecursionError):
        return []


async def _model(probe: _Probe) -> _Model:
    """The requested model, or the only one. A server that lists no models needs --upstream-model."""
    models, wanted = _models_in(await probe.ask("/v1/models")), probe.settings.model_name
    if wanted is None and not models:
        raise probe.failure("the server lists no models: set --upstream-model")
    names = ", ".join(model.id for model in models)[:200]
    if wanted is None and len(models) > 1:
        raise ConfigError(f"--url {probe.settings.url}: the server has several models: set --upstream-model to one of {names}")
    if wanted is None:
        return models[0]
    found = next((model for model in models if model.id == wanted), None)
    if found is None and models:
        raise ConfigError(f"--url {probe.settings.url}: the server has no --upstream-model {wanted!r}: it has {names}")
    return found or _Model(wanted)


def _one_token(model: _Model, **fields: Any) -> Body:
    return {"model": model.id, "prompt": [ANY_TOKEN], "max_tokens": 1, "temperature": 0, **fields}


async def _vllm(probe: _Probe, model: _Model) -> Found | None:
    """vLLM's token-level route, if it is on."""
    if model.owned_by != "vllm" and probe.settings.route != "vllm":
        return None
    sampling = {"max_tokens": 1, "temperature": 0}
    body = {"model": model.id, "token_ids": [ANY_TOKEN], "sampling_params": sampling}
    choice = await probe.make(VllmDialect.path, body)
    if choice is None or not choice.get("token_ids"):
        return None
    grammar = {**body, "sampling_params": sampling | {"structured_outputs": {"grammar": SOME_GRAMMAR}}}
    has_grammar = await probe.make(VllmDialect.path, grammar) is not None
    takes_salt = await probe.takes_salt(VllmDialect.path, body)
    dialect = VllmDialect(model.id, has_grammar)
    return await _with_tokens(probe, model, dialect, has_logprobs=True, has_grammar=has_grammar, takes_salt=takes_salt)


async def _completions(probe: _Probe, model: _Model) -> Found | None:
    """Completions with token ids."""
    marked = _one_token(model, return_token_ids=True, logprobs=1, return_tokens_as_token_ids=True)
    path = CompletionsDialect.path
    choice = await probe.make(path, marked) or await probe.make(path, _one_token(model, return_token_ids=True))
    if choice is None or not choice.get("token_ids"):
        return None
    tokens = (choice.get("logprobs") or {}).get("tokens") or [""]
    has_logprob_ids = str(tokens[0]).startswith(ID_MARK)
    if model.penstock is not None:
        has_grammar, prefix = "grammar" in model.penstock.get("capabilities", ()), ""
    else:
        prefix = FOR_LLGUIDANCE
        has_grammar = await probe.make(path, _one_token(model, structured_outputs={"grammar": SOME_GRAMMAR})) is not None
    dialect = CompletionsDialect(model.id, has_logprob_ids, has_grammar, prefix)
    takes_salt = await probe.takes_salt(path, _one_token(model))
    return await _with_tokens(probe, model, dialect, has_logprobs=has_logprob_ids, has_grammar=has_grammar, takes_salt=takes_salt)


def _capabilities(*, has_logprobs: bool, has_grammar: bool, takes_salt: bool) -> tuple[Capability, ...]:
    logprobs: tuple[Capability, ...] = ("logprobs", "prompt_logprobs") if has_logprobs else ()
    return (*logprobs, *(("grammar",) if has_grammar else ()), *(("isolation",) if takes_salt else ()))


async def _with_tokens(probe: _Probe, model: _Model, dialect: Dialect, *, has_logprobs: bool, has_grammar: bool, takes_salt: bool) -> Found:
    cache = await _cache_config(probe) if model.owned_by == "vllm" else {}
    block_size, blocks = (int(value) if value.isdigit() else 0 for value in (cache.get("block_size", ""), cache.get("num_gpu_blocks", "")))
    capabilities = _capabilities(has_logprobs=has_logprobs, has_grammar=has_grammar, takes_salt=takes_salt)
    facts = probe.facts(_reported_context(model), block_size or None, capabilities, kv_blocks=blocks)
    no_ids = "" if has_logprobs else "the server sends them without token ids"
    features = (
        Feature("exact token ids", True, dialect.path),
        Feature("logprobs", has_logprobs, no_ids),
        Feature("prompt logprobs", has_logprobs, no_ids or "such answers are not streamed"),
        Feature("grammar", has_grammar, "llguidance" if has_grammar else "the server does not use llguidance"),
        probe.isolation(takes_salt),
        *_of_completions(probe, facts),
    )
    report = EngineReport(_name(model), await _version(probe, model), "any that sends token ids", features=features)
    return Found(lambda _: dialect, facts, report, await _ping_path(probe))


async def _text(probe: _Probe, model: _Model) -> Found:
    if await probe.make(TextDialect.path, _one_token(model)) is None:
        raise probe.failure("no route completes a prompt of token ids")
    text_only = "the server answers with text only, which is tokenized here"
    takes_salt = await probe.takes_salt(TextDialect.path, _one_token(model))
    facts = probe.facts(_reported_context(model), None, _capabilities(has_logprobs=False, has_grammar=False, takes_salt=takes_salt))
    features = (
        *(Feature(name, False, text_only) for name in ("exact token ids", "logprobs", "prompt logprobs")),
        Feature("grammar", False, "the server may not follow it"),
        Feature("stop ids", False, "sent, but the server may ignore them"),
        Feature("exact usage", False, "counts the tokens as tokenized here"),
        Feature("migration", True, "with the tokens so far, as tokenized here"),
        probe.isolation(takes_salt),
        *_of_completions(probe, facts),
    )
    report = EngineReport(_name(model), await _version(probe, model), "any with OpenAI's completions", features=features)
    return Found(lambda tokenizer: TextDialect(model.id, tokenizer, byte_tokens(tokenizer)), facts, report, await _ping_path(probe))


def _of_completions(probe: _Probe, facts: EngineFacts) -> tuple[Feature, ...]:
    """The features of every server that has only completions."""
    length = facts.context_length
    return (
        Feature("sessions", True, "as affinity only"),
        Feature("retention", False, "the server has no such setting over HTTP"),
        probe.events(),
        Feature("cached tokens", False, "reported after the answer, which is too late"),
        Feature("disaggregation", False, "not over this route"),
        Feature("context length", bool(length), f"{length:,} tokens" if length else "the server does not report it: set --context-length"),
    )


def _reported_context(model: _Model) -> int | None:
    return model.max_model_len or (model.penstock or {}).get("context_length") or (model.meta or {}).get("n_ctx")


def _name(model: _Model) -> str:
    names = {"vllm": "vLLM", "penstock": "Penstock", "llamacpp": "llama.cpp", "sglang": "SGLang"}
    return f"{names.get(model.owned_by or '', model.owned_by or 'OpenAI-compatible server')} over HTTP"


async def _version(probe: _Probe, model: _Model) -> str:
    info = await probe.info("/version") if model.owned_by == "vllm" else {}
    return str(info.get("version", UNKNOWN_VERSION))


async def _cache_config(probe: _Probe) -> dict[str, str]:
    """The KV cache's block size and number of blocks, from vLLM's metrics. No other route reports them."""
    answer = await probe.ask("/metrics")
    found = None if answer is None else _CACHE_LABELS.search(answer.body.decode("utf-8", "replace"))
    return {} if found is None else dict(_LABEL.findall(found[1]))


async def _ping_path(probe: _Probe) -> str:
    return "/health" if await probe.ask("/health") is not None else "/v1/models"
