"""The parts of the SGLang engine that need no SGLang. The rest is in `tests/contract/backends`, against the real one."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging.config
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from penstock.backends.external.engine import Chunk, EngineImage, EngineRefused, EngineRequest, EventEndpoints, PromptImages
from penstock.backends.external.handover import HandoverFailed
from penstock.backends.external.in_process import first_error, forget_directory, write_logging_config
from penstock.backends.sglang.arguments import DEFAULT_PAGE_SIZE, PACKAGE, make_arguments, report
from penstock.backends.sglang.engine import SglangEngine
from penstock.backends.sglang.requests import (
    ChunkReader,
    as_ebnf,
    as_parameters,
    image_parameters,
    kept_until,
    meeting_parameters,
    priority_use,
    sampling_parameters,
)
from penstock.backends.sglang.sessions import StreamingSessions
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Export, KvSource, Sampling, TokenLogprob

PROMPT = (5, 6, 7)
LENGTH = {"type": "length", "length": 3}
HERE = EventEndpoints("ipc:///run/here/events", "ipc:///run/here/replay")


def asked(**settings: Any) -> EngineRequest:
    return EngineRequest("0" * 32, **{"token_ids": PROMPT, "max_tokens": 3, "seed": 1, **settings})


def raw(token_ids: list[int], count: int, finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {"text": "…", "output_ids": token_ids, "meta_info": {"finish_reason": finish, "completion_tokens": count, **meta}}


def breach(reader: ChunkReader, chunk: dict[str, Any]) -> str:
    with pytest.raises(EngineRefused) as refused:
        reader.read(chunk)
    assert refused.value.fault.code == "stream_breach"
    assert not refused.value.fault.retryable
    return refused.value.fault.message


class TestIncrementalChunks:
    def test_each_has_the_new_tokens(self) -> None:
        reader = ChunkReader(asked(), is_incremental=True)
        assert reader.read(raw([1], 1, cached_tokens=2)) == Chunk((1,), cached_tokens=2)
        assert reader.read(raw([2, 3], 3, LENGTH)) == Chunk((2, 3), finish="length")

    def test_an_engine_that_repeats_itself_is_caught_at_its_second_chunk(self) -> None:
        reader = ChunkReader(asked(), is_incremental=True)
        reader.read(raw([1], 1))
        assert "3 tokens, but it reports 2" in breach(reader, raw([1, 2], 2))

    def test_a_lost_token_is_caught(self) -> None:
        reader = ChunkReader(asked(), is_incremental=True)
        reader.read(raw([1], 1))
        assert "2 tokens, but it reports 3" in breach(reader, raw([3], 3))

    def test_logprobs_are_those_of_the_chunk(self) -> None:
        reader = ChunkReader(asked(logprobs=1), is_incremental=True)
        first = reader.read(raw([1], 1, output_token_logprobs=[(-0.1, 1, None)], output_top_logprobs=[[(-0.1, 1, None)]]))
        assert first.logprobs == (TokenLogprob(-0.1, ((1, -0.1),)),)
        two = {
            "output_token_logprobs": [(-0.2, 2, None), (-0.3, 3, None)],
            "output_top_logprobs": [[(-0.2, 2, None)], [(-0.25, 9, None)]],
        }
        assert reader.read(raw([2, 3], 3, LENGTH, **two)).logprobs == (TokenLogprob(-0.2, ((2, -0.2),)), TokenLogprob(-0.3, ((9, -0.25),)))


class TestCumulativeChunks:
    def test_they_are_made_disjoint(self) -> None:
        reader = ChunkReader(asked(), is_incremental=False)
        assert reader.read(raw([1], 1)).token_ids == (1,)
        assert reader.read(raw([1, 2, 3], 3, LENGTH)) == Chunk((2, 3), finish="length")

    def test_a_list_that_grew_since_its_chunk_was_made_is_read_once(self) -> None:
        reader = ChunkReader(asked(), is_incremental=False)
        live = [1]
        first, second = raw(live, 1), raw(live, 2)
        live += [2, 3]
        taken = reader.read(first).token_ids
        live.append(4)
        assert taken == (1, 2, 3)
        assert reader.read(second).token_ids == (4,)

    def test_an_engine_that_does_not_repeat_itself_is_caught_at_its_second_chunk(self) -> None:
        reader = ChunkReader(asked(), is_incremental=False)
        reader.read(raw([1], 1))
        assert "1 tokens, but it reports 2" in breach(reader, raw([1], 2))

    def test_another_token_at_the_seam_is_caught(self) -> None:
        reader = ChunkReader(asked(), is_incremental=False)
        reader.read(raw([1], 1))
        assert "has token 2 where 1 came before" in breach(reader, raw([2], 2))

    def test_a_shorter_chunk_is_caught(self) -> None:
        reader = ChunkReader(asked(), is_incremental=False)
        reader.read(raw([1, 2], 2))
        assert "1 tokens came after one of 2" in breach(reader, raw([1], 2))

    def test_at_the_end_the_count_is_exact(self) -> None:
        reader = ChunkReader(asked(), is_incremental=False)
        assert "4 tokens, but it reports 3" in breach(reader, raw([1, 2, 3, 4], 3, LENGTH))

    def test_only_new_logprobs_are_read(self) -> None:
        reader = ChunkReader(asked(logprobs=0), is_incremental=False)
        entries = [(-0.1, 1, None)]
        assert reader.read(raw([1], 1, output_token_logprobs=entries)).logprobs == (TokenLogprob(-0.1),)
        entries += [(-0.2, 2, None), (-0.3, 3, None)]
        last = reader.read(raw([1, 2, 3], 3, LENGTH, output_token_logprobs=entries))
        assert last.logprobs == (TokenLogprob(-0.2), TokenLogprob(-0.3))


@pytest.mark.parametrize("is_incremental", [True, False])
class TestEveryChunk:
    def test_only_the_reason_of_an_abort_is_read(self, is_incremental: bool) -> None:
        """It may repeat its last token or the whole text, have an invented token, and lack all counts."""
        reader = ChunkReader(asked(), is_incremental=is_incremental)
        reader.read(raw([1], 1))
        abort = {"output_ids": [1, 1], "text": "all of it", "meta_info": {"finish_reason": {"type": "abort", "message": "Aborted"}}}
        with pytest.raises(EngineRefused) as refused:
            reader.read(abort)
        assert refused.value.fault.code == "engine_aborted"
        assert refused.value.fault.retryable

    @pytest.mark.parametrize(
        ("message", "code"),
        [("Failed to compile ebnf grammar: …", "invalid_grammar"), ("Input length (9 tokens) exceeds …", "engine_refused")],
    )
    def test_a_wrong_request_is_not_retryable(self, is_incremental: bool, message: str, code: str) -> None:
        finish = {"type": "abort", "message": message, "status_code": 400}
        with pytest.raises(EngineRefused) as refused:
            ChunkReader(asked(), is_incremental=is_incremental).read(raw([0], 1, finish))
        assert (refused.value.fault.code, refused.value.fault.retryable) == (code, False)

    def test_an_early_end_for_length_is_caught(self, is_incremental: bool) -> None:
        reader = ChunkReader(asked(max_tokens=9), is_incremental=is_incremental)
        assert "2 of 9 tokens" in breach(reader, raw([1, 2], 2, LENGTH))

    def test_an_end_of_an_unknown_kind_is_caught(self, is_incremental: bool) -> None:
        assert "tired" in breach(ChunkReader(asked(), is_incremental=is_incremental), raw([1], 1, {"type": "tired"}))

    def test_the_token_that_ended_the_text_is_among_the_tokens(self, is_incremental: bool) -> None:
        chunk = ChunkReader(asked(), is_incremental=is_incremental).read(raw([4, 2], 2, {"type": "stop", "matched": 2}))
        assert chunk == Chunk((4, 2), finish="stop")

    def test_stop_ids_work_with_ignore_eos(self, is_incremental: bool) -> None:
        """SGLang would ignore both."""
        reader = ChunkReader(asked(stop_ids=(8,), ignore_eos=True, max_tokens=9, logprobs=0), is_incremental=is_incremental)
        entries = [(-0.1, 1, None), (-0.2, 8, None), (-0.3, 3, None)]
        chunk = reader.read(raw([1, 8, 3], 3, output_token_logprobs=entries))
        assert chunk == Chunk((1, 8), (TokenLogprob(-0.1), TokenLogprob(-0.2)), "stop")

    def test_missing_logprobs_are_caught(self, is_incremental: bool) -> None:
        reader = ChunkReader(asked(logprobs=0), is_incremental=is_incremental)
        assert "1 logprobs do not fit the 2 new tokens" in breach(reader, raw([1, 2], 2, output_token_logprobs=[(-0.1, 1, None)]))
        reader = ChunkReader(asked(logprobs=0), is_incremental=is_incremental)
        breach(reader, raw([1], 1, output_token_logprobs=[(-0.1, 9, None)]))

    def test_prompt_logprobs_come_once_with_none_for_the_first(self, is_incremental: bool) -> None:
        reader = ChunkReader(asked(prompt_logprobs=True, logprobs=1), is_incremental=is_incremental)
        meta: dict[str, Any] = {
            "input_token_logprobs": [(None, 5, None), (-0.5, 6, None), (-0.6, 7, None)],
            "input_top_logprobs": [None, [(-0.5, 6, None)], [(-0.1, 9, None)]],
            "output_token_logprobs": [(-0.1, 1, None)],
            "output_top_logprobs": [[(-0.1, 1, None)]],
        }
        chunk = reader.read(raw([1], 1, **meta))
        assert chunk.prompt_logprobs == (None, TokenLogprob(-0.5, ((6, -0.5),)), TokenLogprob(-0.6, ((9, -0.1),)))
        assert reader.read(raw([] if is_incremental else [1], 1, **{**meta, "output_token_logprobs": []})).prompt_logprobs is None

    def test_prompt_logprobs_of_part_of_the_prompt_are_caught(self, is_incremental: bool) -> None:
        reader = ChunkReader(asked(prompt_logprobs=True), is_incremental=is_incremental)
        assert "1 logprobs for a prompt of 3" in breach(reader, raw([1], 1, input_token_logprobs=[(-0.5, 7, None)]))


class TestParameters:
    def test_every_field_is_sent(self) -> None:
        sampling = Sampling(
            temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.2
        )
        request = asked(sampling=sampling, min_tokens=2, ignore_eos=True, stop_ids=(8, 9), logit_bias=((4, -2.0),), seed=2**63 - 1)
        assert sampling_parameters(request) == {
            "max_new_tokens": 3,
            "min_new_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "repetition_penalty": 1.2,
            "ignore_eos": True,
            "sampling_seed": 2**63 - 1,
            "stop_token_ids": [8, 9],
            "logit_bias": {"4": -2.0},
        }

    def test_without_a_seed_a_random_one_is_sent(self) -> None:
        seeds = {sampling_parameters(asked(seed=None))["sampling_seed"] for _ in range(8)}
        assert len(seeds) == 8
        assert all(0 <= seed < 2**63 for seed in seeds)

    def test_the_whole_vocabulary_is_minus_one(self) -> None:
        assert sampling_parameters(asked())["top_k"] == -1

    def test_a_grammar_may_end_before_min_tokens(self) -> None:
        parameters = sampling_parameters(asked(lark='start: "a"', min_tokens=2))
        assert (parameters["ebnf"], parameters["min_new_tokens"]) == ('start: "a"', 0)

    @pytest.mark.parametrize("lark", ['start: "a"', '%llguidance {}\nstart[stop="b"]: /a*/', "x: /a/\n  start : x"])
    def test_recognizable_lark_is_unchanged(self, lark: str) -> None:
        assert as_ebnf(lark) == lark

    def test_other_lark_is_marked(self) -> None:
        assert as_ebnf('start[stop="b"]: /a*/') == '%llguidance {}\nstart[stop="b"]: /a*/'

    def test_logprobs_and_those_of_the_prompt(self) -> None:
        def logprobs(request: EngineRequest) -> tuple[Any, ...]:
            parameters = as_parameters(request, None, tags_sessions=False, priority="none")
            return tuple(parameters.get(name) for name in ("return_logprob", "top_logprobs_num", "logprob_start_len"))

        assert logprobs(asked()) == (None, None, None)
        assert logprobs(asked(logprobs=0)) == (True, 0, -1)
        assert logprobs(asked(logprobs=4, prompt_logprobs=True)) == (True, 4, 0)
        assert logprobs(asked(prompt_logprobs=True)) == (True, 0, 0)

    def test_session_and_priority_are_sent_only_if_sglang_uses_them(self) -> None:
        request = asked(session_id="s", priority=4, session_seconds=60.0)
        without = as_parameters(request, None, tags_sessions=False, priority="none")
        assert not {"session_id", "session_params", "priority"} & without.keys()
        before = time.time()
        with_both = as_parameters(request, None, tags_sessions=True, priority="eviction")
        assert with_both["session_id"] == "s"
        assert kept_until(request, before, tags_sessions=True) <= with_both["priority"]
        assert with_both["priority"] <= kept_until(request, time.time(), tags_sessions=True)

    def test_kv_is_kept_as_long_as_asked_and_no_longer(self) -> None:
        def until(now: float, *, tags_sessions: bool = False, **fields: Any) -> int:
            return kept_until(asked(**fields), now, tags_sessions=tags_sessions)

        assert until(0) < until(0, priority=1) < until(0, keep_seconds=6000.0)
        assert until(0, keep_seconds=50.0) == until(50)
        assert until(0, session_seconds=50.0, keep_seconds=20.0) == until(50)
        # SGLang evicts the KV of open sessions last; when one is closed, its KV is as old as any other.
        assert until(0, tags_sessions=True, session_seconds=50.0) == until(0)
        # One more is what SGLang adds itself.
        assert until(0) + 1 < until(0.01)
        assert -(2**63) <= until(0, priority=-(2**70)) < until(2e9, priority=2**70) < 2**63

    def test_where_sglang_schedules_by_priority_it_is_the_clients_own(self) -> None:
        arguments = {"enable_priority_scheduling": True, "radix_eviction_policy": "priority"}
        assert priority_use(arguments) == "scheduling"
        assert priority_use({**arguments, "enable_priority_scheduling": False}) == "eviction"
        assert priority_use({"radix_eviction_policy": "lru"}) == "none"
        request = asked(priority=4, keep_seconds=60.0)
        assert as_parameters(request, None, tags_sessions=True, priority=priority_use(arguments))["priority"] == 4

    def test_both_engines_of_a_meeting_get_the_same_fields(self) -> None:
        transfer, address = bytes(range(255, 239, -1)), "tcp://[fd00::9]:8998"
        source = meeting_parameters(asked(export=Export(transfer, 5.0)), address)
        target = meeting_parameters(asked(source=KvSource(transfer, address)), "")
        assert source == target
        assert (source["bootstrap_host"], source["bootstrap_port"]) == ("fd00::9", 8998)
        assert 0 <= source["bootstrap_room"] < 2**63
        assert meeting_parameters(asked(), address) == {}

    @pytest.mark.parametrize("address", ["", "unix:/tmp/x", "tcp://host", "host:1"])
    def test_no_meeting_at_another_address(self, address: str) -> None:
        with pytest.raises(HandoverFailed, match="address"):
            meeting_parameters(asked(source=KvSource(bytes(16), address)), "")


class Arguments:
    """Stands for SGLang's ServerArgs: a few of its flags, declared as SGLang declares them."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", "--model", required=True)
        for name, default in (("context-length", None), ("page-size", None), ("max-running-requests", None), ("max-total-tokens", None)):
            parser.add_argument(f"--{name}", type=int, default=default)
        parser.add_argument("--tokenizer-worker-num", type=int, default=1)
        parser.add_argument("--data-parallel-size", "--dp-size", dest="dp_size", type=int, default=1)
        parser.add_argument("--grammar-backend", choices=["xgrammar", "llguidance"], default=None)
        parser.add_argument("--radix-eviction-policy", default="lru")
        parser.add_argument("--kv-events-config", default=None)
        parser.add_argument("--log-level", default="info")
        parser.add_argument("--config")
        parser.add_argument("--mem-fraction-static", type=float, default=None)
        for name in ("incremental-streaming-output", "disable-radix-cache", "enable-session-radix-cache", "allow-auto-truncate"):
            parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument("--enable-streaming-session", action="store_true")
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"], default="null")
        parser.add_argument("--disaggregation-transfer-backend", default="mooncake")
        parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        if args.context_length == 13:
            raise ValueError("13 brings bad luck")
        return args


