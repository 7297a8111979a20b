"""Rotary frequencies: as transformers has them for each kind, and YaRN beyond what a model was trained for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.engine.shape import ModelShape, RopeScaling, covered_length, rotary_frequencies

TRAINED = 4096


def shape(rope: RopeScaling | None = None, *, trained_length: int = TRAINED, head_dim: int = 64, theta: float = 10_000.0) -> ModelShape:
    return ModelShape(
        hidden_size=256,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        intermediate_size=512,
        vocab_size=100,
        trained_length=trained_length,
        rope_theta=theta,
        rope=rope or RopeScaling(),
    )


def reference(of: ModelShape, kind: str, **parameters: Any) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=of.hidden_size,
        num_attention_heads=of.heads,
        head_dim=of.head_dim,
        max_position_embeddings=of.trained_length,
        rope_parameters={"rope_type": kind, "rope_theta": of.rope_theta, **parameters},
    )
    if kind == "default":
        embedding = LlamaRotaryEmbedding(config)
        return embedding.inv_freq, embedding.attention_scaling
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, scaling


def check(found: tuple[torch.Tensor, float], expected: tuple[torch.Tensor, float]) -> None:
    assert found[0].dtype == torch.float32
    assert found[0].device.type == "cpu"
    torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=0)
    assert found[1] == pytest.approx(expected[1])


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (128, 500_000.0), (96, 1_000_000.0)])
def test_each_kind_is_as_in_transformers(head_dim: int, theta: float) -> None:
    plain = shape(head_dim=head_dim, theta=theta)
    check(rotary_frequencies(plain, TRAINED), reference(plain, "default"))
    linear = replace(plain, rope=RopeScaling("linear", factor=4.0))
    check(rotary_frequencies(linear, TRAINED), reference(plain, "linear", factor=4.0))
    llama3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    with_llama3 = replace(plain, rope=RopeScaling("llama3", original_length=1024, **llama3))
    check(rotary_frequencies(with_llama3, TRAINED), reference(plain, "llama3", original_max_position_embeddings=1024, **llama3))
    yarn = replace(plain, rope=RopeScaling("yarn", factor=4.0, original_length=1024))
    check(rotary_frequencies(yarn, TRAINED), reference(plain, "yarn", factor=4.0, original_max_position_embeddings=1024))


@pytest.mark.parametrize(
    "parameters",
    [
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        # Ramps that begin before the first pair, end behind the last one, and behind the last dimension.
        {"beta_fast": 1e6},
        {"beta_slow": 0.01},
        {"beta_slow": 1e-6},
    ],
)
def test_yarns_options_are_as_in_transformers(parameters: dict[str, Any]) -> None:
    yarn = shape(RopeScaling("yarn", factor=4.0, original_length=1024, **parameters))
    check(rotary_frequencies(yarn, TRAINED), reference(yarn, "yarn", factor=4.0, original_max_position_embeddings=1024, **parameters))


def test_divisors_are_llama3_as_gguf_has_it() -> None:
    llama3 = shape(RopeScaling("llama3", factor=8.0, original_length=1024))
    plain, _ = rotary_frequencies(shape(), TRAINED)
    own, _ = rotary_frequencies(llama3, TRAINED)
    stored = shape(RopeScaling("llama3", divisors=tuple((plain / own).tolist())))
    for length in (TRAINED, 4 * TRAINED):
        check(rotary_frequencies(stored, length), rotary_frequencies(llama3, length))


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeScaling(), TRAINED),
        (RopeScaling("llama3", factor=32.0, original_length=1024), TRAINED),
        (RopeScaling("linear", factor=4.0), 4 * TRAINED),
        (RopeScaling("linear", factor=4.0, original_length=TRAINED // 4), TRAINED),
        (RopeScaling("yarn", factor=4.0, original_length=TRAINED // 4), TRAINED),
        (RopeScaling("yarn", factor=4.0, original_length=TRAINED), 4 * TRAINED),
        (RopeScaling("yarn", factor=4.0), 4 * TRAINED),
    ],
)
def test_own_scaling_holds_to_the_length_that_it_makes(rope: RopeScaling, expected: int) -> None:
    assert covered_length(shape(rope)) == expected
    within = rotary_frequencies(shape(rope), 1)
    for length in (expected // 2, 3 * expected // 4, expected):
        check(rotary_frequencies(shape(rope), length), within)
    assert not torch.equal(rotary_frequencies(shape(rope), expected + 1)[0], within[0])


def test_beyond_a_plain_model_yarns_factor_is_the_ratio_of_the_lengths() -> None:
    for asked in (TRAINED + 1000, 2 * TRAINED, 10 * TRAINED):
        expected = reference(shape(), "yarn", factor=asked / TRAINED, original_max_position_embeddings=TRAINED)
        check(rotary_frequencies(shape(), asked), expected)


def test_beyond_a_yarn_model_the_factor_grows_from_the_original_length() -> None:
    yarn = shape(RopeScaling("yarn", factor=4.0, original_length=1024, beta_fast=16.0))
    expected = reference(yarn, "yarn", factor=10.0, original_max_position_embeddings=1024, beta_fast=16.0)
    check(rotary_frequencies(yarn, 10 * 1024), expected)


def test_beyond_a_linear_model_its_own_frequencies_are_stretched() -> None:
    linear = shape(RopeScaling("linear", factor=4.0, original_length=1024))
    # The number of turns in 4096 positions of a quarter of the speed is that in 1024 of the plain one.
    frequencies, scaling = reference(shape(trained_length=1024), "yarn", factor=2.0, original_max_position_embeddings=1024)
    check(rotary_frequencies(linear, 2 * TRAINED), (frequencies / 4, scaling))


def test_beyond_a_llama3_model_its_own_frequencies_are_stretched() -> None:
    llama3 = shape(RopeScaling("llama3", factor=8.0, original_length=1024), head_dim=128, theta=500_000.0)
    own, _ = rotary_frequencies(llama3, TRAINED)
    stretched, scaling = rotary_frequencies(llama3, 2 * TRAINED)
    turns = TRAINED * own / (2 * math.pi)
    divided = own / stretched
    # Truncation widens the ramp by less than a pair on each side.
    step = math.exp(2 * math.log(500_000.0) / 128)
    assert torch.allclose(divided[turns > 32 * step], torch.tensor(1.0))
    assert torch.allclose(divided[turns < 1 / step], torch.tensor(2.0))
    assert bool(((divided > 0.9999) & (divided < 2.0001)).all())
    assert bool((divided.diff() >= -1e-5).all())
    assert scaling == pytest.approx(0.1 * math.log(2) + 1)


def test_one_token_more_than_trained_changes_almost_nothing() -> None:
    for rope in (RopeScaling(), RopeScaling("linear", factor=4.0), RopeScaling("llama3", factor=8.0, original_length=1024)):
        covered = covered_length(shape(rope))
        (own, _), (next_to_it, scaling) = rotary_frequencies(shape(rope), covered), rotary_frequencies(shape(rope), covered + 1)
        torch.testing.assert_close(own, next_to_it, rtol=1e-3, atol=0)
        assert scaling == pytest.approx(1.0, abs=1e-4)
