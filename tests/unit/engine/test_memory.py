"""A step takes a bounded amount of memory; where memory still runs out, the step shrinks, and only what cannot run fails."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine import attention
from penstock.engine.attention import AttentionPlan, KVStore, PromptPart, attend
from penstock.engine.memory import STEPS_TO_GROW, StepBudget, is_out_of_memory
from penstock.engine.model import Batch, Model
from penstock.engine.shape import ModelShape
from penstock.wire.codec import unpack_logprobs
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Delta, Fault, Finish, TokenLogprob
from tiny_models import WatchedModel, generation_id, make_engine, make_model, make_submit, random_prompt, reference, reference_tokens, run

CPU = torch.device("cpu")


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many elements the largest tensor has that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            # A view has no memory of its own.
            if isinstance(each, Tensor) and each.untyped_storage().nbytes() >= each.numel() * each.element_size():
                self.elements = max(self.elements, each.numel())
        return made


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_scores_of_a_later_piece_are_in_memory(
    window: int | None, is_exact: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second piece of a prompt: 256 rows that see 1,024 tokens."""
    rows, context, most = 256, 1024, 2**16
    monkeypatch.setattr(attention, "MAX_SCORES", most, raising=False)
    shape = ModelShape(128, 1, 4, 2, 32, 64, 64, 2048)
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(rows, shape.heads, shape.head_dim, generator=generator).to(dtype)
    keys, values = (torch.randn(context, shape.kv_heads, shape.head_dim, generator=generator).to(dtype) for _ in range(2))
    store = KVStore(shape, 80, 16, dtype, CPU, is_exact)
    pages = torch.randperm(80, generator=generator)[: context // 16]
    slots = (pages[:, None] * 16 + torch.arange(16)).flatten()
    store.write(0, slots, keys, values)
    plan = AttentionPlan(slots, (PromptPart(0, rows, context, pages),), ())
    with torch.no_grad(), Largest() as largest:  # type: ignore[no-untyped-call]
        seen = attend(queries, store, 0, plan, window)
    assert largest.elements <= 2 * most < rows * context, "not even a mask of all of them"
    scores = torch.einsum("rhd,thd->hrt", queries.float(), keys.float().repeat_interleave(2, 1)) / math.sqrt(shape.head_dim)
    own, others = torch.arange(context - rows, context)[:, None], torch.arange(context)
    hidden = others > own if window is None else (others > own) | (others <= own - window)
    expected = torch.einsum("hrt,thd->rhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values.float().repeat_interleave(2, 1))
    assert torch.allclose(seen.float().view(expected.shape), expected, atol=1e-5 if dtype == torch.float32 else 0.02)


def at_most(rows: int) -> Callable[[Batch], None]:
    """A device whose memory suffices for this many rows."""

    def check(batch: Batch) -> None:
        if len(batch.token_ids) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.\nA second line")

    return check


def _prompt_logprobs(delta: Delta) -> list[TokenLogprob | None]:
    assert delta.prompt is not None
    assert delta.prompt.logprobs is not None
    return [entry for piece in delta.prompt.logprobs for entry in unpack_logprobs(piece)]


def test_logits_of_a_prompt_are_computed_in_slices() -> None:
    submits = [make_submit(number, random_prompt(number, 400), 2, prompt_logprobs=True, logprobs=2) for number in range(4)]
    model = WatchedModel(lambda _: None)
    sliced = run(make_engine(model, kv_pages=256, token_budget=2048), submits)
    assert max(model.wide) <= 256
    small = run(make_engine(kv_pages=256, token_budget=50), submits)
    for submit in submits:
        found, expected = [_prompt_logprobs(collected.deltas[submit.id][0]) for collected in (sliced, small)]
        assert len(found) == 400
        assert found[0] is None
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert one is not None
            assert other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("rows", [300, 40, 5])
def test_a_step_without_enough_memory_is_made_smaller(rows: int) -> None:
    """Down to where not even all sequences that decode fit into one step: all get their exact tokens."""
    submits = [make_submit(number, random_prompt(number, 20 + 70 * (number % 4)), 12, logprobs=1) for number in range(10)]
    # A page must fit.
    engine = make_engine(WatchedModel(at_most(rows)), kv_pages=256, token_budget=512, page_size=4)
    collected = run(engine, submits)
    for submit in submits:
        assert collected.tokens[submit.id] == reference_tokens("llama", submit.token_ids, 12)
        assert collected.terminals[submit.id] == Finish("length")
    assert engine.stats().memory_failures > 0


def test_the_next_steps_are_small_enough_from_the_start() -> None:
    engine = make_engine(WatchedModel(at_most(100)), kv_pages=64, token_budget=512)
    run(engine, [make_submit(0, random_prompt(0, 480), 4)])
    assert engine.stats().memory_failures == 3, "480 tokens, 240, 120; then 60 at a time"


def test_all_get_their_token_in_every_step_that_is_made_smaller() -> None:
    engine = make_engine(WatchedModel(at_most(8)), kv_pages=64, page_size=4)
    for number in range(12):
        engine.submit(make_submit(number, random_prompt(number, 6), 20))
    while len(engine.step()) < 12:
        pass
    assert all(len(engine.step()) == 12 for _ in range(5)), "not only those of the first half"


def test_only_the_request_that_cannot_run_fails() -> None:
    def check(batch: Batch) -> None:
        if 299 in batch.token_ids:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate memory")

    engine = make_engine(WatchedModel(check), kv_pages=256, token_budget=512)
    prompts = [[token % 298 for token in random_prompt(number, 60)] for number in range(5)]
    doomed = prompts[2]
    doomed[40] = 299
    collected = run(engine, [make_submit(number, prompt, 20) for number, prompt in enumerate(prompts)])
    fault = collected.terminals[generation_id(2)]
    assert isinstance(fault, Fault)
    assert (fault.code, fault.retryable) == ("out_of_memory", True)
    for number in (0, 1, 3, 4):
        tokens = collected.tokens[generation_id(number)]
        # A random answer may have the token that nothing can be computed for.
        expected = reference_tokens("llama", prompts[number], 20)
        assert tokens == expected or (tokens == expected[: len(tokens)] and tokens[-1] == 299)
    later = run(engine, [make_submit(9, [*doomed[:40], 1, 2, 3], 5)])
    report = later.deltas[generation_id(9)][0].prompt
    assert report is not None
    assert report.cached_tokens == 16, "what was computed of it is kept, the first 30 tokens; what failed is not"
    assert later.tokens[generation_id(9)] == reference_tokens("llama", [*doomed[:40], 1, 2, 3], 5)


def test_prompt_logprobs_are_whole_when_memory_runs_out_between() -> None:
    """Memory runs out after the first of two prompts has its logprobs: they are not there twice."""
    failures = iter([False, False, True])

    class Failing(WatchedModel):
        def logits(self, hidden: Tensor) -> Tensor:
            if next(failures, False):
                raise MemoryError
            return super().logits(hidden)

    submits = [make_submit(number, random_prompt(number, 100), 3, prompt_logprobs=True, logprobs=0) for number in range(2)]
    engine = make_engine(Failing(lambda _: None), kv_pages=64)
    collected = run(engine, submits)
    assert engine.stats().memory_failures == 1
    for submit in submits:
        assert len(_prompt_logprobs(collected.deltas[submit.id][0])) == 100
        assert collected.tokens[submit.id] == reference_tokens("llama", submit.token_ids, 3)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def check(batch: Batch) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = make_engine(WatchedModel(check))
    engine.submit(make_submit(0, [1, 2, 3], 2))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


def test_what_a_real_allocation_says_is_understood() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


def test_the_budget_grows_again() -> None:
    budget = StepBudget(8192, 16)
    budget.failed(8192)
    budget.failed(4096)
    assert budget.tokens == 2048
    for _ in range(STEPS_TO_GROW):
        budget.succeeded()
    assert budget.tokens == 4096
    for _ in range(4 * STEPS_TO_GROW):
        budget.succeeded()
    assert budget.tokens == 8192, "not more than the setting"
    for _ in range(20):
        budget.failed(1)
    assert budget.tokens == 16, "not less than a page"


def test_a_model_is_loaded_tensor_by_tensor() -> None:
    """None of a checkpoint's tensors is kept beside the model, not even until those that it is joined with are there."""
    alive: list[weakref.ref[Tensor]] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in reference("llama").state_dict().items():
            own = tensor.clone()
            assert sum(each() is not None for each in alive) <= 1, "the one before, at most"
            alive.append(weakref.ref(own))
            yield name, own
            del own

    shape = make_model("llama").shape
    run(make_engine(Model(shape, tensors(), 512, torch.float32, CPU)), [make_submit(0, [1, 2, 3], 2)])
    assert len(alive) == len(reference("llama").state_dict())


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"model.norm.weight": None}, "no weight 'model.norm.weight'"),
        ({"model.layers.1.self_attn.k_proj.weight": torch.zeros(3, 64)}, r"k_proj.weight' has shape \(3, 64\).* says \(32, 64\)"),
        ({"model.layers.0.extra.weight": torch.zeros(3)}, "1 weights that its configuration does not need, such as model.layers.0.extra"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changed: dict[str, Tensor | None], error: str) -> None:
    tensors = {name: tensor for name, tensor in (reference("llama").state_dict() | changed).items() if tensor is not None}
    with pytest.raises(ConfigError, match=error):
        Model(make_model("llama").shape, tensors.items(), 512, torch.float32, CPU)
