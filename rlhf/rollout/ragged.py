"""Between ragged lists and the right-padded tensors of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.errors import RolloutError


def id_tensor(values: Any, where: str) -> Tensor:
    """Token ids as int64 [N]; refuses anything that is not a flat list of integers."""
    if isinstance(values, (str, bytes)):
        raise RolloutError(f"{where} must be token ids, got text; use Rollout.from_texts for text")
    try:
        ids = values.detach() if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RolloutError(f"{where} must be a list of token ids, got {type(values).__name__} that torch cannot read ({error})") from None
    if ids.dim() == 1 and not ids.numel():
        return torch.zeros(0, dtype=torch.int64)
    if ids.dim() != 1 or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise RolloutError(
            f"{where} must be a flat list of integer token ids, got {str(ids.dtype).removeprefix('torch.')} of shape {list(ids.shape)}"
        )
    return ids.to("cpu", torch.int64)


def row_tensors(name: str, values: Sequence[Any], lengths: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """One tensor per row with exactly as many entries as the row has ids."""
    if len(values) != len(lengths):
        raise RolloutError(f"{name} must have one list for each of the {len(lengths)} responses, got {len(values)}")
    result = []
    for i, (row, length) in enumerate(zip(values, lengths.tolist(), strict=True)):
        try:
            entries = torch.as_tensor(row, dtype=dtype, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise RolloutError(f"{name}[{i}] must be a flat list of {length} numbers, got one that torch cannot read ({error})") from None
        if entries.shape != (length,):
            raise RolloutError(
                f"{name}[{i}] must have {length} entries, one for each id of the response, got {list(entries.shape)}; "
                "pair them as the engine returned them (is the end token counted once on both sides?)"
            )
        result.append(entries.detach())
    return result


def padded(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Ragged rows as one tensor [B, T], 0 (False) to the right."""
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(dtype)


def one_per_row(name: str, value: Any, count: int, dtype: torch.dtype) -> Tensor:
    try:
        entries = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise RolloutError(f"{name} must be one number or {count}, got what torch cannot read ({error})") from None
    if dtype == torch.int64 and entries.numel() and (entries.dtype.is_floating_point or entries.dtype == torch.bool):
        raise RolloutError(f"{name} must be integers, got {str(entries.dtype).removeprefix('torch.')}")
    entries = entries.detach().to(dtype)
    if entries.dim() == 0:
        return entries.repeat(count)
    if entries.shape != (count,):
        raise RolloutError(f"{name} must have one entry for each of the {count} responses, got shape {list(entries.shape)}")
    return entries.clone()


def row_index(indices: Any, count: int) -> Tensor:
    if isinstance(indices, slice):
        return torch.arange(count)[indices] if (indices.step or 1) > 0 else torch.tensor(range(count)[indices], dtype=torch.int64)
    try:
        index = torch.as_tensor(list(indices) if isinstance(indices, (range, tuple)) else indices, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise RolloutError(f"indices must be a flat list of rows or a bool mask, got what torch cannot read ({error})") from None
    if index.dim() != 1:
        raise RolloutError(f"indices must be a flat list of rows or a bool mask, got shape {list(index.shape)}; write [i] for one row")
    if index.dtype == torch.bool:
        if len(index) != count:
            raise RolloutError(f"a bool mask must have one entry for each of the {count} rows, got {len(index)}")
        return index.nonzero()[:, 0]
    if not index.numel():
        return torch.zeros(0, dtype=torch.int64)
    if index.dtype.is_floating_point:
        raise RolloutError(
            f"indices must be integers or a bool mask, got {str(index.dtype).removeprefix('torch.')}; "
            "compare with a threshold to get a mask"
        )
    index = index.to(torch.int64)
    wrong = (index >= count) | (index < -count)
    if wrong.any():
        raise RolloutError(f"indices must be below the {count} rows of the rollout, got {int(index[wrong][0])}")
    return index % count


def widened(values: Tensor, width: int) -> Tensor:
    """[B, t, ...] padded to [B, width, ...] with 0 (False)."""
    padding = values.new_zeros(values.shape[0], width - values.shape[1], *values.shape[2:])
    return torch.cat([values, padding], dim=1)


def renumbered(parts: list[Tensor]) -> Tensor:
    offset, result = 0, []
    for ids in parts:
        known, inverse = ids.unique(return_inverse=True)
        result.append(inverse + offset)
        offset += len(known)
    return torch.cat(result)
