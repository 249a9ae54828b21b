"""Continuous batching: rows of all calls decode together, finished rows leave at once, waiting rows join.

Legend: n live rows, V vocabulary, N prompts of a prefill.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.adapters import own_turn
from rlhf.errors import EngineError
from rlhf.models import LogitHead, attention_masks, backbone_of, base_model, evaluating
from rlhf.rollout.attention import grouped
from rlhf.rollout.batch import FinishReason
from rlhf.rollout.cache import SlotCache
from rlhf.rollout.draw import DrawOptions, draw, row_seeds, uniforms
from rlhf.rollout.sampling import SamplingParams

STEPS_AHEAD = 16  # random numbers made at a time


class Response(NamedTuple):
    """One finished row: ids as sampled (the end token included), their log-probabilities, and why it ended."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass(eq=False)
class Call:
    """One `generate` call on its way: prompts in, responses out in prompt-major order.

    Attributes:
        prompts: int64 [P] each, on the CPU.
        limits: most new tokens for each prompt.
        stop_ids: every token id that ends a response.
        future: gets the responses; cancelling it frees the rows.
        finished: how many responses there are so far.
    """

    prompts: list[Tensor]
    sampling: SamplingParams
    limits: list[int]
    seed: int
    stop_ids: frozenset[int]
    future: Future[list[Response]] = field(default_factory=Future)
    finished: int = 0

    def __post_init__(self) -> None:
        rows = len(self.prompts) * self.sampling.n
        self.responses: list[Response | None] = [None] * rows
        self.seeds: list[int] = row_seeds(self.seed, rows).tolist()

    def resolve(self, error: BaseException | None = None) -> None:
        """Hand over the responses, or `error`; the last thing that happens to a call, cancelled or not."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(self.responses)  # type: ignore[arg-type]
        else:
            self.future.set_exception(error)


@dataclass(eq=False)
class _Group:
    """Rows of one prompt that wait for slots."""

    call: Call
    prompt: int
    rows: Sequence[int]

    @property
    def ids(self) -> Tensor:
        return self.call.prompts[self.prompt]

    @property
    def tokens(self) -> int:
        """Keys and values of one row at most."""
        return len(self.ids) + self.call.limits[self.prompt]


class _Row:
    """A live response."""

    def __init__(self, group: _Group, index: int) -> None:
        self.call = group.call
        self.sampling = group.call.sampling
        self.index = index
        self.seed = group.call.seeds[index]
        self.prompt_tokens = len(group.ids)
        self.limit = group.call.limits[group.prompt]
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    @property
    def position(self) -> int:
        """Where the last sampled token stands; keys and values of all before it are stored."""
        return self.prompt_tokens + len(self.ids) - 1

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.limit

    @property
    def forbidden_steps(self) -> int:
        """For how many further tokens end tokens are forbidden."""
        return self.sampling.min_new_tokens - len(self.ids)


class Decoder:
    """The running batch of a model, driven by one thread for as long as there is work.

    Args:
        model: a causal language model of transformers.
        head: how logits come from its hidden states, None to use the model's own forward.
        decode_text: ids -> text with special tokens, for stop strings.
        max_rows: most rows that decode together.
        max_batch_tokens: most tokens of keys and values held, slots × longest row.
        max_prefill_tokens: most prompt tokens, padding included, in one forward pass of several prompts.
    """

    def __init__(
        self,
        model: Any,
        head: LogitHead | None,
        decode_text: Callable[[list[int]], str],
        *,
        max_rows: int,
        max_batch_tokens: int,
        max_prefill_tokens: int,
    ) -> None:
        self._model = model
        self._head = head
        self._decode_text = decode_text
        self._max_rows = max_rows
        self._budget = max_batch_tokens
        self._prefill_budget = max_prefill_tokens
        self._lock = threading.Lock()  # guards the next three; all else belongs to the driver
        self._arrived: list[Call] = []
        self._driver: threading.Thread | None = None
        self._someone_cancelled = False
        self._device = torch.device("cpu")
        self._cache: SlotCache | None = None
        self._calls: list[Call] = []
        self._left: list[Call] = []  # finished or cancelled, their callers not yet told
        self._waiting: deque[_Group] = deque()
        self._rows: list[_Row] = []  # the row in slot i at i
        self._batch: _Batch | None = None  # None after rows came or went

    def submit(self, call: Call) -> None:
        """Let `call` join the batch; its future gets the responses."""
        call.future.add_done_callback(self._notice_cancelled)
        with self._lock:
            if self._driver is None:
                driver = threading.Thread(target=self._drive, name="rlhf-decoder", daemon=True)
                driver.start()  # it waits for the lock before it looks for calls
                self._driver = driver
            self._arrived.append(call)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """No call starts while the block runs.

        Raises:
            EngineError: one is running.
        """
        with self._lock:
            if self._driver is not None:
                raise EngineError("weights cannot change while responses are being generated; wait for the running calls")
            yield

    def _notice_cancelled(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._someone_cancelled = True

    # ---------------------------------------------------------------- the driver thread

    def _drive(self) -> None:
        error: BaseException | None = None
        while not self._resign(error):
            try:
                self._device = next(self._model.parameters()).device
                on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
                with torch.no_grad(), evaluating(self._model), on_device:
                    while self._take_arrivals():
                        self._resolve_left()
                        with own_turn(self._model):
                            self._step()
            except BaseException as caught:
                error = caught

    def _take_arrivals(self) -> bool:
        """Queue what has arrived and drop what was cancelled; False when there is nothing to do."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            someone_cancelled, self._someone_cancelled = self._someone_cancelled, False
        for call in arrived:
            n = call.sampling.n
            self._calls.append(call)
            self._waiting += [_Group(call, p, range(p * n, (p + 1) * n)) for p in range(len(call.prompts))]
        if someone_cancelled:
            cancelled = {call for call in self._calls if call.future.cancelled()}  # once: another may be cancelled at any moment
            self._waiting = deque(group for group in self._waiting if group.call not in cancelled)
            self._release([slot for slot, row in enumerate(self._rows) if row.call in cancelled])
            for call in cancelled:
                self._leave(call)
        return bool(self._waiting or self._rows)

    def _leave(self, call: Call) -> None:
        self._calls.remove(call)
        self._left.append(call)

    def _resolve_left(self) -> None:
        left, self._left = self._left, []
        for call in left:
            call.resolve()

    def _resign(self, error: BaseException | None) -> bool:
        """End the driver: the model is as it was and the memory is free before any caller hears of it. False if calls have come in."""
        with self._lock:
            if error is None and self._arrived:
                return False
            left, failed = self._left, [*self._calls, *self._arrived]
            self._arrived = []
            self._clear()
            self._driver = None
        for call in left:
            call.resolve()
        for call in failed:
            call.resolve(error)
        return True

    def _clear(self) -> None:
        if self._cache is not None:
            self._cache.free()
        self._cache, self._batch = None, None
        for held in (self._calls, self._waiting, self._rows):
            held.clear()
        self._left = []

    def _step(self) -> None:
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        if self._rows:
            self._decode()

    # ---------------------------------------------------------------- admission

    def _admit(self) -> list[_Group]:
        """Groups (or the part of one that fits) whose rows get slots now, in the order they came."""
        admitted: list[_Group] = []
        used = len(self._rows)
        longest = max((row.tokens for row in self._rows), default=0) if self._waiting else 0
        while self._waiting:
            group = self._waiting[0]
            size, needed = len(group.rows), max(longest, group.tokens)
            most = min(self._max_rows, self._budget // needed)
            # every part of a group costs a prefill, but one of more than half of the batch would wait until the batch is all but empty
            least = size if size <= most // 2 else min(size, max(1, most // 4))
            room = most - used
            if room < least:
                break
            self._waiting.popleft()
            if room < size:
                self._waiting.appendleft(_Group(group.call, group.prompt, group.rows[room:]))
                group = _Group(group.call, group.prompt, group.rows[:room])
            admitted.append(group)
            used, longest = used + len(group.rows), needed
        if admitted:
            self._reserve(used, longest)
        return admitted

    def _reserve(self, rows: int, tokens: int) -> None:
        """Have slots for `rows` rows of `tokens` tokens; rows × tokens is within the budget."""
        if self._cache is None:
            # room for all that waits, as far as the budget goes: growing later means copying
            capacity = max([tokens, *(group.tokens for group in self._waiting)])
            capacity = capacity if capacity * rows <= self._budget else tokens
            wanted = rows + sum(len(group.rows) for group in self._waiting)
            self._cache = SlotCache(max(rows, min(wanted, self._max_rows, self._budget // capacity)), capacity)
        elif rows > self._cache.slots or tokens > self._cache.capacity:
            capacity = max(tokens, min(self._cache.capacity, self._budget // rows))
            slots = max(rows, min(2 * self._cache.slots, self._max_rows, self._budget // capacity))
            self._cache.resize(slots, capacity, len(self._rows))

    # ---------------------------------------------------------------- forward passes

    def _prefill(self, groups: list[_Group]) -> None:
        """Run each prompt once, hand its keys and values to all its rows, and sample their first tokens."""
        batch: list[_Group] = []
        for group in sorted(groups, key=lambda group: -len(group.ids)):
            if batch and len(batch[0].ids) * (len(batch) + 1) > self._prefill_budget:
                self._prefill_batch(batch)
                batch = []
            batch.append(group)
        self._prefill_batch(batch)

    def _prefill_batch(self, groups: list[_Group]) -> None:
        assert self._cache is not None
        lengths = torch.tensor([len(group.ids) for group in groups])
        width = int(lengths[0])
        ids = torch.zeros(len(groups), width, dtype=torch.int64)
        for i, group in enumerate(groups):
            ids[i, : len(group.ids)] = group.ids
        counts = torch.tensor([len(group.rows) for group in groups])
        live = len(self._rows)
        first = live + counts.cumsum(0) - counts
        self._cache.prefill(first.to(self._device))
        positions = torch.arange(width, device=self._device).expand(len(groups), -1)
        logits = self._logits(ids.to(self._device), positions, None, (lengths - 1).to(self._device))
        source, slots = first.repeat_interleave(counts), torch.arange(live, live + int(counts.sum()))
        copied = slots != source
        if copied.any():
            self._cache.copy(source[copied].to(self._device), slots[copied].to(self._device), width)
        rows = [_Row(group, index) for group in groups for index in group.rows]
        self._rows += rows
        self._batch = None
        group_of = torch.arange(len(groups)).repeat_interleave(counts).to(self._device)
        self._accept(live, *_Batch(rows, self._device).draw(logits[group_of])[1:])

    def _decode(self) -> None:
        assert self._cache is not None
        if self._batch is None:
            self._batch = _Batch(self._rows, self._device)
        batch = self._batch
        self._cache.decode(batch.rows, batch.positions, batch.width)
        distance = batch.positions[:, None, None] - torch.arange(batch.width, device=self._device)
        mask = attention_masks(self._model, distance >= 0, distance)
        with grouped(self._model):
            logits = self._logits(batch.tokens[:, None], batch.positions[:, None], mask, None)
        batch.tokens, tokens, logprobs = batch.draw(logits)
        batch.positions = batch.positions + 1
        batch.width += 1
        self._accept(0, tokens, logprobs)

    def _logits(self, ids: Tensor, positions: Tensor, mask: Any, last: Tensor | None) -> Tensor:
        """float32 [rows, V] after token `last` of each row (the only one if None)."""
        options = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "past_key_values": self._cache, "use_cache": True}
        rows = torch.arange(len(ids), device=ids.device)
        if self._head is None:
            logits = base_model(self._model)(**options).logits
            return (logits[:, 0] if last is None else logits[rows, last]).float()
        hidden = backbone_of(self._model)(**options).last_hidden_state
        return self._head.logits(hidden[:, 0] if last is None else hidden[rows, last]).float()

    # ---------------------------------------------------------------- rows

    def _accept(self, first: int, tokens: list[int], logprobs: list[float]) -> None:
        """Give a token each to the rows from slot `first` on, and let those that are done go.

        Raises:
            EngineError: the logits were not finite.
        """
        if not math.isfinite(sum(logprobs)):
            raise EngineError("the model's logits must be finite, got NaN or inf; its weights are broken: look at the last updates")
        done = []
        for slot, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), first):
            row = self._rows[slot]
            row.ids.append(token)
            row.logprobs.append(logprob)
            if token in row.call.stop_ids or (row.sampling.stop and self._ends_in_stop_text(row)):
                reason = FinishReason.STOP
            elif len(row.ids) >= row.limit:
                reason = FinishReason.LENGTH
            else:
                continue
            done.append(slot)
            row.call.responses[row.index] = Response(row.ids, row.logprobs, reason)
            row.call.finished += 1
            if row.call.finished == len(row.call.responses):
                self._leave(row.call)
        self._release(done)

    def _ends_in_stop_text(self, row: _Row) -> bool:
        """Whether the last token completes a stop string: each token holds at least one byte, so a short tail is enough."""
        if row.forbidden_steps > 0:
            return False
        stops: Sequence[str] = row.sampling.stop  # type: ignore[assignment]
        reach = max(len(stop.encode()) for stop in stops) + 8
        text = self._decode_text(row.ids[-reach:])
        if not any(stop in text for stop in stops):
            return False
        earlier = self._decode_text(row.ids[-reach:-1])  # min_new_tokens may have let one pass
        return any(text.count(stop) > earlier.count(stop) for stop in stops)

    def _release(self, slots: list[int]) -> None:
        """Free slots and move the last live rows into the holes, so that live rows stay in front."""
        if not slots:
            return
        self._batch = None
        assert self._cache is not None
        gone = set(slots)
        kept = len(self._rows) - len(gone)
        holes = sorted(slot for slot in gone if slot < kept)
        movers = [slot for slot in range(kept, len(self._rows)) if slot not in gone]
        if holes:
            width = max(self._rows[mover].position for mover in movers)
            self._cache.copy(torch.tensor(movers, device=self._device), torch.tensor(holes, device=self._device), width)
            for mover, hole in zip(movers, holes, strict=True):
                self._rows[hole] = self._rows[mover]
        del self._rows[kept:]


class _Batch:
    """Live rows as tensors on the device, for as many steps as the rows stay the same.

    Attributes:
        rows: arange(n).
        tokens, positions: int64 [n], the last token of each row and where it stands.
        width: above all positions.
    """

    def __init__(self, rows: list[_Row], device: torch.device) -> None:
        self._live = list(rows)
        self._device = device
        self.rows = torch.arange(len(rows), device=device)
        self.tokens = torch.tensor([row.ids[-1] if row.ids else 0 for row in rows], device=device)
        positions = [row.position for row in rows]
        self.positions = torch.tensor(positions, device=device)
        self.width = max(positions) + 1
        self._options = DrawOptions.of([row.sampling for row in rows], device)
        self._seeds = torch.tensor([row.seed for row in rows])[:, None]
        self._made = torch.tensor([len(row.ids) for row in rows])[:, None]
        self._uniforms = torch.empty(0)
        self._steps = 0
        self._forbidden: tuple[Tensor, Tensor] | None = None
        self._forbidden_until = 0 if any(row.forbidden_steps > 0 for row in rows) else math.inf

    def draw(self, logits: Tensor) -> tuple[Tensor, list[int], list[float]]:
        """The next token of each row: as a tensor and as a list, and its log-probability."""
        column = self._steps % STEPS_AHEAD
        if column == 0:
            ahead = uniforms(self._seeds, self._made + self._steps + torch.arange(STEPS_AHEAD))
            self._uniforms = ahead.to(self._device)
        if self._steps >= self._forbidden_until:
            self._forbid(logits.shape[1])
        tokens, logprobs = draw(logits, self._uniforms[:, column], self._options, self._forbidden)
        self._steps += 1
        return tokens, tokens.tolist(), logprobs.tolist()

    def _forbid(self, vocabulary: int) -> None:
        """Forbid end tokens where a row is too short for them, until the next row is long enough."""
        early = [(i, row) for i, row in enumerate(self._live) if row.forbidden_steps > 0]
        pairs = [(i, token) for i, row in early for token in row.call.stop_ids if token < vocabulary]
        self._forbidden = tuple(torch.tensor(pairs, device=self._device).unbind(1)) if pairs else None  # type: ignore[assignment]
        self._forbidden_until = self._steps + min((row.forbidden_steps for _, row in early), default=math.inf)
