"""vLLM's requests, answers and arguments, without vLLM. `tests/contract/backends` tests the real one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.backends.external.engine import EngineRefused, EngineRequest, EventEndpoints, Feature
from penstock.backends.external.handover import HandoverFailed, unpack_ticket
from penstock.backends.vllm.arguments import PACKAGE, event_endpoints, features_in, merge_flags, report, why_no_events
from penstock.backends.vllm.engine import VllmEngine
from penstock.backends.vllm.handover import connector_settings, ticket_of, transfer_parameters
from penstock.backends.vllm.requests import check_end, check_expanded, chunk_of, sampling_arguments
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Sampling, TokenLogprob

SETTINGS = EngineSettings("/models/tiny")


def request(**fields: Any) -> EngineRequest:
    usual: dict[str, Any] = {"id": "a" * 32, "token_ids": (5, 6), "max_tokens": 10, "seed": 7}
    return EngineRequest(**(usual | fields))


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.32.0", "0.32.0+cpu", "0.32.1rc2", "0.32.0.post1"])
def test_versions_that_work(version: str) -> None:
    assert PACKAGE.problem(version) is None


@pytest.mark.parametrize("version", ["0.29.9", "0.33.0", "0.3.2", "1.32.0", "dev", ""])
def test_versions_that_are_not_known(version: str) -> None:
    assert "is installed, but only 0.30 to below 0.33 is supported: pip install 'vllm>=0.30,<0.33'" in (PACKAGE.problem(version) or "")
    assert PACKAGE.problem(version, any_version=True) is None


def test_no_vllm() -> None:
    assert "--engine vllm needs the package vllm: pip install" in (PACKAGE.problem(None, any_version=True) or "")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it is installed here")
async def test_without_vllm_the_start_says_what_to_install() -> None:
    engine = VllmEngine(SETTINGS)
    with pytest.raises(ConfigError, match="needs the package vllm"):
        await engine.start(lambda _: None)
    await engine.close()
    found = report()
    assert found.version is None
    assert found.problem is not None
    assert "needs the package vllm" in found.problem
    assert not found.features


def test_our_flags_are_handed_on() -> None:
    settings = EngineSettings(
        "/models/tiny", context_length=4096, max_batch=8, kv_memory=0.5, gpu_memory_utilization=0.4, kv_blocks=100, block_size=32
    )
    assert merge_flags(settings, {}) == {
        "model": "/models/tiny",
        "disable_log_stats": True,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**29,
        "gpu_memory_utilization": 0.4,
        "num_gpu_blocks_override": 100,
        "block_size": 32,
    }


def test_unset_flags_are_left_to_vllm() -> None:
    assert merge_flags(SETTINGS, {"max_num_seqs": 8}) == {"model": "/models/tiny", "disable_log_stats": True}


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({"context_length": 100}, "max_model_len", "--context-length is 100 and --engine-args has --max-model-len: give one of them"),
        ({"max_batch": 8}, "max_num_seqs", "--max-batch is 8 and --engine-args has --max-num-seqs"),
        ({"kv_memory": 0.5}, "kv_cache_memory_bytes", "--kv-memory is 0.5 and --engine-args has --kv-cache-memory-bytes"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization", "--gpu-memory-utilization is 0.5 and --engine-args has --gpu-memory-"),
        ({"kv_blocks": 9}, "num_gpu_blocks_override", "--kv-blocks is 9 and --engine-args has --num-gpu-blocks-override"),
    ],
)
def test_the_same_setting_twice_is_refused(ours: dict[str, Any], theirs: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_flags(EngineSettings("/models/tiny", **ours), {theirs: 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "other"}, "--engine-args has --model: "),
        ({"reasoning_parser": "qwen3"}, "--engine-args has --reasoning-parser: "),
        ({"structured_outputs_config": SimpleNamespace(backend="xgrammar")}, "the backend of structured outputs to 'xgrammar'"),
    ],
)
def test_arguments_that_the_user_cannot_set_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_flags(SETTINGS, given)


@pytest.mark.parametrize("backend", ["auto", "guidance"])
def test_its_other_settings_for_grammars_are_allowed(backend: str) -> None:
    given = {"structured_outputs_config": SimpleNamespace(backend=backend)}
    assert merge_flags(SETTINGS, given) == merge_flags(SETTINGS, {})


def events_config(**fields: Any) -> SimpleNamespace:
    usual = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": ""}
    return SimpleNamespace(**(usual | fields))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (events_config(), EventEndpoints("tcp://127.0.0.1:5557")),
        (
            events_config(replay_endpoint="tcp://*:5558", topic="kv"),
            EventEndpoints("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv"),
        ),
        (
            events_config(endpoint="ipc:///run/events", replay_endpoint="ipc:///run/replay"),
            EventEndpoints("ipc:///run/events", "ipc:///run/replay"),
        ),
        # There, vLLM connects to who listens.
        (events_config(endpoint="tcp://collector:5557"), None),
        (events_config(publisher="null"), None),
        (events_config(enable_kv_cache_events=False), None),
        (None, None),
    ],
)
def test_event_endpoints(config: Any, expected: EventEndpoints | None) -> None:
    assert event_endpoints(config) == expected


def test_why_there_are_no_events() -> None:
    assert why_no_events({}) is None
    assert why_no_events({"enable_prefix_caching": True, "kv_events_config": events_config()}) is None
    assert "prefix caching is off" in (why_no_events({"enable_prefix_caching": False}) or "")
    assert "--data-parallel-size" in (why_no_events({"data_parallel_size": 2}) or "")
    assert "--kv-events-config" in (why_no_events({"kv_events_config": events_config(publisher="null")}) or "")


def test_greedy_sends_no_sampling_values() -> None:
    asked = sampling_arguments(request(sampling=Sampling(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)))
    assert asked["temperature"] == 0.0
    assert not {"top_p", "top_k", "min_p", "seed", "logprobs", "prompt_logprobs", "stop_token_ids", "logit_bias"} & asked.keys()


def test_without_a_seed_none_is_sent() -> None:
    asked = sampling_arguments(request(seed=None, sampling=Sampling(temperature=1.0)))
    assert "seed" not in asked
    assert {"top_p", "top_k", "min_p"} <= asked.keys()


def test_every_field_is_sent() -> None:
    sampling = Sampling(0.7, 0.9, 40, 0.05, 0.1, 0.2, 1.3)
    asked = sampling_arguments(
        request(
            sampling=sampling,
            min_tokens=3,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=True,
            stop_ids=(8, 9),
            logit_bias=((4, -100.0), (5, 1.5)),
        )
    )
    assert asked == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "max_tokens": 10,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [8, 9],
        "logit_bias": {4: -100.0, 5: 1.5},
        "logprobs": 2,
        "prompt_logprobs": 2,
    }


@pytest.mark.parametrize(("logprobs", "expected"), [(None, 0), (0, 0), (4, 4)])
def test_prompt_logprobs_have_as_many_alternatives(logprobs: int | None, expected: int) -> None:
    assert sampling_arguments(request(prompt_logprobs=True, logprobs=logprobs))["prompt_logprobs"] == expected


def test_only_the_grammar_decides_its_end() -> None:
    asked = sampling_arguments(request(lark='start: "a"', min_tokens=5, ignore_eos=True))
    assert "min_tokens" not in asked
    assert asked["ignore_eos"] is False


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert sampling_arguments(request(min_tokens=50))["min_tokens"] == 10


def flat(*positions: list[tuple[int, float, int]]) -> SimpleNamespace:
    """vLLM's table, from (token, logprob, rank) of each position."""
    starts, ends = [], []
    entries: list[tuple[int, float, int]] = []
    for position in positions:
        starts.append(len(entries))
        entries += position
        ends.append(len(entries))
    ids, values, ranks = ([entry[index] for entry in entries] for index in range(3))
    return SimpleNamespace(start_indices=starts, end_indices=ends, token_ids=ids, logprobs=values, ranks=ranks)


