"""A model's own tokenizer: byte-level and SentencePiece-like, made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.text.detokenizer import StepDetokenizer
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatPrompt
from penstock.wire.errors import ConfigError, RequestError
from tokenizer_kinds import encode_chat

CORPUS = ["the water flows under pressure", "größer als 100 €", "日本語のテキスト 😀", "def f(x):\n    return x"] * 4
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def save(directory: Path, tokenizer: tokenizers.Tokenizer, settings: dict[str, object]) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def load(directory: Path) -> ModelTokenizer:
    loaded = pack_tokenizer(directory).load()
    assert isinstance(loaded, ModelTokenizer)
    return loaded


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    directory = save(tmp_path_factory.mktemp("model") / "bytes", tokenizer, {"eos_token": "<eos>", "chat_template": TEMPLATE})
    return load(directory)


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials[:2])
    tokenizer.add_tokens(specials[2:])
    tokenizer.train_from_iterator(CORPUS, trainer)
    directory = save(tmp_path_factory.mktemp("model") / "pieces", tokenizer, {"eos_token": {"content": "</s>"}})
    return load(directory)


@pytest.fixture(scope="module")
def stepwise(sentence_piece: ModelTokenizer, tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    assert sentence_piece.definition is not None
    tokenizer = tokenizers.Tokenizer.from_str(sentence_piece.definition)
    tokenizer.decoder = decoders.Metaspace()
    return load(save(tmp_path_factory.mktemp("model") / "steps", tokenizer, {"eos_token": "</s>"}))


def detokenized(tokenizer: ModelTokenizer, token_ids: list[int], cuts: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    edges = zip([0, *cuts], [*cuts, len(token_ids)], strict=True)
    return "".join([detokenizer.feed(token_ids[start:stop]) for start, stop in edges]) + detokenizer.finish()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", ["byte_level", "sentence_piece", "stepwise"])
def test_any_cut_of_any_tokens_gives_the_same_text(name: str, data: st.DataObject, request: pytest.FixtureRequest) -> None:
    tokenizer: ModelTokenizer = request.getfixturevalue(name)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5)))
    text = detokenized(tokenizer, token_ids, cuts)
    assert text == detokenized(tokenizer, token_ids, [])
    # With byte fallback, the library also drops the bytes around an invalid byte.
    if name == "byte_level":
        assert text == tokenizer.decode(token_ids)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.sampled_from(CORPUS), cuts=st.lists(st.integers(0, 9), max_size=4))
@pytest.mark.parametrize("name", ["byte_level", "sentence_piece", "stepwise"])
def test_text_survives(name: str, text: str, cuts: list[int], request: pytest.FixtureRequest) -> None:
    tokenizer: ModelTokenizer = request.getfixturevalue(name)
    token_ids = tokenizer.encode(text)
    assert detokenized(tokenizer, token_ids, sorted(min(cut, len(token_ids)) for cut in cuts)) == tokenizer.decode(token_ids)
    if name == "byte_level":
        assert tokenizer.decode(token_ids) == text


def test_steps_hold_incomplete_characters_back(byte_level: ModelTokenizer) -> None:
    assert byte_level.definition is not None
    for text in ["☃", "a☃é€ 😀😀 b", *CORPUS]:
        detokenizer = StepDetokenizer(tokenizers.Tokenizer.from_str(byte_level.definition).decode, {})
        parts = [detokenizer.feed([token_id]) for token_id in byte_level.encode(text)]
        assert "".join(parts) == text


def test_the_template_is_rendered_and_ends_with_the_assistants_turn(byte_level: ModelTokenizer) -> None:
    token_ids = encode_chat(byte_level, ChatPrompt([{"role": "user", "content": "water"}]))
    assert byte_level.decode(token_ids) == "<|user|>water<|assistant|>"


def test_the_end_token_is_special_and_not_text(byte_level: ModelTokenizer, sentence_piece: ModelTokenizer) -> None:
    for tokenizer in (byte_level, sentence_piece):
        assert tokenizer.end_id not in tokenizer.ordinary_ids
        assert tokenizer.decode([tokenizer.end_id]) == ""


def test_a_model_without_a_template_refuses_a_chat(sentence_piece: ModelTokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        encode_chat(sentence_piece, ChatPrompt([{"role": "user", "content": "x"}]))


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece"])
def test_the_bytes_of_the_tokens_are_the_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: ModelTokenizer = request.getfixturevalue(name)
    for text in CORPUS:
        joined = b"".join([tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]).decode()
        assert joined == (text if name == "byte_level" else f" {text}")


def test_the_definition_makes_the_same_tokenizer(byte_level: ModelTokenizer) -> None:
    assert byte_level.definition is not None
    again = tokenizers.Tokenizer.from_str(byte_level.definition)
    assert [again.encode(text).ids for text in CORPUS] == [byte_level.encode(text) for text in CORPUS]
    assert pack_tokenizer(None).load().definition is None


@pytest.mark.parametrize("eos", [None, "<none>", {"content": "<none>"}])
def test_an_end_token_that_is_not_in_the_vocabulary_is_named(eos: object, tmp_path: Path, byte_level: ModelTokenizer) -> None:
    assert byte_level.definition is not None
    directory = save(tmp_path, tokenizers.Tokenizer.from_str(byte_level.definition), {"eos_token": eos})
    with pytest.raises(ConfigError, match="eos_token is"):
        pack_tokenizer(directory).load()


def test_a_template_with_a_syntax_error_is_refused(tmp_path: Path, byte_level: ModelTokenizer) -> None:
    assert byte_level.definition is not None
    broken: dict[str, object] = {"eos_token": "<eos>", "chat_template": "{% for %}"}
    with pytest.raises(ConfigError, match="chat template has an error in line 1"):
        pack_tokenizer(save(tmp_path, tokenizers.Tokenizer.from_str(byte_level.definition), broken)).load()


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read tokenizer\.json"):
        pack_tokenizer(tmp_path).load()
