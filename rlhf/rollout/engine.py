"""What every engine is: prompts in, a rollout out; and what prompts may look like."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from rlhf.data.prompts import encode_prompt
from rlhf.errors import DataError, RolloutError
from rlhf.rollout.batch import Rollout
from rlhf.rollout.sampling import SamplingParams


@runtime_checkable
class EncodedPrompt(Protocol):
    """A prompt that knows its token ids and its dataset row, as `rlhf.data.Prompt` does."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def row(self) -> dict[str, Any]: ...


PromptLike = str | Sequence[Mapping[str, Any]] | Sequence[int] | Tensor | EncodedPrompt
Prompts = PromptLike | Iterable[PromptLike]


class RolloutEngine(ABC):
    """Samples responses. A subclass writes `generate` and `update_weights`; the rest has defaults for an engine without memory to free.

    Attributes:
        tokenizer: encodes prompts and decodes responses.
        weight_version: which weights the engine holds; every row it returns carries it.
    """

    tokenizer: Any
    weight_version: int = 0

    @abstractmethod
    def generate(self, prompts: Prompts, sampling: SamplingParams, *, weights: Any = None) -> Rollout:
        """Sample `sampling.n` responses for each prompt; legal inside a running event loop too.

        Args:
            prompts: one prompt or several: text, chat messages, token ids, or objects with `ids` and `row`; see `encode_prompts`.
            weights: where to take weights from if the engine's are another version (an Actor).

        Returns:
            Rollout: rows prompt by prompt; the n responses of a prompt share a group.

        Raises:
            RolloutError: a prompt is empty or unreadable.
            EngineError: the engine is closed or failed.
        """

    async def agenerate(self, prompts: Prompts, sampling: SamplingParams, *, weights: Any = None) -> Rollout:
        """`generate` without blocking the event loop; here in a thread, so that `generate` must bear concurrent calls."""
        return await asyncio.to_thread(self.generate, prompts, sampling, weights=weights)

    @abstractmethod
    def update_weights(self, source: Any) -> None:
        """Take over the weights of `source` (an Actor) and its `weight_version`."""

    def sync(self, source: Any) -> bool:
        """Update the weights if `source` holds another version; True if it did. A source without a version counts as new every time."""
        stale = getattr(source, "weight_version", None) != self.weight_version
        if stale:
            self.update_weights(source)
        return stale

    def sleep(self) -> None:  # noqa: B027 - a default, not a forgotten abstract method
        """Free the engine's memory until `wake`; nothing to do by default."""

    def wake(self) -> None:  # noqa: B027 - a default, not a forgotten abstract method
        """Be ready to generate again; `generate` calls it by itself."""

    def close(self) -> None:  # noqa: B027 - a default, not a forgotten abstract method
        """Let go of processes and memory for good; calling it twice is legal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def encode_prompts(prompts: Prompts, tokenizer: Any) -> list[tuple[Tensor, dict[str, Any]]]:
    """One prompt or several, in any form, as (ids int64 [P], dataset row) pairs.

    Text and chat messages go through `rlhf.data.prompts.encode_prompt` and get the row `{"prompt": …}`; token ids get an empty row; objects
    with `ids` and `row` (the data room's `Prompt`) keep theirs. A flat list of integers is one prompt, and so is a list of messages.

    Raises:
        RolloutError: no prompts, or a prompt is empty or of no known form; the message says which.
    """
    entries = [prompts] if _is_one_prompt(prompts) else _listed(prompts)
    if not entries:
        raise RolloutError("prompts must hold at least one prompt, got none")
    return [_encoded(entry, tokenizer, index) for index, entry in enumerate(entries)]


def _is_one_prompt(prompts: object) -> bool:
    if isinstance(prompts, (str, EncodedPrompt)):
        return True
    if isinstance(prompts, Tensor):
        return prompts.dim() == 1
    return isinstance(prompts, (list, tuple)) and bool(prompts) and (_are_messages(prompts) or _are_ids(prompts))


def _listed(prompts: Any) -> list[Any]:
    if isinstance(prompts, Tensor):
        raise RolloutError(
            f"prompts must be token ids of shape [P] or a list of such, got a tensor of shape {list(prompts.shape)}; unpad it into a list"
        )
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, (Iterable, Sequence)):
        advice = "; put the message in a list" if isinstance(prompts, Mapping) else ""
        raise RolloutError(
            f"prompts must be text, chat messages, token ids, Prompts or a list of these, got {type(prompts).__name__}{advice}"
        )
    return list(prompts)


def _are_messages(entries: Sequence[Any]) -> bool:
    return all(isinstance(entry, Mapping) and "role" in entry for entry in entries)


def _are_ids(entries: Sequence[Any]) -> bool:
    return all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries)


def _encoded(entry: Any, tokenizer: Any, index: int) -> tuple[Tensor, dict[str, Any]]:
    row: dict[str, Any] = {}
    if isinstance(entry, EncodedPrompt):
        if getattr(entry, "inputs", None):
            raise RolloutError(f"prompt {index} must have token ids only, got further inputs; use an engine that reads them")
        ids, row = torch.as_tensor(entry.ids), entry.row
    elif isinstance(entry, str) or (isinstance(entry, (list, tuple)) and entry and _are_messages(entry)):
        if tokenizer is None:
            raise RolloutError(f"prompt {index} is text, and this engine has no tokenizer; give token ids or an engine with a tokenizer")
        try:
            ids = torch.tensor(encode_prompt(entry, tokenizer), dtype=torch.int64)
        except DataError as error:
            raise RolloutError(f"prompt {index}: {error}") from error
        row = {"prompt": entry if isinstance(entry, str) else list(entry)}
    elif isinstance(entry, Tensor) or (isinstance(entry, (list, tuple)) and _are_ids(entry)):
        ids = torch.as_tensor(entry, dtype=None if len(entry) else torch.int64)
    else:
        raise RolloutError(f"prompt {index} must be text, chat messages, token ids or a Prompt, got {_described(entry)}")
    if ids.dim() != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise RolloutError(
            f"prompt {index} must be integer token ids of shape [P], got {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
        )
    if not len(ids):
        raise RolloutError(f"prompt {index} must have at least one token, got none; a beginning-of-sequence token will do")
    return ids.detach().to("cpu", torch.int64), row


def _described(entry: object) -> str:
    if isinstance(entry, Mapping):
        return f"a dict with the keys {', '.join(map(str, entry))}; make rows into a PromptDataset"
    if isinstance(entry, (list, tuple)):
        return f"a {type(entry).__name__} of {', '.join(sorted({type(value).__name__ for value in entry})) or 'nothing'}"
    return type(entry).__name__
