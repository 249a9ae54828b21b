"""Continuous batching: who decodes with whom, what it costs, and what happens when something breaks."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rlhf import SamplingParams, TransformersEngine
from rlhf.errors import EngineError
from rlhf.rollout import FinishReason, Rollout, cache
from tests.models import VOCABULARY, char_tokenizer, tiny_model

NEVER = -1


def _prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def _engine(model: Any = None, tokenizer: Any = None, **options: Any) -> TransformersEngine:
    return TransformersEngine(tiny_model("qwen2", eos=NEVER) if model is None else model, tokenizer, progress=False, **options)


@contextmanager
def _passes(model: Any) -> Iterator[list[tuple[str, int, int]]]:
    """Every forward pass of the backbone inside the block: ("prefill" | "decode", rows, tokens a row)."""
    seen: list[tuple[str, int, int]] = []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows, tokens = kwargs["input_ids"].shape
        seen.append(("prefill" if kwargs["attention_mask"] is None else "decode", rows, tokens))

    handle = model.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _decoded(seen: list[tuple[str, int, int]]) -> list[int]:
    """Rows of each decode pass."""
    return [rows for kind, rows, _ in seen if kind == "decode"]


def _prefilled(seen: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
    return [(rows, tokens) for kind, rows, tokens in seen if kind == "prefill"]


def _ids(rollout: Rollout) -> list[list[int]]:
    return [rollout.response_ids[row, :length].tolist() for row, length in enumerate(rollout.lengths.tolist())]


def _assert_same(a: Rollout, b: Rollout) -> None:
    """The same ids and, to 1e-5, the same log-probabilities: matrix products round differently in batches of another size."""
    assert _ids(a) == _ids(b)
    assert a.finish_reasons == b.finish_reasons
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)


def _is_idle(engine: TransformersEngine) -> bool:
    return engine._decoder._driver is None and engine._decoder._cache is None


# ---------------------------------------------------------------- cost


def test_each_prompt_is_run_once_for_its_whole_group() -> None:
    engine = _engine()
    with _passes(engine.model) as seen:
        engine.generate(_prompts(10, 10, 10), SamplingParams(n=8, max_new_tokens=5))
    assert seen == [("prefill", 3, 10)] + [("decode", 24, 1)] * 4  # the first token comes from the prompt's pass


def test_long_prompts_are_split_by_the_prefill_budget_and_sorted_by_length() -> None:
    engine = _engine(max_prefill_tokens=40)
    with _passes(engine.model) as seen:
        rollout = engine.generate(_prompts(3, 20, 2, 50, 19, 4), SamplingParams(n=2, max_new_tokens=4, seed=0))
    assert _prefilled(seen) == [(1, 50), (2, 20), (3, 4)]
    _assert_same(rollout, _engine().generate(_prompts(3, 20, 2, 50, 19, 4), SamplingParams(n=2, max_new_tokens=4, seed=0)))


def test_finished_rows_leave_at_once() -> None:
    engine = _engine(tiny_model("qwen2"))
    with _passes(engine.model) as seen:
        rollout = engine.generate(_prompts(5, 8), SamplingParams(n=12, max_new_tokens=40, stop_token_ids=range(3, 8), seed=0))
    lengths = rollout.lengths
    assert len(lengths.unique()) > 6
    assert _decoded(seen) == [int((lengths > step).sum()) for step in range(1, int(lengths.max()))]


def test_waiting_rows_join_as_others_leave() -> None:
    sampling = SamplingParams(max_new_tokens=30, stop_token_ids=range(3, 10), seed=0)
    engine = _engine(tiny_model("qwen2"), max_rows=4)
    prompts = _prompts(*range(2, 22))
    with _passes(engine.model) as seen:
        narrow = engine.generate(prompts, sampling)
    rows = _decoded(seen)
    assert max(rows) == 4
    busy = int((narrow.lengths - 1).sum())
    assert len(rows) < busy / 4 + 30  # no idle slots but at the end
    assert sum(len_ * rows_ for rows_, len_ in _prefilled(seen)) < 2 * sum(map(len, prompts))
    _assert_same(narrow, _engine(tiny_model("qwen2")).generate(prompts, sampling))


def test_a_group_larger_than_the_batch_goes_through_in_parts() -> None:
    sampling = SamplingParams(n=10, max_new_tokens=20, stop_token_ids=range(3, 10), seed=0)
    whole = _engine(tiny_model("qwen2")).generate(_prompts(5, 9), sampling)
    for max_rows in (1, 4, 7):
        engine = _engine(tiny_model("qwen2"), max_rows=max_rows)
        with _passes(engine.model) as seen:
            _assert_same(engine.generate(_prompts(5, 9), sampling), whole)
        assert max(_decoded(seen)) <= max_rows


def test_the_token_budget_holds_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int]] = []
    made, resized = cache.SlotCache.__init__, cache.SlotCache.resize

    def note_made(self: Any, slots: int, capacity: int) -> None:
        held.append((slots, capacity))
        made(self, slots, capacity)

    def note_resized(self: Any, slots: int, capacity: int, live: int) -> None:
        held.append((slots, capacity))
        resized(self, slots, capacity, live)

    monkeypatch.setattr(cache.SlotCache, "__init__", note_made)
    monkeypatch.setattr(cache.SlotCache, "resize", note_resized)
    options = [SamplingParams(n=3, max_new_tokens=new, stop_token_ids=range(3, 10), seed=new) for new in (5, 60, 20, 90, 3)]
    prompts = [_prompts(length, seed=length) for length in (4, 30, 9, 8, 2)]

    async def together(engine: TransformersEngine) -> list[Rollout]:
        return await asyncio.gather(*(engine.agenerate(p, s) for p, s in zip(prompts, options, strict=True)))

    engine = _engine(tiny_model("qwen2"), max_batch_tokens=200)
    tight = asyncio.run(together(engine))
    assert held
    assert all(slots * capacity <= 200 for slots, capacity in held)
    assert len({capacity for _, capacity in held}) > 1
    for got, expected in zip(tight, asyncio.run(together(_engine(tiny_model("qwen2")))), strict=True):
        _assert_same(got, expected)


def test_one_long_row_does_not_narrow_the_batch_for_good() -> None:
    engine = _engine(max_batch_tokens=120, max_rows=16)
    with _passes(engine.model) as seen:
        engine.generate(_prompts(2, *[3] * 20), SamplingParams(max_new_tokens=9))
    assert max(_decoded(seen)) == 10

    async def long_then_short() -> None:
        long = asyncio.create_task(engine.agenerate(_prompts(60), SamplingParams(max_new_tokens=60)))
        short = asyncio.create_task(engine.agenerate(_prompts(*[3] * 20), SamplingParams(max_new_tokens=9)))
        await asyncio.gather(long, short)

    with _passes(engine.model) as seen:
        asyncio.run(long_then_short())
    assert _decoded(seen)[:50] == [1] * 50  # the budget is the long row's alone
    assert max(_decoded(seen)) == 10  # and everybody's after it


def test_memory_is_free_when_a_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []
    empty = cache._empty

    def note(*args: Any) -> torch.Tensor:
        tensor = empty(*args)
        tensors.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(cache, "_empty", note)
    engine = _engine()
    gc.disable()  # nothing may hang in a cycle
    try:
        engine.generate(_prompts(4), SamplingParams(n=3, max_new_tokens=4))
        assert len(tensors) == 4
        assert all(ref() is None for ref in tensors)
        engine.model.model.layers[1].register_forward_pre_hook(_fail_at(3))
        with pytest.raises(RuntimeError, match="pass 3") as caught:
            engine.generate(_prompts(4), SamplingParams(n=3, max_new_tokens=8))
        assert all(ref() is None for ref in tensors)  # even while the traceback lives
        assert caught.traceback
    finally:
        gc.enable()


# ---------------------------------------------------------------- what a sample depends on


@pytest.mark.parametrize("options", [{"max_rows": 1}, {"max_rows": 3}, {"max_batch_tokens": 60}, {"max_prefill_tokens": 1}], ids=str)
def test_samples_do_not_depend_on_the_engines_sizes(options: dict[str, int]) -> None:
    sampling = SamplingParams(n=4, max_new_tokens=16, temperature=1.2, seed=3, stop_token_ids=[7, 8, 9])
    expected = _engine(tiny_model("gemma2", eos=NEVER)).generate(_prompts(5, 2, 11), sampling)
    _assert_same(_engine(tiny_model("gemma2", eos=NEVER), **options).generate(_prompts(5, 2, 11), sampling), expected)


def test_samples_do_not_depend_on_company_or_its_order() -> None:
    calls = [(_prompts(2 + i, seed=i), SamplingParams(n=2, max_new_tokens=6 + 2 * i, seed=i)) for i in range(6)]
    alone = [_engine().generate(*call) for call in calls]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        engine = _engine(max_rows=5)

        async def together(order: list[int] = order, engine: TransformersEngine = engine) -> list[Rollout]:
            return await asyncio.gather(*(engine.agenerate(*calls[i]) for i in order))

        for i, got in zip(order, asyncio.run(together()), strict=True):
            _assert_same(got, alone[i])


# ---------------------------------------------------------------- concurrency


def test_concurrent_coroutines_decode_as_one_batch() -> None:
    engine = _engine()
    sampling = SamplingParams(n=2, max_new_tokens=40, seed=0)

    async def together() -> list[Rollout]:
        return await asyncio.gather(*(engine.agenerate(_prompts(5, seed=i), sampling) for i in range(9)))

    with _passes(engine.model) as seen:
        rollouts = asyncio.run(together())
    steps = _decoded(seen)
    assert max(steps) == 18
    assert len(steps) < 2 * 39  # one after the other would take 9 × 39
    assert all(rollout.lengths.tolist() == [40, 40] for rollout in rollouts)
    assert _is_idle(engine)


def test_concurrent_threads_decode_as_one_batch() -> None:
    engine = _engine()
    sampling = SamplingParams(n=2, max_new_tokens=120, seed=0)
    start = threading.Barrier(8)

    def work(i: int) -> Rollout:
        start.wait()
        return engine.generate(_prompts(5, seed=i), sampling)

    with _passes(engine.model) as seen, ThreadPoolExecutor(8) as pool:
        rollouts = list(pool.map(work, range(8)))
    assert len(_decoded(seen)) < 4 * 119  # one after the other would take 8 × 119
    for i, rollout in enumerate(rollouts):
        _assert_same(rollout, _engine().generate(_prompts(5, seed=i), sampling))


def test_generate_is_legal_inside_a_running_event_loop() -> None:
    engine = _engine()
    sampling = SamplingParams(max_new_tokens=4, seed=0)

    async def inside() -> Rollout:
        return engine.generate(_prompts(4), sampling)

    _assert_same(asyncio.run(inside()), engine.generate(_prompts(4), sampling))


def test_many_short_calls_start_and_stop_the_driver_without_losing_one() -> None:
    engine = _engine()
    with ThreadPoolExecutor(4) as pool:
        rollouts = list(pool.map(lambda i: engine.generate(_prompts(3), SamplingParams(max_new_tokens=1 + i % 3, seed=i)), range(60)))
    assert [int(rollout.lengths[0]) for rollout in rollouts] == [1 + i % 3 for i in range(60)]
    assert _is_idle(engine)
    for thread in threading.enumerate():
        if thread.name == "rlhf-decoder":
            thread.join(5)
            assert not thread.is_alive()


# ---------------------------------------------------------------- cancelling and failing


def test_cancelling_a_coroutine_frees_its_rows_and_others_go_on() -> None:
    engine = _engine()

    async def scenario() -> Rollout:
        reached = asyncio.Event()
        loop, passes = asyncio.get_running_loop(), iter(range(10**6))

        def slow(*_: Any) -> None:
            time.sleep(0.001)
            if next(passes) == 10:
                loop.call_soon_threadsafe(reached.set)

        handle = engine.model.model.register_forward_pre_hook(slow)
        kept = asyncio.create_task(engine.agenerate(_prompts(4), SamplingParams(n=2, max_new_tokens=200, seed=1)))
        dropped = asyncio.create_task(engine.agenerate(_prompts(6), SamplingParams(n=5, max_new_tokens=200, seed=2)))
        await reached.wait()
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        await asyncio.sleep(0.05)  # the other has at least 0.19 seconds to go
        assert len(engine._decoder._calls) == 1
        rollout = await kept
        handle.remove()
        return rollout

    with _passes(engine.model) as seen:
        rollout = asyncio.run(scenario())
    assert max(_decoded(seen)) == 7
    assert _decoded(seen)[-1] == 2
    assert _decoded(seen).count(7) < 150
    _assert_same(rollout, _engine().generate(_prompts(4), SamplingParams(n=2, max_new_tokens=200, seed=1)))
    assert _is_idle(engine)


def test_calls_that_wait_can_be_cancelled() -> None:
    engine = _engine(max_rows=1)

    async def scenario() -> Rollout:
        tasks = [asyncio.create_task(engine.agenerate(_prompts(4), SamplingParams(max_new_tokens=30, seed=i))) for i in range(5)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [False, True, True, True, False]
        return results[4]

    with _passes(engine.model) as seen:
        rollout = asyncio.run(scenario())
    assert len(_prefilled(seen)) < 5
    _assert_same(rollout, _engine().generate(_prompts(4), SamplingParams(max_new_tokens=30, seed=4)))


def test_an_interrupted_generate_leaves_engine_and_model_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives in the waiting thread; when it goes on, no row is left and the model is back in its mode."""
    from rlhf.rollout import transformers_engine

    engine = _engine(tiny_model("qwen2", eos=NEVER).train())
    waits = iter([KeyboardInterrupt])
    original = transformers_engine.wait

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        for error in waits:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(transformers_engine, "wait", interrupted)
    with _passes(engine.model) as seen, pytest.raises(KeyboardInterrupt):
        engine.generate(_prompts(4), SamplingParams(n=4, max_new_tokens=200))
    assert len(_decoded(seen)) < 100
    assert _is_idle(engine)
    assert engine.model.training
    assert len(engine.generate(_prompts(4), SamplingParams(n=4, max_new_tokens=3))) == 4


