"""A tiny chat model that every engine runs, and what transformers says of it: the judge of all of them.

Its weights are random, yet of a size that the likeliest token leads clearly and seldom repeats itself: engines that round differently
make the same tokens, and one that loses or repeats a token is seen at once. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCABULARY = 1024
CONTEXT = 4096
END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_ID = 2
SPECIAL_IDS = range(3)

# Where the likeliest token leads by less, engines may differ for no fault of theirs: the best logits are above ten, and
# differ by some 1e-5.
LEAST_LEAD = 1e-4

_SEED = 20
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER = 128, 2, 4, 2, 32, 320
_WORDS = """
a about after again air all also always an and animal answer any apple are as ask at away back bad ball be bear because bed before began
best better big bird black blue boat body book both bottom box boy bread bring brother build but buy by call came can car care carry cat
change child city clean clear close cloud cold color come cook corn count country cover cry cut dark day deep did different do dog door
down draw dream drink dry each early earth east eat egg end enough even every eye face fall family far farm fast father feel feet few
field find fire first fish five flower fly follow food for forest form found four friend from full garden gave get girl give glass go gold
good grass great green ground grow had half hand happy hard has have he head hear heart heavy help her here high hill him his hold home
horse hot house how hundred ice if in iron is island it its jump just keep kind king knew know lake land large last late laugh lead leaf
learn leave left leg less letter life light like line list listen little live long look low made make man many map mark market me measure
meat men milk mind minute money moon more morning most mother mountain mouth move much music must my name near never new next night no
north not note now number of off often old on once one only open or order other our out over own page paint paper part pass people piece
place plan plant play point poor pressure pull push put question quick quiet rain ran reach read ready red rest rich ride right river road
rock room round rule run said sail salt same sand saw say school sea second see seed seem send sentence seven she ship shoe short should
show side silver simple sing sister sit six size sky sleep slow small snow so some song soon sound south space spell stand star start
state stay step still stone stop story street strong study such sugar summer sun sure swim table take talk tall teach tell ten than that
the their them then there these they thing think this those three through time to today together told too took top town travel tree true
try turn two under until up us use very voice wait walk wall want war warm was watch water wave way we well went were west what wheel when
where which while white who why will wind window winter wish with woman wood word work world would write year yellow yes you young your
"""
_SHAPES = (
    "{0} {1} {2} {3}. {4} {5}, {6} {7}? ",
    '{{"{0}": {n}, "{1}": ["{2}", "{3}"], "{4}": true}}\n',
    "def {0}({1}, {2}):\n    return {1} + {n} * {2}\n\n",
    "# {0} {1}\n\n- {2} {3}\n- {4}: {n}.{n}\n",
)
_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'You may call these functions, described as JSON:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nWrite a call as <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def make_chat_model(directory: Path) -> Path:
    """Writes the model in Hugging Face's layout; the same wherever it is made."""
    make_tokenizer(directory)
    _write_weights(directory)
    return directory


def make_tokenizer(directory: Path, template: str = "", special: Sequence[str] = ()) -> Path:
    """Writes everything but the weights: enough for an engine behind HTTP. `template` replaces the model's own; `special` are more special
    tokens, from SPECIAL_IDS.stop on."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, template or _TEMPLATE, special)
    ends = {"bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": 0}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **ends,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {**ends, "do_sample": False})
    return directory


@functools.cache
def chat_model() -> Path:
    """The model's directory, made once a process and gone with it."""
    folder = tempfile.TemporaryDirectory(prefix="chat-model-")
    _FOLDERS.append(folder)
    return make_chat_model(Path(folder.name) / "chat-model")


# Kept alive until the process ends: a folder goes when its object does.
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def random_prompt(seed: int | str, length: int) -> tuple[int, ...]:
    """Ordinary tokens, none of them special."""
    numbers = random.Random(seed)
    return tuple(numbers.randrange(SPECIAL_IDS.stop, VOCABULARY) for _ in range(length))


@functools.cache
def reference(directory: Path) -> Any:
    """The model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    # Threads that wait for each other at every operation gain nothing on a model so small.
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def greedy(directory: Path, prompt: Sequence[int], count: int, *, ignore_end: bool = True) -> list[int]:
    """What transformers generates, greedily: `count` tokens, or until the end of the message if that is not ignored."""
    tokens = _greedy(directory, tuple(prompt), count)
    if not ignore_end and END_ID in tokens:
        return tokens[: tokens.index(END_ID) + 1]
    return tokens


def winners(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The likeliest token at the place of each of these, behind those before it: they are greedy if and only if they are these winners.

    Where this one and the likeliest are as good as equal, it has won. A single pass, where generating takes one for each token.
    """
    return list(_winners(directory, tuple(prompt), tuple(tokens)))


@functools.cache
def _winners(directory: Path, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[int]:
    return judge_rows(logits(directory, prompt, tokens), tokens)


def judge_rows(rows: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """The winner of each row of scores, by the same rule."""
    best = rows.max(-1)
    leads = best.values - rows[range(len(tokens)), list(tokens)]
    likeliest: list[int] = best.indices.tolist()
    return [token if lead <= LEAST_LEAD else other for token, lead, other in zip(tokens, leads.tolist(), likeliest, strict=True)]


def logits(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The model's scores at the place of each of these tokens, behind the prompt and those before it."""
    import torch

    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        scores: torch.Tensor = reference(directory)(ids).logits[0, len(prompt) - 1 : -1]
    return scores


@functools.cache
def _greedy(directory: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    import torch

    model, cache = reference(directory), None
    tokens: list[int] = []
    leads: list[float] = []
    step = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            made = model(step, past_key_values=cache, use_cache=True)
            best = made.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            leads.append(float(best.values[0] - best.values[1]))
            cache, step = made.past_key_values, best.indices[:1].unsqueeze(0)
    lead = min(leads, default=LEAST_LEAD)
    assert lead >= LEAST_LEAD, f"a near tie at {leads.index(lead)}: no ground to judge an engine on; take another prompt"
    return tokens


def _write_tokenizer(directory: Path, template: str, more: Sequence[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, MESSAGE_START, MESSAGE_END, *more]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_text(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert tokenizer.token_to_id(MESSAGE_END) == END_ID
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [MESSAGE_START, *more],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _text() -> list[str]:
    """What the tokenizer is trained on: words in sentences, and the marks of JSON, code and lists."""
    numbers, words = random.Random(0), _WORDS.split()
    return [shape.format(*numbers.choices(words, k=8), n=numbers.randrange(1000)) for shape in _SHAPES * 300]


def _write_weights(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(_SEED)

    def drawn(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=source) * scale

    embedding = drawn(VOCABULARY, _HIDDEN, 1.0)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(_HIDDEN)}
    tensors["lm_head.weight"] = drawn(VOCABULARY, _HIDDEN, 0.35)
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = torch.ones(_HIDDEN)
        # The projections keep the size of what goes through them; attention is sharp enough to depend on where it looks.
        for part, rows, columns, gain in (
            ("self_attn.q_proj", _HEADS * _HEAD_DIM, _HIDDEN, 1.5),
            ("self_attn.k_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
            ("self_attn.v_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
            ("self_attn.o_proj", _HIDDEN, _HEADS * _HEAD_DIM, 1.5),
            ("mlp.gate_proj", _INNER, _HIDDEN, 1.5),
            ("mlp.up_proj", _INNER, _HIDDEN, 1.5),
            ("mlp.down_proj", _HIDDEN, _INNER, 1.5),
        ):
            tensors[f"{name}{part}.weight"] = drawn(rows, columns, gain * columns**-0.5)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
