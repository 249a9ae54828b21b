"""Which rows share a forward pass, and how their tokens lie in it.

Rows with one prompt are packed behind a single copy of it: every response attends to the prompt and to itself, its positions
continue the prompt's. Packs of similar length are stacked into micro-batches under a token budget.

Legend: R rows, N packs, L tokens of the longest pack, M counted response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlhf.errors import ConfigError, unknown_option
from rlhf.rollout.batch import Rollout

LAYOUTS = ("shared", "padded", "packed")


@dataclass(frozen=True)
class Pack:
    """A prompt and the rows of the rollout whose responses lie behind it; `length` counts the tokens of both."""

    rows: tuple[int, ...]
    length: int


def plan_micro_batches(
    rollout: Rollout, *, budget: int, layout: str = "shared", hidden_size: int = 1024, last_token: bool = False
) -> list[list[Pack]]:
    """Split the rows of a rollout into micro-batches of packs.

    Args:
        rollout: R rows. Rows that predict nothing (no response token) are left out unless `last_token`.
        budget: most tokens in one forward pass, padding included; exceeded only by a single sequence that is longer by itself.
        layout: "shared" packs rows behind a common prompt; "padded" gives every row its own line; "packed" lays all rows of a
            micro-batch in one line, for attention that takes variable lengths.
        hidden_size: weighs attention against the linear layers: a row joins a pack while the masked attention this wastes costs
            less than the prompt copy it saves (8·R·O·H against 24·P·H² multiplications, O the tokens already there).
        last_token: the hidden state after the last response token is needed too (values), not only those before each token.

    Returns:
        Micro-batches, longest packs first. The plan depends on lengths and prompts alone, so equal batches are split equally.
    """
    if layout not in LAYOUTS:
        raise unknown_option("layout", layout, LAYOUTS)
    if budget < 1:
        raise ConfigError(f"micro_batch_tokens must be at least 1; got {budget}")
    prompts = [len(ids) for ids in rollout.prompt_ids]
    responses = rollout.lengths.tolist()
    if not last_token:  # the last token is only a target: its own hidden state predicts nothing that was sampled
        responses = [length - 1 for length in responses]
    rows = [i for i, length in enumerate(responses) if length >= 0]

    packs: list[Pack] = []
    if layout == "shared":
        families: dict[bytes, list[int]] = {}
        for i in rows:
            families.setdefault(rollout.prompt_ids[i].numpy().tobytes(), []).append(i)
        for family in families.values():
            packs += _share_prompt(prompts[family[0]], [(responses[i], i) for i in family], budget, hidden_size)
    else:
        packs = [Pack((i,), prompts[i] + responses[i]) for i in rows]
    packs.sort(key=lambda pack: -pack.length)

    batches: list[list[Pack]] = []
    tokens = 0
    for pack in packs:
        # sorted, so the first pack of a batch is its longest and sets the width that all pay for
        cost = pack.length if layout == "packed" else batches[-1][0].length if batches else 0
        if not batches or tokens + cost > budget:
            batches.append([])
            tokens, cost = 0, pack.length
        batches[-1].append(pack)
        tokens += cost
    return batches


def _share_prompt(prompt: int, responses: list[tuple[int, int]], budget: int, hidden_size: int) -> list[Pack]:
    """Packs for the rows of one prompt; `responses` holds (tokens, row)."""
    packs: list[Pack] = []
    members: list[int] = []
    used = 0
    for length, row in sorted(responses, key=lambda item: -item[0]):
        worth_it = length * used <= 3 * hidden_size * prompt
        if members and (prompt + used + length > budget or not worth_it):
            packs.append(Pack(tuple(members), prompt + used))
            members, used = [], 0
        members.append(row)
        used += length
    return [*packs, Pack(tuple(members), prompt + used)]


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch as the scoring module takes it; every field is a tensor or None.

    Attributes:
        input_ids: int64 [N, L].
        position_ids: int64 [N, L], restarting at the prompt's end for every response of a pack.
        mask: bool [N, L, L], True where the query (second axis) sees the key; None where plain causal attention does.
        predicting: int64 [M], index into the flattened [N·L] of the hidden state that predicts each counted token.
        targets: int64 [M], the token there.
        temperature: float32 [M], each token's sampling temperature; 1 where the row was sampled greedily.
        rows, columns: int64 [M], where the token stands in the rollout's [B, T].
        last: int64 [R], index into [N·L] of the hidden state after the last token; empty unless asked for.
        last_rows: int64 [R], the row each of them belongs to.
        readers: int64 [N, L], how many rows read the token there: all of a pack its prompt, none the padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor | None
    predicting: Tensor
    targets: Tensor
    temperature: Tensor
    rows: Tensor
    columns: Tensor
    last: Tensor
    last_rows: Tensor
    readers: Tensor

    def to(self, device: torch.device | str) -> PackedBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: value if value is None else value.to(device) for name, value in values.items()}
        return PackedBatch(**moved)


def collate(rollout: Rollout, packs: Sequence[Pack], *, layout: str = "shared", last_token: bool = False) -> PackedBatch:
    """Lay the tokens of `packs` out for one forward pass.

    Only tokens with `response_mask` True become targets: tool output is read, not scored.

    Args:
        rollout: the rows that `packs` points into.
        packs: one micro-batch of `plan_micro_batches`, made with the same `layout` and `last_token`.
        layout: "packed" puts all packs in one line with restarting positions; the others give each its own line.
        last_token: the hidden state after each response's last token is needed too.
    """
    in_one_line = layout == "packed"
    pack_lengths = torch.tensor([pack.length for pack in packs])
    width = int(pack_lengths.sum() if in_one_line else pack_lengths.max())
    # where each pack begins in the flattened [N·L]
    begins = pack_lengths.cumsum(0) - pack_lengths if in_one_line else torch.arange(len(packs)) * width
    counts = torch.tensor([len(pack.rows) for pack in packs])
    rows = torch.tensor([row for pack in packs for row in pack.rows])
    prompts = [rollout.prompt_ids[pack.rows[0]] for pack in packs]
    prompt_lengths = torch.tensor([len(ids) for ids in prompts])

    lengths = rollout.lengths[rows]
    fed = lengths if last_token else lengths - 1
    # a row's response begins behind the prompt and the responses before it in the same pack
    before = fed.cumsum(0) - fed
    first = counts.cumsum(0) - counts
    size = prompt_lengths.repeat_interleave(counts)
    start = begins.repeat_interleave(counts) + size + before - before[first].repeat_interleave(counts)
    at_prompt_end = begins.repeat_interleave(counts) + size - 1

    tokens = width * (1 if in_one_line else len(packs))
    input_ids = torch.zeros(tokens, dtype=torch.int64)
    position_ids = torch.zeros(tokens, dtype=torch.int64)
    # 0 for the prompt, 1.. for the responses behind it, -1 for padding, which nobody sees
    segment = torch.full((tokens,), -1, dtype=torch.int64)
    readers = torch.zeros(tokens, dtype=torch.int64)
    of_prompt, index = _ragged(prompt_lengths)
    place = begins[of_prompt] + index
    input_ids[place], position_ids[place], segment[place], readers[place] = torch.cat(prompts), index, 0, counts[of_prompt]
    of_row, index = _ragged(fed)
    place = start[of_row] + index
    input_ids[place], position_ids[place] = rollout.response_ids[rows[of_row], index], size[of_row] + index
    segment[place] = (torch.arange(len(rows)) - first.repeat_interleave(counts) + 1)[of_row]
    readers[place] = 1

    counted = rollout.response_mask[rows] & (torch.arange(rollout.response_ids.shape[1]) < lengths[:, None])
    of_row, column = counted.nonzero(as_tuple=True)
    row = rows[of_row]
    temperature = rollout.temperature[row]
    shape = (1 if in_one_line else len(packs), width)
    return PackedBatch(
        input_ids=input_ids.view(shape),
        position_ids=position_ids.view(shape),
        mask=_shared_prompt_mask(segment.view(shape)) if int(counts.max()) > 1 else None,
        # token 0 is predicted at the prompt's end, which the responses of a pack share; token j at token j - 1
        predicting=torch.where(column == 0, at_prompt_end[of_row], start[of_row] + column - 1),
        targets=rollout.response_ids[row, column],
        temperature=torch.where(temperature > 0, temperature, torch.ones(())),
        rows=row,
        columns=column,
        last=torch.where(lengths > 0, start + lengths - 1, at_prompt_end) if last_token else torch.empty(0, dtype=torch.int64),
        last_rows=rows if last_token else torch.empty(0, dtype=torch.int64),
        readers=readers.view(shape),
    )


def _ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For each token of rows with these lengths: the row it belongs to, and its index there."""
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    return row, torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]


def _shared_prompt_mask(segment: Tensor) -> Tensor:
    """bool [N, L, L]: each token sees the prompt and the earlier tokens of its own response; padding is seen by itself only."""
    width = segment.shape[1]
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return ((key == 0) | (key == query)) & causal & (key >= 0) | torch.eye(width, dtype=torch.bool)