def output(token_ids: Any, *, logprobs: Any = None, finish: str | None = None, cached: int | None = 0, prompt: Any = None) -> Any:
    completion = SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason=finish)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached, prompt_logprobs=prompt)


def test_tokens_are_copied() -> None:
    growing = [1, 2]
    chunk = chunk_of(output(growing, cached=32), None)
    growing.append(3)
    assert chunk.token_ids == (1, 2)
    assert (chunk.logprobs, chunk.finish, chunk.cached_tokens, chunk.prompt_logprobs) == (None, None, 32, None)


@pytest.mark.parametrize(("reason", "finish"), [(None, None), ("stop", "stop"), ("length", "length"), ("repetition", "stop")])
def test_normal_ends(reason: str | None, finish: str | None) -> None:
    ended = output([1], finish=reason)
    assert chunk_of(ended, None).finish == finish
    if reason is not None:
        check_end(ended)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_unexpected_ends_can_be_retried(reason: str) -> None:
    ended = output([1, 2], finish=reason)
    chunk = chunk_of(ended, None)
    assert (chunk.token_ids, chunk.finish) == ((1, 2), None)
    with pytest.raises(EngineRefused, match=reason) as refused:
        check_end(ended)
    assert refused.value.fault.retryable


def test_the_chosen_token_alone() -> None:
    chunk = chunk_of(output([7, 8], logprobs=flat([(7, -0.5, 1)], [(8, -2.0, 4)])), 0)
    assert chunk.logprobs == (TokenLogprob(-0.5), TokenLogprob(-2.0))