def made(words: str = "", *, version: str = "0.5.23", **settings: Any) -> tuple[Any, EventEndpoints | None]:
    return make_arguments(EngineSettings("/models/m", tuple(words.split()), **settings), Arguments, HERE, version)


class TestArguments:
    def test_defaults(self) -> None:
        arguments, endpoints = made()
        assert (arguments.model_path, arguments.page_size, arguments.grammar_backend) == ("/models/m", DEFAULT_PAGE_SIZE, "llguidance")
        assert (arguments.radix_eviction_policy, arguments.enable_session_radix_cache) == ("priority", True)
        assert not arguments.incremental_streaming_output
        assert json.loads(arguments.kv_events_config)["replay_endpoint"] == HERE.replay
        assert endpoints == HERE

    def test_the_user_overrides_defaults(self) -> None:
        arguments, _ = made("--page-size 32 --grammar-backend xgrammar --radix-eviction-policy lfu --log-level info")
        assert (arguments.page_size, arguments.grammar_backend, arguments.radix_eviction_policy) == (32, "xgrammar", "lfu")
        assert arguments.log_level == "info"

    def test_a_role_makes_it_one_half_of_a_pair(self) -> None:
        assert made()[0].disaggregation_mode == "null"
        prefill, _ = made(role="prefill", kv_host="127.0.0.2")
        assert (prefill.disaggregation_mode, prefill.disaggregation_transfer_backend, prefill.host) == ("prefill", "nixl", "127.0.0.2")
        assert prefill.disaggregation_bootstrap_port != 8998, "two on one machine"
        decode, _ = made("--disaggregation-transfer-backend mooncake_tcp", role="decode")
        assert (decode.disaggregation_mode, decode.disaggregation_transfer_backend) == ("decode", "mooncake_tcp")
        assert made("--disaggregation-bootstrap-port 77", role="prefill")[0].disaggregation_bootstrap_port == 77
        with pytest.raises(ConfigError, match="--role is decode and --engine-args has --disaggregation-mode prefill"):
            made("--disaggregation-mode prefill", role="decode")

    def test_penstocks_flags_are_handed_on(self) -> None:
        arguments, _ = made(
            "--page-size 32", context_length=4096, max_batch=8, kv_blocks=100, gpu_memory_utilization=0.6, streaming_sessions=True
        )
        assert (arguments.context_length, arguments.max_running_requests, arguments.max_total_tokens) == (4096, 8, 3200)
        assert (arguments.enable_streaming_session, arguments.mem_fraction_static) == (True, 0.6)
        arguments, _ = made(block_size=64, kv_blocks=100)
        assert (arguments.page_size, arguments.max_total_tokens) == (64, 6400)

    @pytest.mark.parametrize(
        ("words", "settings", "flag"),
        [
            ("--context-length 1", {"context_length": 2}, "--context-length"),
            ("--max-running-requests 1", {"max_batch": 2}, "--max-batch"),
            ("--mem-fraction-static 0.5", {"gpu_memory_utilization": 0.6}, "--gpu-memory-utilization"),
            ("--max-total-tokens 1", {"kv_blocks": 2}, "--kv-blocks"),
            ("--page-size 32", {"block_size": 64}, "--block-size"),
            ("--model /other", {}, "--model"),
        ],
    )
    def test_the_same_setting_twice_is_refused(self, words: str, settings: dict[str, Any], flag: str) -> None:
        with pytest.raises(ConfigError, match=f"^{flag} and --engine-args both set"):
            made(words, **settings)

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            ("--tokenizer-worker-num 2", "--tokenizer-worker-num 2"),
            ("--dp-size 2", "--dp-size 2"),
            ("--allow-auto-truncate", "--allow-auto-truncate"),
            ("--config flags.yaml", "--config flags.yaml"),
        ],
    )
    def test_flags_that_could_lose_tokens_are_refused_by_name(self, words: str, named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            made(words)

    def test_incremental_chunks_of_a_version_that_drops_them_are_refused(self) -> None:
        assert made("--incremental-streaming-output", version="0.5.10.post1")[0].incremental_streaming_output
        with pytest.raises(ConfigError, match=r"0\.5\.9 drops chunks"):
            made("--incremental-streaming-output", version="0.5.9")

    @pytest.mark.parametrize("words", ["--no-such-flag", "--page-size many", "--grammar-backend own", "--help"])
    def test_a_wrong_flag_raises_instead_of_ending_the_process(self, words: str) -> None:
        with pytest.raises(ConfigError, match="--engine-args: SGLang does not take this"):
            made(words)

    def test_a_wrong_value_raises(self) -> None:
        with pytest.raises(ConfigError, match="13 brings bad luck"):
            made("--context-length 13")

    def test_memory_is_refused_with_what_to_use(self) -> None:
        with pytest.raises(ConfigError, match="--kv-memory is 2, but SGLang has no such setting: use --kv-blocks"):
            made(kv_memory=2.0)

    def test_without_a_cache_there_are_no_events_and_no_sessions(self) -> None:
        arguments, endpoints = made("--disable-radix-cache")
        assert (arguments.kv_events_config, arguments.enable_session_radix_cache, endpoints) == (None, False, None)

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ('{"publisher":"zmq","endpoint":"tcp://*:9","topic":"t"}', EventEndpoints("tcp://127.0.0.1:9", None, "t")),
            (
                '{"publisher":"zmq","endpoint":"tcp://0.0.0.0:9","replay_endpoint":"tcp://*:8"}',
                EventEndpoints("tcp://127.0.0.1:9", "tcp://127.0.0.1:8"),
            ),
            ('{"publisher":"zmq","endpoint":"tcp://collector:9"}', None),
            ('{"publisher":"null"}', None),
        ],
    )
    def test_events_at_addresses_of_the_user(self, config: str, expected: EventEndpoints | None) -> None:
        assert make_arguments(EngineSettings("/m", ("--kv-events-config", config)), Arguments, HERE, "0.5.23")[1] == expected


