"""What became of every response: its score, its status, and what failed.

Legend: B rows of the rollout, T width of its response tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.errors import RewardError, ShapeError
from rlhf.rollout.batch import Rollout
from rlhf.rollout.ragged import renumbered, row_index, widened


class Status(StrEnum):
    """What became of one response.

    OK: it has a score. ABSTAIN: the reward had no opinion. TIMEOUT: the reward did not answer in time. ERROR: the reward failed.
    """

    OK = "ok"
    ABSTAIN = "abstain"
    TIMEOUT = "timeout"
    ERROR = "error"


class Fault(NamedTuple):
    """A failure of the reward (never of the response): its kind, TIMEOUT or ERROR, and the reason with the traceback."""

    kind: Status
    reason: str


@dataclass(eq=False, repr=False)
class Rewards:
    """One score and one status for each row of a rollout.

    Attributes:
        scores: float32 [B], NaN exactly where status is not OK.
        status: B statuses.
        parts: each component's own unweighted scores, float32 [B], NaN where it has none; names are unique.
        token_scores: float32 [B, T] of process rewards, 0 where status is not OK; scores are their sums. None without process rewards.
        faults: what failed, None where nothing did. With `on_error` "abstain" or a score, a row has a fault and yet no status ERROR.
        logged: values of `sample.log` by name, B entries each, None where a sample logged none.
        episode: int64 [B], rows of one episode share its score and count once in `metrics`; None: every row is an episode.

    Raises:
        ShapeError: a tensor is not float32, or not [B] or [B, T].
        RewardError: another count of statuses than of scores, a score that is NaN though OK (or the other way round), or infinite.
    """

    scores: Tensor
    status: list[Status]
    parts: dict[str, Tensor] = field(default_factory=dict)
    token_scores: Tensor | None = None
    faults: list[Fault | None] = field(default_factory=list)
    logged: dict[str, list[Any]] = field(default_factory=dict)
    episode: Tensor | None = None

    def __post_init__(self) -> None:
        self.status = [Status(status) for status in self.status]
        count = len(self.status)
        self.faults = self.faults or [None] * count
        for name, scores in {"scores": self.scores, **{f"parts[{name!r}]": part for name, part in self.parts.items()}}.items():
            if scores.dtype != torch.float32 or scores.shape != (count,):
                raise ShapeError(f"{name} must be float32 of shape [{count}], one for each status; got {scores.dtype} {list(scores.shape)}")
            if torch.isinf(scores).any():
                raise RewardError(f"{name} must be finite, or NaN where there is no score; got an infinite score, scale the reward down")
        missing = torch.tensor([status is not Status.OK for status in self.status], dtype=torch.bool)
        wrong = (torch.isnan(self.scores) != missing).nonzero()[:, 0]
        if len(wrong):
            row = int(wrong[0])
            raise RewardError(
                f"scores must be NaN exactly where status is not OK; row {row} is {self.scores[row]:g}, {self.status[row].name}"
            )
        if self.token_scores is not None:
            tokens = self.token_scores
            if tokens.dtype != torch.float32 or tokens.dim() != 2 or len(tokens) != count:
                raise ShapeError(f"token_scores must be float32 of shape [{count}, T]; got {tokens.dtype} {list(tokens.shape)}")
            if not torch.isfinite(tokens).all():
                raise RewardError("token_scores must be finite; put 0 where a row has no score")
        counts = {"faults": len(self.faults), **{f"logged[{name!r}]": len(values) for name, values in self.logged.items()}}
        counts |= {} if self.episode is None else {"episode": len(self.episode)}
        for name, entries in counts.items():
            if entries != count:
                raise RewardError(f"{name} must have one entry for each of the {count} rows, got {entries}")

    @property
    def errors(self) -> list[str | None]:
        """The reason of each fault, with its traceback where the reward raised; None where nothing failed."""
        return [None if fault is None else fault.reason for fault in self.faults]

    def __len__(self) -> int:
        return len(self.status)

    def select(self, indices: Tensor | Sequence[int] | Sequence[bool] | slice) -> Rewards:
        """The rows at these indices (or where this bool mask is True), in that order, as `Rollout.select` picks them."""
        index = row_index(indices, len(self))
        picked = index.tolist()
        return Rewards(
            scores=self.scores[index],
            status=[self.status[i] for i in picked],
            parts={name: part[index] for name, part in self.parts.items()},
            token_scores=None if self.token_scores is None else self.token_scores[index],
            faults=[self.faults[i] for i in picked],
            logged={name: [values[i] for i in picked] for name, values in self.logged.items()},
            episode=None if self.episode is None else self.episode[index],
        )

    @staticmethod
    def concat(batches: Iterable[Rewards]) -> Rewards:
        """The rows of all batches, one after the other; a part or a logged name that a batch lacks is NaN or None there.

        Raises:
            RewardError: no batches, or token scores in one batch and only whole scores in another.
        """
        batches = list(batches)
        if not batches:
            raise RewardError("concat needs at least one Rewards, got none")
        token_scores = None
        if any(batch.token_scores is not None for batch in batches):
            if any(batch.token_scores is None and Status.OK in batch.status for batch in batches):
                raise RewardError("concat got token_scores in some batches only; judge all of them with the same reward")
            width = max(batch.token_scores.shape[1] for batch in batches if batch.token_scores is not None)
            token_scores = torch.cat(
                [torch.zeros(len(batch), width) if batch.token_scores is None else widened(batch.token_scores, width) for batch in batches]
            )
        nothing = [torch.full((len(batch),), math.nan) for batch in batches]
        return Rewards(
            scores=torch.cat([batch.scores for batch in batches]),
            status=[status for batch in batches for status in batch.status],
            parts={
                name: torch.cat([batch.parts.get(name, none) for batch, none in zip(batches, nothing, strict=True)])
                for name in dict.fromkeys(name for batch in batches for name in batch.parts)
            },
            token_scores=token_scores,
            faults=[fault for batch in batches for fault in batch.faults],
            logged={
                name: [value for batch in batches for value in batch.logged.get(name, [None] * len(batch))]
                for name in dict.fromkeys(name for batch in batches for name in batch.logged)
            },
            episode=renumbered([torch.arange(len(batch)) if batch.episode is None else batch.episode for batch in batches]),
        )

    def metrics(self) -> dict[str, float]:
        """What the rewards look like, under the names of the metric glossary. Every episode counts once.

        `reward/mean`, `std` (population), `min`, `max` over episodes with a score, NaN if there are none. `reward/error_rate` and
        `reward/timeout_rate` count faults whatever `on_error` made of them. `reward/part/<name>` and `reward/log/<name>` (numbers
        only) are means over the episodes that have one.
        """
        rows = list(range(len(self))) if self.episode is None else list({int(e): row for row, e in enumerate(self.episode)}.values())
        once = self.select(rows)
        count = max(len(rows), 1)
        scores = once.scores.double()
        scores = scores[~torch.isnan(scores)]
        result = {
            "reward/mean": scores.mean().item(),
            "reward/std": scores.std(correction=0).item() if len(scores) else math.nan,
            "reward/min": scores.min().item() if len(scores) else math.nan,
            "reward/max": scores.max().item() if len(scores) else math.nan,
        }
        for kind in (Status.ERROR, Status.TIMEOUT):
            result[f"reward/{kind}_rate"] = (
                sum(
                    status is kind or (fault is not None and fault.kind is kind)
                    for status, fault in zip(once.status, once.faults, strict=True)
                )
                / count
            )
        result["reward/abstain_rate"] = once.status.count(Status.ABSTAIN) / count
        for name, part in once.parts.items():
            result[f"reward/part/{name}"] = part.double().nanmean().item()
        for name, values in once.logged.items():
            finite = [number for value in values if (number := scalar(value)) is not None and math.isfinite(number)]
            if finite:
                result[f"reward/log/{name}"] = sum(finite) / len(finite)
        return result

    def __repr__(self) -> str:
        known = self.scores[~torch.isnan(self.scores)].double()
        shown = f"mean {known.mean():.3g}, std {known.std(correction=0):.3g}" if len(known) else "no scores"
        counts = ", ".join(f"{number} {status.name}" for status in Status if (number := self.status.count(status)))
        parts = f"; parts {', '.join(self.parts)}" if len(self.parts) > 1 else ""
        return f"Rewards({len(self)} rows: {shown}; {counts or 'empty'}{parts})"


def scalar(value: Any) -> float | None:
    """The value of a Python, numpy or torch scalar; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def last_rows(episode: Tensor) -> list[int]:
    """The last row of each episode, in the order of the rows."""
    return sorted({number: row for row, number in enumerate(episode.tolist())}.values())


def on_last_token(scores: Tensor, rollout: Rollout) -> Tensor:
    """float32 [B, T], each score on its row's last sampled token (its last token if none was sampled); NaN becomes 0."""
    masks = rollout.response_mask
    counted = torch.where(masks.any(dim=1, keepdim=True), masks, rollout.padding_mask)
    place = (counted * torch.arange(1, masks.shape[1] + 1)).amax(dim=1) - 1 if masks.numel() else torch.full((len(rollout),), -1)
    result = torch.zeros(masks.shape, dtype=torch.float32)
    rows = (place >= 0).nonzero()[:, 0]
    result[rows, place[rows]] = scores.nan_to_num(nan=0.0)[rows]
    return result
