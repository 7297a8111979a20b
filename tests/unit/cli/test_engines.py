"""Flags for the engines of others, and what `penstock doctor` tells of every engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import cast

import pytest
import torch

from chat_model import chat_model
from penstock.backends.external.engine import EngineReport, EventEndpoints, Feature
from penstock.cli.compose import encode_workers, worker_arguments, worker_names
from penstock.cli.doctor import REPORTS, describe
from penstock.cli.embedded import kv_memory_left, load_encoder, load_engine
from penstock.cli.engines import equal_rounding, find_model, make_backend, make_external, make_feed, model_name
from penstock.cli.main import load, main
from penstock.config.commands import WorkerSettings
from penstock.config.engines import EmbeddedSettings, EngineSettings
from penstock.engine.checkpoints.checkpoint import find_default_model, open_checkpoint
from penstock.engine.shape import ModelShape
from penstock.text.tokenizers.model_settings import read_end_ids, read_vocab_size
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.wire.errors import ConfigError
from tiny_models import make_model, reference
from tiny_vision import vision_model


def worker(*arguments: str) -> WorkerSettings:
    return cast(WorkerSettings, load(["worker", "--listen=unix:/tmp/w.sock", *arguments], {}).settings)


def given_to_workers(*arguments: str) -> tuple[str, ...]:
    loaded = load(["serve", *arguments], {})
    return worker_arguments(loaded.settings, loaded.resolved)


def test_engine_arguments_are_split_as_a_shell_would() -> None:
    settings = worker("--engine=vllm", "--model=m", "--engine-args=--dtype float32 --x '{\"a\": 1}'", "--max-batch=8", "--kv-memory=0.5")
    assert settings.external == EngineSettings(engine_args=("--dtype", "float32", "--x", '{"a": 1}'), max_batch=8, kv_memory=0.5)


def test_serve_hands_on_what_is_for_its_workers() -> None:
    flags = ["--engine=sglang", "--model=m", "--engine-args=--page-size 32 --tp 2", "--streaming-sessions", "--any-engine-version"]
    given = given_to_workers(*flags)
    assert set(flags) <= set(given)
    assert worker(*given).external.engine_args == ("--page-size", "32", "--tp", "2")
    assert worker(*given).external.streaming_sessions


def test_the_cores_are_divided_among_the_workers_of_our_own_engine_alone() -> None:
    """Others have no such flag."""
    for flags, is_told in ((["--engine=embedded"], True), (["--engine=simulator"], False), (["--engine=vllm", "--model=m"], False)):
        given = given_to_workers("--workers=2", *flags)
        assert any(argument.startswith("--threads=") for argument in given) == is_told
        worker(*given)
    assert worker(*given_to_workers("--workers=2", "--threads=7")).embedded.threads == 7
    assert worker(*given_to_workers("--workers=1")).embedded.threads is None


def encoders(*arguments: str) -> int:
    return encode_workers(load(["serve", *arguments], {}).settings)


def test_a_model_that_reads_images_has_an_encode_worker_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}')
    model = f"--model={tmp_path}"
    assert encoders(model, "--device=cpu") == 1
    assert encoders(model, "--device=cpu", "--encode-workers=3") == 3
    assert encoders(model, "--device=cpu", "--encode-workers=0") == 0
    assert encoders(model, "--device=cuda") == 0, "the tower runs beside the steps"
    assert encoders(model, "--device=cuda", "--encode-workers=1") == 1
    assert encoders(model, "--engine=vllm") == 0
    assert encoders("--engine=simulator", "--images", "--encode-workers=2") == 2
    assert worker_names(["aggregated", "encode", "encode"]) == ["worker-0", "encode-0", "encode-1"]


def test_encode_workers_for_a_model_that_reads_only_text_are_a_mistake(tmp_path: Path) -> None:
    assert encoders(f"--model={tmp_path}", "--device=cpu") == 0
    with pytest.raises(ConfigError, match=f"--encode-workers 1, but the model {tmp_path} reads no images"):
        encoders(f"--model={tmp_path}", "--device=cpu", "--encode-workers=1")
    with pytest.raises(ConfigError, match="--encode-workers 1, but the simulator reads no images: give --images"):
        encoders("--engine=simulator", "--encode-workers=1")
    with pytest.raises(ConfigError, match="--role encode and --engine simulator: the model reads no images; give --images"):
        make_backend(worker("--engine=simulator", "--role=encode"), lambda: None)


def test_serve_starts_workers_of_each_role() -> None:
    settings = load(["serve", "--engine=simulator", "--prefill-workers=1", "--decode-workers=2"], {}).settings
    assert settings.roles == ("prefill", "decode", "decode")
    assert worker_names(settings.roles) == ["prefill-0", "decode-0", "decode-1"]
    assert worker_names(load(["serve", "--workers=2"], {}).settings.roles) == ["worker-0", "worker-1"]
    assert load(["serve"], {}).settings.roles == ("aggregated",)
    backend, _ = make_backend(worker("--engine=simulator", "--role=decode"), lambda: None)
    assert backend.model.roles == ("decode",)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine=vllm"], "--engine vllm needs --model"),
        (["--engine=http", "--model=m"], "--engine http needs --url"),
        (["--engine=http", "--model=m", "--url=http://e", "--role=decode"], "--role decode and --engine http"),
        (["--engine=http", "--model=m", "--url=ftp://x"], "--url is 'ftp://x'"),
        (["--engine=http", "--model=m", "--url=ftp://me:password@x"], "--url has credentials in it"),
        (["--engine=http", "--model=m", "--url=http://x", "--kv-replay=tcp://x:1"], "--kv-replay is tcp://x:1; it also needs --kv-events"),
        (["--engine=http", "--model=m", "--url=http://x", "--kv-events=x:1"], "--kv-events is 'x:1': expected an address such as tcp://"),
        (["--engine=http", "--model=m", "--url=http://x", "--kv-blocks=8"], "--kv-blocks is for --engine embedded or "),
        (["--engine=http", "--model=m", "--url=http://x", "--kv-memory=8"], "--kv-memory is for --engine embedded or "),
        (["--engine=vllm", "--model=m", "--device=cpu"], "--device is for --engine embedded, not for vllm"),
        (["--engine=vllm", "--model=m", "--threads=2"], "--threads is for --engine embedded, not for vllm"),
        (["--engine=simulator", "--token-budget=64"], "--token-budget is for --engine embedded, not for simulator"),
        (["--engine=sglang", "--model=m", "--reproducible"], "--reproducible is for --engine embedded, not for sglang"),
        (["--engine=embedded", "--any-engine-version"], "--any-engine-version is for --engine vllm or sglang, not for embedded"),
        (["--engine=simulator", "--url=http://x"], "--url is for --engine http, not for simulator"),
        (["--engine=embedded", "--engine-args=--tp 2"], "--engine-args is for --engine vllm or sglang, not for embedded"),
        (["--engine=vllm", "--model=m", "--streaming-sessions"], "--streaming-sessions is for --engine sglang, not for vllm"),
        (["--engine=vllm", "--model=m", "--engine-args=--x 'y"], '--engine-args is "--x \'y": No closing quotation'),
        (["--engine=simulator", "--block-size=0"], "--block-size is 0: expected 1 or more"),
        (["--engine=embedded", "--step-ms=1"], "--step-ms is for --engine simulator, not for embedded"),
        (["--engine=vllm", "--model=m", "--tensor-parallel-size=2"], "--tensor-parallel-size is 2: expected 1; Penstock's own engine"),
        (["--gpu-memory-utilization=0.9", "--kv-memory=2"], "--gpu-memory-utilization, --kv-memory and --kv-blocks all size"),
        (["--gpu-memory-utilization=1.5"], "--gpu-memory-utilization is 1.5: expected more than 0, at most 1"),
        (["--engine=embedded", "--block-size=8"], "--block-size is for --engine simulator or vllm or sglang or http, not for embedded"),
    ],
)
def test_what_cannot_work_is_refused_by_name(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        worker(*flags)
    assert str(refused.value).startswith(said)
    assert "password" not in str(refused.value)
    with pytest.raises(ConfigError):
        load(["serve", *flags], {})


def test_a_model_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(tmp_path) == tmp_path.resolve()
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"model\.gguf is a file: expected a directory"):
        find_model(tmp_path / "model.gguf")
    assert find_model(tmp_path / "model.gguf", takes_gguf=True) == (tmp_path / "model.gguf").resolve()
    with pytest.raises(
        ConfigError, match=r"no\.gguf does not exist: expected a directory in Hugging Face's layout, a GGUF file, or a model"
    ):
        find_model(tmp_path / "no.gguf", takes_gguf=True)
    with pytest.raises(ConfigError, match=r"/nowhere/at/all does not exist: expected a directory"):
        find_model(Path("/nowhere/at/all"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="--model nobody/nothing is not a directory, and could not be fetched from the hub: "):
        find_model(Path("nobody/nothing"))


def test_a_model_is_named_as_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that is said by a path without a name."""
    monkeypatch.chdir(chat_model())
    backend, packed = make_external(worker("--engine=http", "--url=http://127.0.0.1:1", "--model=."), lambda: None)
    assert backend.model.name == chat_model().name
    assert backend.model.tokenizer == packed.fingerprint
    assert str(chat_model()).encode() not in packed.data