class TestVersions:
    @pytest.mark.parametrize("version", ["0.5.21", "0.5.22.post1", "0.5.23", "0.5.23+cpu"])
    def test_supported_versions(self, version: str) -> None:
        assert PACKAGE.problem(version) is None

    @pytest.mark.parametrize("version", ["0.4.10", "0.5.9", "0.5.20.post1", "0.5.24", "0.6.0"])
    def test_other_versions_are_refused_with_the_range(self, version: str) -> None:
        assert f"SGLang {version} is installed, but only 0.5.21 to below 0.5.24 is supported: pip install" in (
            PACKAGE.problem(version) or ""
        )
        assert PACKAGE.problem(version, any_version=True) is None

    async def test_without_the_package_the_start_says_what_to_install(self) -> None:
        with pytest.raises(ConfigError, match="needs the package sglang: pip install"):
            await SglangEngine(EngineSettings("/m")).start(lambda _: None)

    def test_without_the_package_the_report_says_what_to_install(self) -> None:
        found = report()
        assert (found.engine, found.version, found.features) == ("sglang", None, ())
        assert "pip install" in str(found.problem)


class SpreadEngine:
    """SGLang's Engine once it runs, with one process for each of two devices: only the first of them answers."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "incremental_streaming_output": True,
        "enable_session_radix_cache": True,
        "skip_tokenizer_init": False,
        "radix_eviction_policy": "priority",
        "disaggregation_mode": "null",
        "grammar_backend": "llguidance",
        "page_size": 32,
        "dcp_size": None,
        "effective_max_running_requests_per_dp": 8,
    }

    def __init__(self) -> None:
        ranks = [{"max_req_input_len": 2042, "max_total_num_tokens": 8192} for _ in range(2)]
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=ranks)

    async def async_generate(self, input_ids: list[int], cache_salt: str | None = None) -> None: ...


def test_facts_of_a_model_on_several_devices() -> None:
    engine = SglangEngine(EngineSettings("/m"))
    engine._engine = SpreadEngine()
    facts = engine._facts(SpreadEngine.ARGUMENTS)
    assert (facts.context_length, facts.block_size, facts.kv_blocks, facts.max_batch) == (2042, 32, 256, 8)
    assert "isolation" in facts.capabilities, "it takes a salt"


class Engine:
    """The engine of streaming sessions: which are open, and whether more may be opened."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.is_full = False
        self.asked = asyncio.Event()

    async def open_session(self, session_id: str) -> bool:
        self.asked.set()
        await asyncio.sleep(0)
        is_new = not self.is_full and session_id not in self.open
        if is_new:
            self.open.append(session_id)
        return is_new

    async def close_session(self, session_id: str) -> None:
        self.open.remove(session_id)