def test_alternatives_of_one_step() -> None:
    table = flat([(7, -0.5, 1), (7, -0.5, 1), (9, -1.0, 2)], [(8, -3.0, 5), (1, -0.1, 1), (2, -0.2, 2)])
    chunk = chunk_of(output([7, 8], logprobs=table), 2)
    assert chunk.logprobs == (TokenLogprob(-0.5, ((7, -0.5), (9, -1.0))), TokenLogprob(-3.0, ((1, -0.1), (2, -0.2))))


def test_alternatives_of_merged_steps() -> None:
    """vLLM merges by token id: the sampled token is there once, with its rank."""
    table = flat(
        [(9, -1.0, 2), (7, -0.5, 1), (5, -2.0, 3)],
        [(7, -0.5, 1), (9, -1.0, 2), (5, -2.0, 3)],
        [(8, -9.0, 60), (1, -0.1, 1), (2, -0.2, 2), (3, -0.3, 3)],
    )
    chunk = chunk_of(output([9, 7, 8], logprobs=table), 3)
    likeliest = ((7, -0.5), (9, -1.0), (5, -2.0))
    assert chunk.logprobs == (
        TokenLogprob(-1.0, likeliest),
        TokenLogprob(-0.5, likeliest),
        TokenLogprob(-9.0, ((1, -0.1), (2, -0.2), (3, -0.3))),
    )


def test_the_prompt_has_one_entry_per_token_and_the_first_is_none() -> None:
    table = flat([], [(6, -1.5, 3), (2, -0.5, 1)])
    chunk = chunk_of(output([1], logprobs=flat([(1, -0.1, 1), (1, -0.1, 1)]), prompt=table), 1)
    assert chunk.prompt_logprobs == (None, TokenLogprob(-1.5, ((2, -0.5),)))


def test_later_outputs_have_no_prompt_logprobs() -> None:
    assert chunk_of(output([1], prompt=[]), None).prompt_logprobs is None


@pytest.mark.parametrize("table", [None, flat([(7, -0.5, 1)])])
def test_a_missing_logprob_is_refused(table: Any) -> None:
    with pytest.raises(EngineRefused, match="logprobs for 2 tokens"):
        chunk_of(output([7, 8], logprobs=table), 0)