def test_a_server_with_a_gguf_file_is_asked_with_the_tokenizer_of_that_file() -> None:
    path = find_default_model()
    backend, packed = make_external(worker("--engine=http", "--url=http://127.0.0.1:1", f"--model={path}"), lambda: None)
    assert path.suffix == ".gguf"
    assert (backend.model.name, backend.model.tokenizer, backend.model.vocab_size) == (model_name(path), packed.fingerprint, 49_152)
    assert packed == pack_tokenizer(path)
    with pytest.raises(ConfigError, match="is a file: expected a directory"):
        make_external(worker("--engine=vllm", f"--model={path}"), lambda: None)


def test_what_a_config_says_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "vocab_size": 32}')
    assert (set(read_end_ids(tmp_path)), read_vocab_size(tmp_path)) == ({2}, 32)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert set(read_end_ids(tmp_path)) == {2, 3, 4}
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 64}}')
    assert (set(read_end_ids(tmp_path)), read_vocab_size(tmp_path)) == ({3, 4}, 64)
    (tmp_path / "config.json").write_text("{}")
    assert read_vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        read_vocab_size(tmp_path)


def test_a_report_for_people() -> None:
    features = (
        Feature("grammar", is_available=True, detail="by llguidance"),
        Feature("KV events", is_available=False, detail="switched off"),
    )
    report = EngineReport("vllm", "0.9", "0.32", "0.9 is too old", features)
    assert describe(report).splitlines() == [
        "vllm: 0.9 (supported: 0.32)",
        "  problem: 0.9 is too old",
        "  yes  grammar    by llguidance",
        "  no   KV events  switched off",
    ]


