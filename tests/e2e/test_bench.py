"""`penstock bench`: it verifies, and it sees what is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from e2e.harness import Server
from penstock.text.tokenizers.source import pack_tokenizer

BENCH = [sys.executable, "-m", "penstock", "bench", "--no-progress"]


def bench(server: Server, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    figures = tmp_path / "figures.json"
    command = [*BENCH, "--url", server.url, "--json", str(figures), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, json.loads(figures.read_text()) if figures.exists() else {}, done.stdout + done.stderr


def test_every_stream_is_verified(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--step-ms", "2")
    process = f"frontend={server.child('frontend').pid}"
    plot = tmp_path / "plot.png"
    status, figures, output = bench(server, tmp_path, "-c", "200", "-n", "600", "--verify", "--process", process, "--plot", str(plot))
    assert status == 0, output
    checked = figures["verification"]
    assert (checked["streams"], checked["lost"], checked["repeated"], checked["reordered"]) == (600, 0, 0, 0)
    assert figures["tokens"] == 600 * 128
    assert any(row["name"] == "frontend" and row["cpu_us_per_token"] > 0 for row in figures["processes"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "600 streams verified: no token lost, repeated or reordered" in output


BROKEN = str(Path(__file__).with_name("broken.py"))
# Far more than the front end can serve within a step, so that steps wait at the worker and must be merged.
BUSY = ("-c", "300", "-n", "600", "--verify")


@contextmanager
def broken_server(serve: Callable[..., Server], tmp_path: Path, *front_end: str) -> Iterator[Server]:
    """A worker whose merge is broken, behind this front end."""
    socket = tmp_path / "worker.sock"
    worker = subprocess.Popen(
        [sys.executable, BROKEN, "merge", "worker", "--engine", "simulator", "--listen", f"unix:{socket}", "--step-ms", "1"]
    )
    try:
        yield serve(command=[sys.executable, *front_end, "frontend", "--port", "0", "--worker", f"unix:{socket}"])
    finally:
        worker.terminate()
        worker.wait(20)


def test_a_broken_merge_is_reported_as_loss(serve: Callable[..., Server], tmp_path: Path) -> None:
    with broken_server(serve, tmp_path, BROKEN, "checks") as server:
        status, figures, output = bench(server, tmp_path, *BUSY)
    assert status == 1, output
    assert figures["requests"]["failed"] == 0, "the loss would not be silent"
    assert figures["verification"]["lost"] > 0
    assert figures["verification"]["wrong_streams"] > 0
    assert "tokens lost" in output


def test_a_broken_merge_is_loud_where_offsets_are_checked(serve: Callable[..., Server], tmp_path: Path) -> None:
    with broken_server(serve, tmp_path, "-m", "penstock") as server:
        status, figures, output = bench(server, tmp_path, *BUSY)
    assert status == 1, output
    assert figures["requests"]["failed"] > 0
    assert figures["verification"]["lost"] == 0, "what was delivered before the error is right"
    assert any("expected the token at offset" in error for error in figures["errors"])


def test_it_drives_the_chat_endpoint(server: Server, tmp_path: Path) -> None:
    status, figures, output = bench(server, tmp_path, "-c", "8", "-n", "16", "--endpoint", "chat", "--verify", "--max-tokens", "20")
    assert status == 0, output
    assert figures["tokens"] == 320


def test_settings_that_cannot_work_are_named(server: Server, tmp_path: Path) -> None:
    assert bench(server, tmp_path, "--model", "gpt-9")[0] == 2
    assert "--model is 'gpt-9': the server has simulator" in bench(server, tmp_path, "--model", "gpt-9")[2]
    command = [*BENCH, "--url", "http://127.0.0.1:9", "-n", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "cannot connect: Connection refused" in done.stderr


def test_a_models_own_tokenizer(serve: Callable[..., Server], tmp_path: Path) -> None:
    """The simulator with a model directory: its text is what that tokenizer makes of the predicted tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["water under pressure 水 größer 😀"] * 9, trainer)
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    server = serve("--step-ms", "1", "--model", str(directory))
    status, figures, output = bench(server, tmp_path, "-c", "50", "-n", "200", "--verify", "--endpoint", "chat")
    assert status == 0, output
    assert figures["verification"]["lost"] == 0
    client: OpenAI = server.client
    assert [model.id for model in client.models.list().data] == ["tiny-model"]
    _, _, told = server.request("GET", "/v1/models")
    assert str(tmp_path) not in json.dumps(told)
    assert told["data"][0]["penstock"]["tokenizer"] == pack_tokenizer(directory).fingerprint
