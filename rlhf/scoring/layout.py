"""Which rows share a forward pass, and how their tokens lie in it.

Rows with one prompt are packed behind a single copy of it: every response attends to the prompt and to itself, its positions
continue the prompt's. Packs of similar length are stacked into micro-batches under a token budget.

Legend: R rows, N packs, L tokens of the longest pack, M counted response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

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

    def to(self, device: torch.device | str) -> PackedBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return PackedBatch(**{name: value if value is None else value.to(device) for name, value in values.items()})


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
    width = sum(pack.length for pack in packs) if in_one_line else max(pack.length for pack in packs)
    lines = 1 if in_one_line else len(packs)
    input_ids = torch.zeros(lines, width, dtype=torch.int64)
    position_ids = torch.zeros(lines, width, dtype=torch.int64)
    # 0 for the prompt, 1.. for the responses behind it, -1 for padding, which sees only itself
    segment = torch.full((lines, width), -1, dtype=torch.int64)
    shares = any(len(pack.rows) > 1 for pack in packs)

    predicting: list[Tensor] = []
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    last: list[int] = []
    last_rows: list[int] = []
    offset = 0
    for n, pack in enumerate(packs):
        line, start = (0, offset) if in_one_line else (n, 0)
        flat = line * width + start
        prompt = rollout.prompt_ids[pack.rows[0]]
        size = len(prompt)
        input_ids[line, start : start + size] = prompt
        position_ids[line, start : start + size] = torch.arange(size)
        segment[line, start : start + size] = 0
        cursor = size
        for k, row in enumerate(pack.rows):
            length = int(rollout.lengths[row])
            fed = length if last_token else length - 1
            begin = start + cursor
            input_ids[line, begin : begin + fed] = rollout.response_ids[row, :fed]
            position_ids[line, begin : begin + fed] = torch.arange(size, size + fed)
            segment[line, begin : begin + fed] = k + 1
            column = rollout.response_mask[row, :length].nonzero().squeeze(1)
            # token 0 is predicted at the prompt's end, which the responses of a pack share; token j at token j - 1
            predicting.append(torch.where(column == 0, flat + size - 1, flat + cursor + column - 1))
            rows.append(torch.full_like(column, row))
            columns.append(column)
            if last_token:
                last.append(flat + cursor + length - 1 if length else flat + size - 1)
                last_rows.append(row)
            cursor += fed
        offset += pack.length

    row, column = torch.cat(rows), torch.cat(columns)
    temperature = rollout.temperature[row]
    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        mask=_shared_prompt_mask(segment) if shares else None,
        predicting=torch.cat(predicting),
        targets=rollout.response_ids[row, column],
        temperature=torch.where(temperature > 0, temperature, torch.ones(())),
        rows=row,
        columns=column,
        last=torch.tensor(last, dtype=torch.int64),
        last_rows=torch.tensor(last_rows, dtype=torch.int64),
    )


def _shared_prompt_mask(segment: Tensor) -> Tensor:
    """bool [N, L, L]: each token sees the prompt and the earlier tokens of its own response; padding sees itself."""
    width = segment.shape[1]
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return ((key == 0) | (key == query)) & causal & (key >= 0) | torch.eye(width, dtype=torch.bool)
