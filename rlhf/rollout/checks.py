"""Whether the fields of a rollout fit together; every error names the field, what it should be and what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.errors import RolloutError

if TYPE_CHECKING:
    from rlhf.rollout.batch import Rollout

_PER_ROW = {
    "lengths": torch.int64,
    "temperature": torch.float32,
    "filtered": torch.bool,
    "group": torch.int64,
    "episode": torch.int64,
    "weight_version": torch.int64,
}


def validate(rollout: Rollout) -> None:
    count = len(rollout.prompt_ids)
    distinct: dict[int, tuple[int, Any]] = {}  # the rows of a group share one tensor
    for i, ids in enumerate(rollout.prompt_ids):
        distinct.setdefault(id(ids), (i, ids))
    for i, ids in distinct.values():
        _check_tensor(f"prompt_ids[{i}]", ids, torch.int64, (None,))
        if not len(ids):
            raise RolloutError(
                f"prompt_ids[{i}] must have at least one token, got none; a policy needs something to continue (a BOS token will do)"
            )
        if ids.min() < 0:
            raise RolloutError(
                f"prompt_ids[{i}] must hold token ids of 0 and above, got {int(ids.min())}; remove padding and label values such as -100"
            )
    _check_tensor("response_ids", rollout.response_ids, torch.int64, (count, None))
    width = rollout.response_ids.shape[1]
    for name, dtype in _PER_ROW.items():
        _check_tensor(name, getattr(rollout, name), dtype, (count,))
    _check_tensor("response_mask", rollout.response_mask, torch.bool, (count, width))
    for name in ("finish_reasons", "rows", "texts", "raw_texts"):
        value = getattr(rollout, name)
        if not isinstance(value, list) or len(value) != count:
            got = f"{len(value)} entries" if isinstance(value, list) else type(value).__name__
            raise RolloutError(f"{name} must be a list of {count} entries, one for each prompt in prompt_ids, got {got}")
    for name in ("texts", "raw_texts"):
        _check_kind(name, getattr(rollout, name), str)
    _check_kind("rows", rollout.rows, dict)
    if count:
        _check_values(rollout, width)
    for name, value in rollout.extras.items():
        if not isinstance(name, str) or not name:
            raise RolloutError(f"extras must have non-empty str keys, got {name!r}")
        if not isinstance(value, (Tensor, list)):
            raise RolloutError(f"extras[{name!r}] must be a tensor or a list with {count} entries, got {type(value).__name__}")
        if isinstance(value, Tensor):
            _check_tensor(f"extras[{name!r}]", value, value.dtype, (count, *([None] * max(value.dim() - 1, 0))))
        elif len(value) != count:
            raise RolloutError(f"extras[{name!r}] must have {count} entries, one for each row, got {len(value)}")


def _check_values(rollout: Rollout, width: int) -> None:
    if rollout.lengths.min() < 0 or rollout.lengths.max() > width:
        raise RolloutError(f"lengths must be from 0 to the width {width} of response_ids, got {_brief(rollout.lengths)}")
    inside = rollout.padding_mask
    outside = rollout.response_mask & ~inside
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        raise RolloutError(
            f"response_mask must be False from each row's length on, got True at row {row}, token {column} of {int(rollout.lengths[row])}; "
            "the mask may only hold tokens of the response"
        )
    negative = (rollout.response_ids < 0) & inside
    if negative.any():
        row, column = negative.nonzero()[0].tolist()
        got = int(rollout.response_ids[row, column])
        raise RolloutError(f"response_ids must be 0 and above inside the response, got {got} at row {row}, token {column}")
    if rollout.logprobs is not None:
        _check_tensor("logprobs", rollout.logprobs, torch.float32, (len(rollout), width))
        bad = ~rollout.logprobs.isfinite() & rollout.response_mask
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            value = rollout.logprobs[row, column].item()
            raise RolloutError(
                f"logprobs must be finite where response_mask is True, got {value} at row {row}, token {column}; "
                "the engine must give the log-probability of every token it sampled"
            )
    if not rollout.temperature.isfinite().all() or rollout.temperature.min() < 0:
        raise RolloutError(f"temperature must be finite and 0 or above, got {_brief(rollout.temperature)}")
    groups: dict[int, int] = {}
    for episode, group in zip(rollout.episode.tolist(), rollout.group.tolist(), strict=True):
        if groups.setdefault(episode, group) != group:
            raise RolloutError(
                f"rows of one episode must share a group, got episode {episode} in groups {groups[episode]} and {group}; "
                "give each episode its own id"
            )


def _check_tensor(name: str, value: object, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raise unless value is a CPU tensor of this dtype and shape; None in shape stands for any size."""
    wanted = f"{str(dtype).removeprefix('torch.')} [{', '.join('any' if size is None else str(size) for size in shape)}] on the CPU"
    if not isinstance(value, Tensor):
        raise RolloutError(f"{name} must be a tensor, {wanted}, got {type(value).__name__}; Rollout.build makes one from lists")
    fits = len(shape) == value.dim() and all(want is None or want == got for want, got in zip(shape, value.shape, strict=True))
    if value.dtype != dtype or not fits or value.device.type != "cpu":
        got = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
        raise RolloutError(f"{name} must be {wanted}, got {got}; see Rollout's attributes for shapes, and move it with .cpu() if need be")


def _check_kind(name: str, values: list[Any], kind: type) -> None:
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise RolloutError(f"{name}[{i}] must be a {kind.__name__}, got {type(value).__name__}")


def _brief(values: Tensor) -> str:
    shown = values[:8].tolist()
    return f"{shown}" if len(values) <= 8 else f"{shown} and {len(values) - 8} more"