def test_doctor_tells_of_every_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for engine in REPORTS:
        assert f"\n{engine}: " in said
    assert main(["doctor", "--json"]) == 0
    reports = {report["engine"]: report for report in json.loads(capsys.readouterr().out)["engines"]}
    assert reports.keys() == REPORTS.keys()
    assert reports["embedded"]["problem"] is None
    features = {feature["name"]: feature["is_available"] for feature in reports["embedded"]["features"]}
    assert features == {
        "sessions": True,
        "KV events": True,
        "logprobs": True,
        "prompt logprobs": True,
        "isolation": True,
        "grammar": True,
        "disaggregation": False,
    }


@pytest.mark.parametrize("package", ["torch", "tokenizers", "jinja2"])
def test_doctor_names_what_our_own_engine_lacks(package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == package:
            raise PackageNotFoundError
        return "2.13"

    monkeypatch.setattr("penstock.cli.doctor.version", version)
    assert main(["doctor", "--engine", "embedded"]) == 1
    assert f"problem: it needs the package '{package}': pip install 'penstock[engine]'" in capsys.readouterr().out


def test_doctor_fails_where_an_engine_that_is_asked_for_cannot_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REPORTS, "vllm", lambda: EngineReport("vllm", None, "0.32", "it is not installed"))
    assert main(["doctor", "--engine", "vllm"]) == 1
    assert "problem: it is not installed" in capsys.readouterr().out
    assert main(["doctor", "--engine", "simulator"]) == 0


@pytest.mark.parametrize("flags", [["--engine=http"], ["--upstream-model=m"]])
def test_doctor_asks_a_server_only_where_it_is(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert capsys.readouterr().err.startswith("penstock: --engine http and --upstream-model need --url")


def test_a_share_of_the_gpu_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"^--gpu-memory-utilization is 0\.5, but the model runs on a CPU: use --kv-memory GIB instead$"):
        make_backend(worker("--gpu-memory-utilization=0.5", "--device=cpu"), lambda: None)


def test_more_host_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--kv-host-memory is 100000 GiB: expected at most .* GiB, the memory of this machine$"):
        make_backend(worker("--kv-host-memory=100000", "--device=cpu"), lambda: None)