def source_of(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


def available(features: tuple[Feature, ...]) -> set[str]:
    return {feature.name for feature in features if feature.is_available}


def test_the_report_lists_what_the_package_has(tmp_path: Path) -> None:
    source = source_of(
        tmp_path,
        v1__engine__async_llm="class AsyncLLM:\n    async def generate(self, prompt, *, priority=0, session_id=None): ...\n",
        sampling_params="class SamplingParams:\n    logprobs: int\n    prompt_logprobs: int\n    flat_logprobs: bool\n",
        distributed__kv_events="class ZmqEventPublisher: ...\n",
        v1__structured_output__backend_guidance="class GuidanceBackend: ...\n",
    )
    (source / "v1" / "engine" / "__init__.py").write_text("class EngineCoreRequest:\n    cache_salt: str | None\n", encoding="utf-8")
    assert available(features_in(source, has_llguidance=True, has_nixl=True)) == {
        "disaggregation",
        "isolation",
        "sessions",
        "KV events",
        "logprobs",
        "prompt logprobs",
        "grammar",
        "priority",
    }
    assert "grammar" not in available(features_in(source, has_llguidance=False, has_nixl=True))


def test_the_report_of_a_package_that_lacks_features(tmp_path: Path) -> None:
    features = features_in(tmp_path, has_llguidance=True, has_nixl=False)
    assert available(features) == {"sessions"}
    assert all(feature.detail for feature in features)


def whereabouts(**changes: Any) -> dict[str, Any]:
    """As vLLM 0.32 writes them, with fields that nobody reads."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[7, 8, 9]],
        "remote_engine_id": "0f012bdd-33fb-446a-b1c9-af0c4d4a9519",
        "remote_request_id": "a" * 32,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 65,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        **changes,
    }


def ended(found: dict[str, Any] | None, made_at: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(kv_transfer_params=found, metrics=SimpleNamespace(last_token_ts=made_at))


def test_a_ticket_says_where_the_kv_is_and_since_when() -> None:
    """The lease began in vLLM's core. Its answer may have waited for this process."""
    ticket = unpack_ticket(ticket_of(ended(whereabouts(), 5.0), 12.0, (65.0, 1000.0)))
    assert (ticket.made, ticket.lease_seconds) == (940.0, 12.0)
    assert unpack_ticket(ticket_of(ended(whereabouts()), 12.0, (65.0, 1000.0))).made == 1000.0
    parameters = transfer_parameters(ticket.body, 65, 32)
    assert parameters.items() <= whereabouts().items()
    assert parameters.keys() == whereabouts().keys() - {"remote_blocks_expiry_time", "transfer_mode"}


@pytest.mark.parametrize("found", [None, {}, whereabouts(do_remote_prefill=False), whereabouts(transfer_mode="push")], ids=str)
def test_no_ticket(found: dict[str, Any] | None) -> None:
    assert ticket_of(ended(found), 12.0, (65.0, 1000.0)) == b""


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": [[7, 8]]},
        {"remote_block_ids": [[7, 8, 9, 10]]},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": []},
        {"remote_block_ids": [[7, 8, -1]]},
        {"remote_block_ids": [[7, 8, 2**31]]},
        {"remote_block_ids": [[7, 8, "9"]]},
        {"remote_port": 0},
        {"remote_port": 65536},
        {"remote_port": True},
        {"remote_host": ""},
        {"remote_host": "a host"},
        {"remote_host": "x" * 257},
        {"remote_engine_id": "a\nb"},
        {"tp_size": 0},
        {"tp_size": 4097},
    ],
    ids=str,
)
def test_a_ticket_that_vllm_cannot_use(changes: dict[str, Any]) -> None:
    """A wrong number of blocks fails an assertion in vLLM's core, which ends it."""
    with pytest.raises(HandoverFailed):
        transfer_parameters(msgspec.msgpack.encode(whereabouts(**changes)), 65, 32)


def test_several_kinds_of_attention_may_have_fewer_blocks() -> None:
    transfer_parameters(msgspec.msgpack.encode(whereabouts(remote_block_ids=[[7, 8, 9], [4]])), 65, 32)


def test_a_worker_with_a_role_has_the_connector() -> None:
    assert connector_settings(SETTINGS) is None
    for role in ("prefill", "decode"):
        connector = connector_settings(EngineSettings("/models/tiny", role=role))
        assert connector is not None
        assert (connector["kv_connector"], connector["kv_role"], connector["kv_load_failure_policy"]) == (
            "NixlConnector",
            "kv_both",
            "fail",
        )


def test_a_prompt_that_vllm_expands_to_something_else_is_refused() -> None:
    check_expanded(SimpleNamespace(prompt_token_ids=[5, 6]), request())
    for prompt, said in (([5, 6, 6], "3 tokens instead of 2"), ([5, 7], "also 2 tokens, but other ones"), (None, "0 tokens instead of 2")):
        with pytest.raises(EngineRefused, match=said) as refused:
            check_expanded(SimpleNamespace(prompt_token_ids=prompt), request())
        assert (refused.value.fault.code, refused.value.fault.retryable) == ("image_mismatch", False)