class TestStreamingSessions:
    def setup_method(self) -> None:
        self.engine = Engine()
        self.sessions = StreamingSessions(self.engine.open_session, self.engine.close_session, start_id=1)

    async def new(self, *token_ids: int, generated: tuple[int, ...] = (), is_last: bool = True) -> tuple[int, ...] | None:
        turn = await self.sessions.begin(asked(session_id="s", token_ids=token_ids))
        if turn is None:
            return None
        turn.take(generated, is_last=is_last)
        turn.end()
        return turn.new

    async def test_only_new_tokens_are_sent(self) -> None:
        assert await self.new(1, 2, 3, generated=(4, 5)) == (1, 2, 3)
        assert await self.new(1, 2, 3, 4, 5, 6, generated=(7,)) == (6,)
        assert await self.new(1, 2, 3, 4, 5, 6, 7, 8) == (8,)
        assert self.engine.open == ["s"]

    async def test_after_a_turn_with_an_unread_end_the_session_is_reopened(self) -> None:
        """The engine dropped the turn if it was aborted, and kept it if it had ended before the abort."""
        await self.new(2, 3, generated=(4,))
        assert await self.new(2, 3, 4, 5, generated=(6,), is_last=False) == (5,)
        assert await self.new(2, 3, 4, 5, 9, generated=(7,)) == (2, 3, 4, 5, 9)
        assert await self.new(2, 3, 4, 5, 9, 7, 8) == (8,)
        assert self.engine.open == ["s"]

    async def test_a_session_whose_opening_was_cancelled_is_reopened(self) -> None:
        opening = asyncio.create_task(self.sessions.begin(asked(session_id="s")))
        await self.engine.asked.wait()
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        self.engine.open.append("s")
        assert await self.new(2, 3, generated=(4,)) == (2, 3)
        assert await self.new(2, 3, 4, 5) == (5,)
        await self.sessions.close_session("s")
        assert self.engine.open == []

    async def test_a_turn_with_own_stops_runs_without_a_session(self) -> None:
        """The engine continues after a stop token that it ignores."""
        await self.new(2, 3, generated=(4,))
        assert await self.sessions.begin(asked(session_id="s", token_ids=(2, 3, 4, 5), ignore_eos=True, stop_ids=(6,))) is None
        assert await self.new(2, 3, 4, 5, 6, 7) == (5, 6, 7)

    @pytest.mark.parametrize("token_ids", [(2, 9, 4, 5), (2, 3), (2, 3, 4), (2, 3, 4, 1, 5)])
    async def test_other_tokens_reopen_the_session(self, token_ids: tuple[int, ...]) -> None:
        """Different tokens, fewer, none that are new, or new ones that begin with the token that SGLang drops."""
        await self.new(2, 3, generated=(4,))
        assert await self.new(*token_ids) == token_ids
        assert self.engine.open == ["s"]

    async def test_a_second_turn_at_the_same_time_runs_without_the_session(self) -> None:
        first = await self.sessions.begin(asked(session_id="s"))
        assert first is not None
        assert await self.sessions.begin(asked(session_id="s")) is None
        first.end()
        assert await self.sessions.begin(asked(session_id="s")) is not None

    async def test_two_turns_at_once_open_one_session(self) -> None:
        turns = await asyncio.gather(*(self.sessions.begin(asked(session_id="s")) for _ in range(2)))
        assert turns.count(None) == 1
        assert self.engine.open == ["s"]

    async def test_if_the_engine_refuses_the_turn_runs_without_a_session(self) -> None:
        self.engine.is_full = True
        assert await self.new(2, 3) is None
        self.engine.is_full = False
        assert await self.new(2, 3) == (2, 3)

    async def test_requests_that_never_use_a_session(self) -> None:
        for request in (asked(), asked(session_id="s", prompt_logprobs=True), asked(session_id="s", export=Export(bytes(16), 5.0))):
            assert await self.sessions.begin(request) is None
        assert self.engine.open == []

    async def test_a_session_is_closed_once(self) -> None:
        await self.new(2, 3)
        await self.sessions.close_session("s")
        await self.sessions.close_session("s")
        await self.sessions.close_session("unknown")
        assert self.engine.open == []