@pytest.mark.parametrize(("share", "left"), [(None, 850), (0.9, 890), (0.1, 10), (0.05, 0)])
def test_the_kv_of_a_gpu_gets_what_the_weights_leave(share: float | None, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, the GPU has 1,100 bytes, and the weights take 100 of them."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (1000, 1100))
    assert kv_memory_left(EmbeddedSettings(gpu_memory_utilization=share), torch.device("cuda")) == left


class EmptyMachine:
    """A GPU of 1,000 kB. torch holds 900 of them after loading, most of it unused until it is given back."""

    def __init__(self, shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shape = shape
        self.end_ids = frozenset[int]()
        self.tower = None
        self.did: list[str] = []
        self.free = 1_000_000
        monkeypatch.setattr("torch.cuda.empty_cache", self.give_back)
        monkeypatch.setattr("torch.cuda.mem_get_info", self.measure)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from reference("llama").state_dict().items()
        self.did.append("loaded")
        self.free = 100_000

    def tower_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def give_back(self) -> None:
        self.did.append("gave back")
        self.free = 800_000

    def measure(self, _: object) -> tuple[int, int]:
        self.did.append("measured")
        return self.free, 1_000_000


def test_the_kv_is_sized_when_loading_has_given_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is torch's `meta`, which has shapes but no memory."""
    machine = EmptyMachine(make_model("llama").shape, monkeypatch)
    tokenizer = pack_tokenizer(None).load()
    engine = load_engine(machine, tokenizer, 512, EmbeddedSettings(kv_staging_memory=0), torch.device("meta"))
    try:
        assert machine.did == ["loaded", "gave back", "measured"]
        page_bytes = 2 * 3 * 16 * 2 * 16 * 2
        assert engine.stats().kv_blocks_total == int(800_000 * 0.85) // page_bytes
    finally:
        engine.close()


INTEL = "vendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu {} sha_ni\n"


@pytest.mark.parametrize(("flags", "rounding"), [("avx2 avx512f", "AVX512,STRICT"), ("avx avx2", "AVX2,STRICT")])
def test_equal_rounding_is_asked_for_by_what_the_cpu_has(flags: str, rounding: str) -> None:
    assert equal_rounding(INTEL.format(flags)) == rounding


@pytest.mark.parametrize(
    ("cpu", "said"),
    [
        ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t\t: avx2 avx512f sse\n", "and this is AMD EPYC: leave it out"),
        (INTEL.format("avx"), r"and this is Intel\(R\) Xeon\(R\): leave it out"),
        ("", "and this one is unknown: leave it out"),
    ],
)
def test_reproducible_is_refused_where_nothing_promises_it(cpu: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^--reproducible works on Intel CPUs with AVX2 or AVX-512 only, {said}$"):
        equal_rounding(cpu)


def test_reproducible_is_refused_beside_another_rounding_and_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.engines.equal_rounding", lambda _: "AVX2,STRICT")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    with pytest.raises(ConfigError, match=r"^MKL_CBWR is 'COMPATIBLE', but --reproducible needs AVX2,STRICT or AVX512,STRICT: unset it$"):
        make_backend(worker("--reproducible"), lambda: None)
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"^--reproducible is set, but the model runs on a GPU, which rounds by batch: use --device cpu"):
        make_backend(worker("--reproducible"), lambda: None)


@pytest.mark.parametrize("command", ["doctor", "worker --engine http --model {model} --listen unix:/tmp/never"])
def test_an_engine_over_http_without_aiohttp_says_what_to_install(command: str) -> None:
    program = "import sys; sys.modules['aiohttp'] = None; from penstock.cli.main import main; sys.exit(main())"
    words = command.format(model=chat_model()).split()
    ran = subprocess.run(
        [sys.executable, "-c", program, *words, "--url", "http://127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert "needs the package 'aiohttp': pip install 'penstock[http]'" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


def test_kv_events_without_zmq_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "penstock.backends.external.zmq_events", raising=False)
    with pytest.raises(ConfigError, match=r"'zmq': pip install pyzmq"):
        make_feed(EventEndpoints("ipc:///tmp/x"), 16, lambda _: None)


@pytest.mark.parametrize("memory", ["0.000001", "100000"])
def test_image_memory_that_cannot_work_is_refused(memory: str) -> None:
    settings = worker(f"--image-memory={memory}", "--device=cpu", f"--model={vision_model('qwen3_vl')}")
    with pytest.raises(
        ConfigError, match=r"^--image-memory is .* GiB: expected at least .* bytes, the size of 16 positions, and less than .* GiB"
    ):
        make_backend(settings, lambda: None)


def test_a_model_with_a_tower_reads_images() -> None:
    """Its engine and its encode worker have the same fingerprint, and by default no more slots than a prompt can use."""
    directory = vision_model("qwen3_vl")
    checkpoint = open_checkpoint(directory)
    backend, packed = make_backend(worker("--device=cpu", f"--model={directory}"), lambda: None)
    assert backend.model.images is not None
    assert backend.model.images.family == "qwen_vl"
    settings = worker("--device=cpu", "--kv-blocks=8").embedded
    engine = load_engine(checkpoint, packed.load(), 100, settings, torch.device("cpu"))
    encoder = load_encoder(checkpoint, 100, settings, torch.device("cpu"), lambda: None)
    assert engine.images is not None
    assert engine.images.features.slots == encoder.store.slots == 7
    assert engine.images.maker.fingerprint == encoder.fingerprint
    engine.close()
    encoder.close()


def test_a_model_for_text_has_nothing_to_encode() -> None:
    with pytest.raises(ConfigError, match=r"^--role encode: the model .* reads only text"):
        make_backend(worker("--device=cpu", "--role=encode"), lambda: None)
