"""What a reward is shown of one response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf.rollout.batch import FinishReason, Rollout


@dataclass
class Sample:
    """One response to judge.

    Attributes:
        prompt: the prompt's text as the dataset row has it; of a chat, the text of its messages, one a line; "" if the row has none.
        response: what the policy wrote, decoded without special tokens.
        ground_truth: the row's gold answer, None if it has none.
        row: the dataset row itself, not a copy.
        response_ids: int64 [length], the tokens of the response, tool output and end token included.
        finish_reason: why the response ended.
        messages: the chat that made the prompt, None where the prompt is text.
        raw_response: the response with special tokens; None stands for `response`.
        logged: what `log` was told.

    >>> Sample("6 * 7?", "42", ground_truth="42").raw_response
    '42'
    """

    prompt: str
    response: str
    ground_truth: Any = None
    row: dict[str, Any] = field(default_factory=dict)
    response_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    finish_reason: FinishReason = FinishReason.STOP
    messages: list[dict[str, Any]] | None = None
    raw_response: str | None = None
    logged: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.raw_response is None:
            self.raw_response = self.response

    def log(self, name: str, value: Any) -> None:
        """Keep a value beside the score: a number becomes a metric, anything else a column. The last value under a name stands."""
        self.logged[name] = value


def sample_of(rollout: Rollout, row: int) -> Sample:
    """The sample of one row of a rollout."""
    data = rollout.rows[row]
    prompt = data.get("prompt")
    messages = None
    if prompt is None:
        prompt = ""
    elif not isinstance(prompt, str):
        messages = [dict(message) for message in prompt if isinstance(message, Mapping)]
        prompt = "\n".join(_content(message.get("content")) for message in messages)
    return Sample(
        prompt=prompt,
        response=rollout.texts[row],
        ground_truth=ground_truth_of(data),
        row=data,
        response_ids=rollout.response_ids[row, : int(rollout.lengths[row])],
        finish_reason=rollout.finish_reasons[row],
        messages=messages,
        raw_response=rollout.raw_texts[row],
    )


def _content(content: Any) -> str:
    """The text of a message's content, which may be a list of pieces (text, images)."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(piece.get("text") or "" for piece in content if isinstance(piece, Mapping))


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """`ground_truth` of a dataset row, or verl's `reward_model.ground_truth`; None if it has neither. 0 and "" are answers."""
    if row.get("ground_truth") is not None:
        return row["ground_truth"]
    nested = row.get("reward_model")
    return nested.get("ground_truth") if isinstance(nested, Mapping) else None


def rows_of(items: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """The dataset rows of an iterable of rows or Prompts."""
    for item in items:
        yield item if isinstance(item, Mapping) else item.row