def _fail_at(number: int) -> Any:
    """A hook that raises in one forward pass and none after it."""
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise RuntimeError(f"out of memory in pass {number}")

    return hook


@pytest.mark.parametrize("number", [1, 2, 6])
def test_a_failing_forward_reaches_every_caller_and_the_engine_works_again(number: int) -> None:
    """In the first prefill, in the first step, and later; calls that decode, that wait for slots, and that have only just come."""
    engine = _engine(tiny_model("qwen2", eos=NEVER).train(), max_rows=4)
    handle = engine.model.model.register_forward_pre_hook(_fail_at(number))

    async def together() -> list[Any]:
        calls = (engine.agenerate(_prompts(4, 5), SamplingParams(n=2, max_new_tokens=20, seed=i)) for i in range(8))
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=30)

    results = asyncio.run(together())
    # a call that came after the failure may have been served by a fresh batch
    assert all(isinstance(result, Rollout) or f"out of memory in pass {number}" in str(result) for result in results)
    assert sum(isinstance(result, RuntimeError) for result in results) >= 1
    assert engine.model.training
    assert _is_idle(engine)
    handle.remove()
    sampling = SamplingParams(n=2, max_new_tokens=20, seed=0)
    _assert_same(engine.generate(_prompts(4, 5), sampling), _engine().generate(_prompts(4, 5), sampling))


def test_a_failing_tokenizer_reaches_the_caller() -> None:
    tokenizer = char_tokenizer()
    engine = _engine(tokenizer=tokenizer)
    tokenizer.decode = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate([[5]], SamplingParams(max_new_tokens=3, stop="x"))
    assert _is_idle(engine)


def test_weights_cannot_change_while_rows_decode_and_calls_wait_while_they_do() -> None:
    engine, other = _engine(), tiny_model("qwen2", seed=1, eos=NEVER)
    decoding, go_on = threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        decoding.set()
        assert go_on.wait(10)

    handle = engine.model.model.register_forward_pre_hook(pause)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, _prompts(4), SamplingParams(max_new_tokens=3))
        assert decoding.wait(10)
        with pytest.raises(EngineError, match="weights cannot change while responses are being generated"):
            engine.update_weights(other)
        go_on.set()
        assert running.result(10).finish_reasons == [FinishReason.LENGTH]
    handle.remove()
    engine.update_weights(other)  # at once: a call that has returned is no longer running
    sampling = SamplingParams(max_new_tokens=8, seed=0)
    _assert_same(engine.generate(_prompts(4), sampling), _engine(other).generate(_prompts(4), sampling))