def test_the_file_of_errors_has_only_failures(tmp_path: Path) -> None:
    with write_logging_config(tmp_path, PACKAGE.logger, "ERROR", PACKAGE.failure_logger).open(encoding="utf-8") as config:
        logging.config.dictConfig(json.load(config))
    try:
        logging.getLogger("sglang.srt.constrained.llguidance_backend").error("Hit invalid grammar: Traceback (most recent call last):\nno")
        logging.getLogger(PACKAGE.failure_logger).error(
            'Scheduler hit an exception: Traceback (most recent call last):\n  File "x"\nRuntimeError: no room\n'
        )
        assert first_error(tmp_path) == "RuntimeError: no room"
    finally:
        forget_directory(tmp_path, PACKAGE.logger)
        logging.getLogger(PACKAGE.logger).handlers.clear()
        logging.getLogger(PACKAGE.logger).propagate = True


IMAGES = PromptImages((5, 9, 7), [EngineImage(bytes(range(16)), (1, 1), b"rgb")])


def test_an_image_is_one_placeholder_and_a_picture() -> None:
    expected = {"input_ids": [5, 9, 7], "image_data": ["a picture"]}
    assert image_parameters(IMAGES, ["a picture"]) == expected


@pytest.mark.parametrize("is_incremental", [True, False])
def test_a_prompt_with_images_that_sglang_expands_to_something_else_is_refused(is_incremental: bool) -> None:
    request = asked(images=IMAGES)
    ChunkReader(request, is_incremental=is_incremental).read(raw([1], 1, prompt_tokens=3))
    ChunkReader(asked(), is_incremental=is_incremental).read(raw([1], 1, prompt_tokens=4))
    with pytest.raises(EngineRefused, match="4 tokens instead of 3") as refused:
        ChunkReader(request, is_incremental=is_incremental).read(raw([1], 1, prompt_tokens=4))
    assert refused.value.fault.code == "image_mismatch"


async def test_a_prompt_with_images_runs_without_a_session_of_the_engine() -> None:
    """Only new tokens are sent there, and placeholders of earlier turns would be missing."""

    async def opened(_: str) -> bool:
        return True

    async def closed(_: str) -> None: ...

    sessions = StreamingSessions(opened, closed, None)
    assert await sessions.begin(asked(session_id="s", images=IMAGES)) is None
    assert await sessions.begin(asked(session_id="s")) is not None
