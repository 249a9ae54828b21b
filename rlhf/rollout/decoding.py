"""Continuous batching: rows of all calls decode together, finished rows leave at once, waiting rows join.

Legend: n live rows, S slots, N prompts of a prefill, R longest response allowed.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf.models import LogitHead, attention_masks, backbone_of, base_model, evaluating
from rlhf.rollout.batch import FinishReason
from rlhf.rollout.cache import SlotCache
from rlhf.rollout.draw import DrawOptions, draw, row_seeds, uniforms
from rlhf.rollout.sampling import SamplingParams


@dataclass
class Response:
    """One finished row: ids as sampled (the end token included), their log-probabilities, and why it ended."""

    ids: Tensor
    logprobs: Tensor
    finish_reason: FinishReason


@dataclass
class Call:
    """One `generate` call on its way: prompts in, responses out in prompt-major order."""

    prompts: list[Tensor]
    sampling: SamplingParams
    limits: list[int]
    seed: int
    stop_ids: tuple[int, ...]
    future: Future[list[Response]] = field(default_factory=Future)
    responses: list[Response | None] = field(default_factory=list)
    on_response: Any = None
    left: int = 0

    def __post_init__(self) -> None:
        self.left = len(self.prompts) * self.sampling.n
        self.responses = [None] * self.left
        self.seeds = row_seeds(self.seed, self.left)

    def finish(self, index: int, response: Response) -> None:
        self.responses[index] = response
        self.left -= 1
        if self.on_response is not None:
            self.on_response()
        if not self.left and not self.future.done():
            self.future.set_result(self.responses)  # type: ignore[arg-type]


@dataclass
class _Group:
    """Rows of one prompt that wait for slots."""

    call: Call
    prompt: int
    rows: list[int]

    @property
    def tokens(self) -> int:
        return len(self.call.prompts[self.prompt]) + self.call.limits[self.prompt]


class Decoder:
    """The running batch of a model, driven by one thread for as long as there is work.

    Args:
        model: a causal language model of transformers.
        head: how logits come from its hidden states, None to use the model's own forward.
        decode_text: ids -> text with special tokens, for stop strings.
        max_rows: most rows that decode together.
        max_batch_tokens: most tokens of keys and values held, slots × longest row.
        max_prefill_tokens: most prompt tokens, padding included, in one forward pass.
    """

    def __init__(
        self, model: Any, head: LogitHead | None, decode_text: Any, *, max_rows: int, max_batch_tokens: int, max_prefill_tokens: int
    ) -> None:
        self._model = model
        self._head = head
        self._decode_text = decode_text
        self._max_rows = max_rows
        self._budget = max_batch_tokens
        self._prefill_budget = max_prefill_tokens
        self._lock = threading.Lock()
        self._arrived: list[Call] = []
        self._driver: threading.Thread | None = None
        self._clear()

    def submit(self, call: Call) -> None:
        """Let `call` join the batch; its future gets the responses."""
        with self._lock:
            self._arrived.append(call)
            if self._driver is None:
                self._driver = threading.Thread(target=self._drive, name="rlhf-decoder", daemon=True)
                self._driver.start()

    @property
    def busy(self) -> bool:
        return self._driver is not None

    # ---------------------------------------------------------------- the driver thread

    def _drive(self) -> None:
        try:
            with torch.no_grad(), evaluating(self._model):
                while self._take_arrivals():
                    self._step()
        except BaseException as error:
            self._fail(error)

    def _take_arrivals(self) -> bool:
        """Queue what has arrived and drop what was cancelled; False, with the driver resigned, when there is nothing left to do."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            for call in arrived:
                n = call.sampling.n
                self._waiting += [_Group(call, p, list(range(p * n, (p + 1) * n))) for p in range(len(call.prompts))]
            self._waiting = deque(group for group in self._waiting if not group.call.future.cancelled())
            cancelled = [slot for slot in range(self._live) if self._owners[slot][0].future.cancelled()]
            if cancelled:
                self._release(cancelled)
            if self._waiting or self._live:
                return True
            self._clear()
            self._driver = None
            return False

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            calls = {id(call): call for call in [*self._arrived, *(g.call for g in self._waiting), *(o[0] for o in self._owners)]}
            self._arrived = []
            self._clear()
            self._driver = None
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(error)

    def _clear(self) -> None:
        self._waiting: deque[_Group] = deque()
        self._owners: list[tuple[Call, int]] = []
        self._live = 0
        self._cache: SlotCache | None = None
        self._state: dict[str, Tensor] = {}

    def _step(self) -> None:
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        if self._live:
            self._decode_step()

    # ---------------------------------------------------------------- admission

    def _admit(self) -> list[_Group]:
        """Groups (or the part of one that fits) whose rows get slots now, in the order they came."""
        admitted: list[_Group] = []
        taken = 0
        while self._waiting:
            group = self._waiting[0]
            room = self._room(group.tokens, self._live + taken)
            if room < len(group.rows) and (self._live + taken or room < 1):
                break
            self._waiting.popleft()
            if room < len(group.rows):
                self._waiting.appendleft(_Group(group.call, group.prompt, group.rows[room:]))
                group = _Group(group.call, group.prompt, group.rows[:room])
            admitted.append(group)
            taken += len(group.rows)
            self._reserve(self._live + taken, group.tokens, self._live)
        return admitted

    def _room(self, tokens: int, used: int) -> int:
        capacity = max(tokens, self._cache.capacity if self._cache else 0)
        return min(self._max_rows, max(1, self._budget // capacity)) - used

    def _reserve(self, rows: int, tokens: int, live: int) -> None:
        if self._cache is None:
            # room for everything that waits, as far as the budget goes: growing later means copying
            capacity = max([tokens, *(group.tokens for group in self._waiting)])
            waiting = rows + sum(len(group.rows) for group in self._waiting)
            if self._budget // capacity < rows:
                capacity = tokens
            slots = max(rows, min(waiting, self._max_rows, self._budget // capacity))
            self._cache = SlotCache(slots, capacity)
        elif rows > self._cache.slots or tokens > self._cache.capacity:
            capacity = max(tokens, self._cache.capacity)
            slots = max(rows, min(2 * self._cache.slots, self._max_rows, self._budget // capacity))
            self._cache.resize(slots, capacity, live)

    # ---------------------------------------------------------------- forward passes

    def _prefill(self, groups: list[_Group]) -> None:
        """Run each prompt once, hand its keys and values to all its rows, and sample their first tokens."""
        groups = sorted(groups, key=lambda group: -len(group.call.prompts[group.prompt]))
        batch: list[_Group] = []
        for group in groups:
            widest = len((batch or [group])[0].call.prompts[(batch or [group])[0].prompt])
            if batch and widest * (len(batch) + 1) > self._prefill_budget:
                self._prefill_batch(batch)
                batch = []
            batch.append(group)
        self._prefill_batch(batch)

    def _prefill_batch(self, groups: list[_Group]) -> None:
        assert self._cache is not None
        prompts = [group.call.prompts[group.prompt] for group in groups]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = prompt
        counts = torch.tensor([len(group.rows) for group in groups])
        first = self._live + counts.cumsum(0) - counts
        self._cache.prefill(first.to(self._device))
        positions = torch.arange(width, device=self._device).expand(len(prompts), -1)
        logits = self._logits(ids.to(self._device), positions, None, (lengths - 1).to(self._device))
        slots = torch.arange(self._live, self._live + int(counts.sum()))
        source = first.repeat_interleave(counts)
        copied = slots != source
        if copied.any():
            self._cache.copy(source[copied].to(self._device), slots[copied].to(self._device), width)
        self._enter(groups, lengths)
        group_of = torch.arange(len(groups)).repeat_interleave(counts).to(self._device)
        self._accept(logits[group_of], slots.to(self._device))

    def _decode_step(self) -> None:
        assert self._cache is not None
        live = slice(self._live)
        positions = self._state["length"][live]
        width = int(positions.max()) + 1
        self._cache.decode(positions, width)
        stored = torch.arange(width, device=self._device)
        distance = (positions[:, None] - stored)[:, None]
        mask = attention_masks(self._model, distance >= 0, distance)
        logits = self._logits(self._state["token"][live, None], positions[:, None], mask, None)
        self._state["length"][live] += 1
        self._accept(logits, torch.arange(self._live, device=self._device))

    def _logits(self, ids: Tensor, positions: Tensor, mask: Any, last: Tensor | None) -> Tensor:
        """float32 [rows, V] after token `last` of each row (the only one if None)."""
        options = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "past_key_values": self._cache, "use_cache": True}
        rows = torch.arange(len(ids), device=ids.device)
        place = torch.zeros_like(rows) if last is None else last
        if self._head is None:
            return base_model(self._model)(**options).logits[rows, place].float()
        hidden = backbone_of(self._model)(**options).last_hidden_state
        return self._head.logits(hidden[rows, place]).float()

    # ---------------------------------------------------------------- rows

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _enter(self, groups: list[_Group], lengths: Tensor) -> None:
        """Give the rows of `groups` the next slots and their options."""
        assert self._cache is not None
        owners = [(group.call, row) for group in groups for row in group.rows]
        per_row = [(group, group.call.sampling) for group in groups for _ in group.rows]
        ends = max((len(call.stop_ids) for call, _ in owners), default=0)
        columns: dict[str, Tensor] = {
            "length": lengths.repeat_interleave(torch.tensor([len(group.rows) for group in groups])),
            "token": torch.zeros(len(owners), dtype=torch.int64),
            "made": torch.zeros(len(owners), dtype=torch.int64),
            "limit": torch.tensor([group.call.limits[group.prompt] for group, _ in per_row]),
            "least": torch.tensor([s.min_new_tokens for _, s in per_row]),
            "temperature": torch.tensor([s.temperature for _, s in per_row], dtype=torch.float32),
            "top_p": torch.tensor([s.top_p for _, s in per_row], dtype=torch.float32),
            "top_k": torch.tensor([s.top_k for _, s in per_row]),
            "min_p": torch.tensor([s.min_p for _, s in per_row], dtype=torch.float32),
            "seed": torch.stack([call.seeds[row] for call, row in owners]),
            "stop": torch.tensor([[*call.stop_ids, *[-1] * (ends - len(call.stop_ids))] for call, _ in owners]).view(len(owners), ends),
            "ids": torch.zeros(len(owners), max(group.call.limits[group.prompt] for group in groups), dtype=torch.int64),
        }
        columns["logprobs"] = torch.zeros(columns["ids"].shape, dtype=torch.float32)
        for name, new in columns.items():
            new = new.to(self._device)
            fill = -1 if name == "stop" else 0
            self._state[name] = _stacked(self._state[name][: self._live], new, fill) if name in self._state else new
        self._owners += owners
        self._live += len(owners)

    def _accept(self, logits: Tensor, slots: Tensor) -> None:
        """Sample a token for the rows in `slots` and let those that are done go."""
        state = {name: value[slots] for name, value in self._state.items() if name not in ("ids", "logprobs")}
        forbidden = None
        early = state["made"] < state["least"]
        if early.any() and state["stop"].shape[1]:
            banned = torch.where(early[:, None], state["stop"], -1)
            forbidden = torch.zeros(len(slots), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
            forbidden = forbidden.scatter_(1, torch.where(banned < 0, logits.shape[1], banned), True)[:, :-1]
        options = DrawOptions(state["temperature"], state["top_p"], state["top_k"], state["min_p"], forbidden)
        tokens, logprobs = draw(logits, uniforms(state["seed"], state["made"]), options)
        self._state["token"][slots] = tokens
        self._state["ids"][slots, state["made"]] = tokens
        self._state["logprobs"][slots, state["made"]] = logprobs
        made = state["made"] + 1
        self._state["made"][slots] = made
        stopped = (tokens[:, None] == state["stop"]).any(1)
        over = made >= state["limit"]
        texts = [i for i, slot in enumerate(slots.tolist()) if self._owners[slot][0].sampling.stop and not stopped[i]]
        if texts:
            stopped[[i for i in texts if made[i] >= state["least"][i] and self._ends_in_stop_text(int(slots[i]), int(made[i]))]] = True
        done = (stopped | over).nonzero().squeeze(1).tolist()
        if not done:
            return
        for i in done:
            slot, size = int(slots[i]), int(made[i])
            reason = FinishReason.STOP if stopped[i] else FinishReason.LENGTH
            call, index = self._owners[slot]
            ids, values = self._state["ids"][slot, :size].cpu().clone(), self._state["logprobs"][slot, :size].cpu().clone()
            call.finish(index, Response(ids, values, reason))
        self._release([int(slots[i]) for i in done])

    def _ends_in_stop_text(self, slot: int, made: int) -> bool:
        """Whether a stop string appears with the last token: each token holds at least one byte, so a short tail is enough."""
        stops = self._owners[slot][0].sampling.stop
        reach = max(len(stop.encode()) for stop in stops) + 8  # type: ignore[union-attr]
        tail = self._decode_text(self._state["ids"][slot, max(0, made - reach) : made].tolist())
        return any(stop in tail for stop in stops)  # type: ignore[operator]

    def _release(self, slots: list[int]) -> None:
        """Free slots and move the last live rows into the holes, so that live rows stay in front."""
        assert self._cache is not None
        gone = set(slots)
        kept = self._live - len(gone)
        holes = sorted(slot for slot in gone if slot < kept)
        movers = [slot for slot in range(kept, self._live) if slot not in gone]
        if holes:
            source, target = torch.tensor(movers, device=self._device), torch.tensor(holes, device=self._device)
            self._cache.copy(source, target, int(self._state["length"][source].max()) + 1)
            for value in self._state.values():
                value[target] = value[source]
            for mover, hole in zip(movers, holes, strict=True):
                self._owners[hole] = self._owners[mover]
        del self._owners[kept:]
        self._live = kept


def _stacked(old: Tensor, new: Tensor, fill: int) -> Tensor:
    """Rows of both, widened to the wider of the two with `fill`."""
    if old.dim() > 1 and old.shape[1] != new.shape[1]:
        width = max(old.shape[1], new.shape[1])
        old, new = (torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in (old, new))
    return torch.cat([old, new])

