"""The rollout: responses exactly as they were sampled, and all that training needs to know about how.

Legend: B rows (responses), T width of the response tensors, P prompt tokens of one row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.errors import RolloutError
from rlhf.rollout.checks import validate
from rlhf.rollout.ragged import id_tensor, one_per_row, padded, renumbered, row_index, row_tensors, widened

if TYPE_CHECKING:
    import datasets
    import pandas

    from rlhf.rollout.turns import Turn


class FinishReason(StrEnum):
    """Why a response ended, as the engine reported it.

    STOP: an end token or a stop string. LENGTH: the token budget ran out. ABORT: the request was cancelled. MAX_TURNS: the episode
    reached its limit of turns. ERROR: the environment or the engine failed; the row is kept so that it can be counted.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    MAX_TURNS = "max_turns"
    ERROR = "error"

    @classmethod
    def _missing_(cls, value: object) -> None:
        known = ", ".join(repr(reason.value) for reason in cls)
        raise RolloutError(f"a finish reason must be among {known}, got {value!r}; translate the engine's own words first")


_TRUNCATED = frozenset({FinishReason.LENGTH, FinishReason.MAX_TURNS})


@dataclass(eq=False, repr=False)
class Rollout:
    """A batch of responses. Built by `Rollout.build` from ragged lists; every tensor lives on the CPU.

    Attributes:
        prompt_ids: B × int64 [P_i], at least one token each.
        response_ids: int64 [B, T], right-padded; anything may stand in the padding.
        lengths: int64 [B], tokens in each response, end-of-sequence and tool output included; at most T.
        response_mask: bool [B, T], True where the policy sampled the token (not padding, not tool output).
        logprobs: float32 [B, T], log_softmax(logits / temperature) over the whole vocabulary as the engine computed it, finite
            where the mask is True; None where nobody computed them (offline data).
        temperature: float32 [B], 0 for greedy.
        filtered: bool [B], top-p, top-k or min-p was in force, so that log-probabilities are not those of the sampling distribution.
        group: int64 [B], rows of one prompt share an id.
        episode: int64 [B], rows of one episode (a context that forked) share an id and a group.
        weight_version: int64 [B], the weights that sampled the row, the oldest if several did; -1 if unknown.
        finish_reasons: why each row ended.
        rows: the dataset row of each response.
        texts: each response decoded without special tokens, for rewards and people; training reads the ids only.
        raw_texts: the same with special tokens; a copy of texts if left out.
        extras: anything else with B entries, tensors or lists. A tensor whose second dimension is T is per token.

    Raises:
        RolloutError: a field has the wrong type, dtype, shape or device, or fields contradict each other.
    """

    prompt_ids: list[Tensor]
    response_ids: Tensor
    lengths: Tensor
    response_mask: Tensor
    logprobs: Tensor | None
    temperature: Tensor
    filtered: Tensor
    group: Tensor
    episode: Tensor
    weight_version: Tensor
    finish_reasons: list[FinishReason]
    rows: list[dict[str, Any]]
    texts: list[str]
    raw_texts: list[str] = field(default_factory=list)
    extras: dict[str, Tensor | list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.raw_texts:
            self.raw_texts = list(self.texts)
        validate(self)
        self.finish_reasons = [FinishReason(reason) for reason in self.finish_reasons]

    @classmethod
    def build(
        cls,
        prompt_ids: Sequence[Sequence[int] | Tensor],
        responses: Sequence[Sequence[int] | Tensor],
        *,
        logprobs: Sequence[Sequence[float] | Tensor] | None = None,
        response_masks: Sequence[Sequence[bool] | Tensor] | None = None,
        temperature: float | Sequence[float] | Tensor = 1.0,
        filtered: bool | Sequence[bool] | Tensor = False,
        group: Sequence[int] | Tensor | None = None,
        episode: Sequence[int] | Tensor | None = None,
        weight_version: int | Sequence[int] | Tensor = 0,
        finish_reasons: str | Sequence[str] | None = None,
        rows: Sequence[dict[str, Any]] | None = None,
        tokenizer: Any = None,
        texts: Sequence[str] | None = None,
        raw_texts: Sequence[str] | None = None,
        extras: Mapping[str, Tensor | list[Any]] | None = None,
    ) -> Rollout:
        """A rollout from ragged lists, one entry per response; a scalar stands for every row.

        Args:
            prompt_ids: B lists of token ids.
            responses: B lists of token ids as sampled, the end token included where one was sampled.
            logprobs: B lists with exactly as many entries as ids. Entries of tokens that the mask leaves out are stored as 0.
            response_masks: B lists, False for tokens that the policy did not sample (tool output); all True if None.
            group: which rows share a prompt; by default every row is a group of its own.
            episode: which rows belong to one episode; by default every row is one.
            finish_reasons: STOP if None.
            tokenizer: decodes `texts` and `raw_texts` where these are not given; without both they are empty strings.

        Raises:
            RolloutError: counts differ, ids are not integers, a log-probability is missing or not finite.

        >>> rollout = Rollout.build([[1, 2]], [[3, 4, 5]], logprobs=[[-0.5, 0.0, -0.25]], response_masks=[[True, False, True]])
        >>> rollout.lengths.tolist(), rollout.response_mask.tolist()
        ([3], [[True, False, True]])
        """
        prompts = [id_tensor(ids, f"prompt_ids[{i}]") for i, ids in enumerate(prompt_ids)]
        answers = [id_tensor(ids, f"responses[{i}]") for i, ids in enumerate(responses)]
        count = len(answers)
        if len(prompts) != count:
            raise RolloutError(
                f"prompt_ids must have one entry for each of the {count} responses, got {len(prompts)}; repeat the prompt for each"
            )
        lengths = torch.tensor([len(ids) for ids in answers], dtype=torch.int64)
        if response_masks is None:
            masks = [torch.ones(len(ids), dtype=torch.bool) for ids in answers]
        else:
            masks = row_tensors("response_masks", response_masks, lengths, torch.bool)
        mask = padded(masks, torch.bool)
        padded_logprobs = None
        if logprobs is not None:
            padded_logprobs = padded(row_tensors("logprobs", logprobs, lengths, torch.float32), torch.float32).masked_fill(~mask, 0.0)
        reasons = FinishReason.STOP if finish_reasons is None else finish_reasons
        if tokenizer is not None:
            ids_lists = [ids.tolist() for ids in answers] if texts is None or raw_texts is None else []
            texts = _decode(tokenizer, ids_lists, skip_special_tokens=True) if texts is None else texts
            raw_texts = _decode(tokenizer, ids_lists, skip_special_tokens=False) if raw_texts is None else raw_texts
        return cls(
            prompt_ids=prompts,
            response_ids=padded(answers, torch.int64),
            lengths=lengths,
            response_mask=mask,
            logprobs=padded_logprobs,
            temperature=one_per_row("temperature", temperature, count, torch.float32),
            filtered=one_per_row("filtered", filtered, count, torch.bool),
            group=torch.arange(count) if group is None else one_per_row("group", group, count, torch.int64),
            episode=torch.arange(count) if episode is None else one_per_row("episode", episode, count, torch.int64),
            weight_version=one_per_row("weight_version", weight_version, count, torch.int64),
            finish_reasons=[FinishReason(reasons)] * count if isinstance(reasons, str) else [FinishReason(reason) for reason in reasons],
            rows=[{} for _ in range(count)] if rows is None else list(rows),
            texts=[""] * count if texts is None else list(texts),
            raw_texts=[] if raw_texts is None else list(raw_texts),
            extras=dict(extras or {}),
        )

    @classmethod
    def from_texts(
        cls,
        prompts: Any,
        responses: Sequence[str],
        tokenizer: Any,
        *,
        group: Sequence[int] | Tensor | None = None,
        rows: Sequence[dict[str, Any]] | None = None,
        append_eos: bool = True,
        temperature: float | Sequence[float] | Tensor = 1.0,
        weight_version: int | Sequence[int] | Tensor = -1,
        extras: Mapping[str, Tensor | list[Any]] | None = None,
    ) -> Rollout:
        """Offline data: stored responses as a rollout, so that they can be judged, scored or trained on.

        Text has to be tokenised here, so these ids need not be those that were sampled; where ids were kept, use `build`.

        Args:
            prompts: one for each response: text, chat messages, token ids or `Prompt`s, encoded as an engine would.
            responses: B texts, tokenised without special tokens.
            append_eos: end each response with the tokenizer's end token, unless it ends with it already.
            rows: dataset rows; those of the prompts if None.
            weight_version: -1 says unknown. Log-probabilities are None, finish reasons STOP.

        Raises:
            RolloutError: counts differ, a prompt is empty, or append_eos is asked of a tokenizer that has no end token.
        """
        from rlhf.rollout.engine import encode_prompts

        if isinstance(responses, str):
            raise RolloutError("responses must be a list of texts, one for each prompt, got one str; put it in a list")
        encoded = encode_prompts(prompts, tokenizer)
        end = getattr(tokenizer, "eos_token_id", None)
        if append_eos and end is None:
            raise RolloutError(
                "append_eos=True needs a tokenizer with an end token, got None; set tokenizer.eos_token or pass append_eos=False"
            )
        for i, text in enumerate(responses):
            if not isinstance(text, str):
                raise RolloutError(f"responses[{i}] must be a str, got {type(text).__name__}; use Rollout.build for token ids")
        answers = [list(ids) for ids in tokenizer(list(responses), add_special_tokens=False)["input_ids"]] if len(responses) else []
        if append_eos:
            answers = [ids if ids[-1:] == [end] else [*ids, end] for ids in answers]
        return cls.build(
            [ids for ids, _ in encoded],
            answers,
            temperature=temperature,
            group=group,
            weight_version=weight_version,
            rows=[row for _, row in encoded] if rows is None else rows,
            tokenizer=tokenizer,
            extras=extras,
        )

    @classmethod
    def from_turns(cls, episodes: Iterable[Sequence[Turn | tuple[Any, ...] | Mapping[str, Any]]], **options: Any) -> Rollout:
        """A rollout from multi-turn episodes, merged token for token; see `rlhf.rollout.turns.from_turns` for the options."""
        from rlhf.rollout.turns import from_turns

        return from_turns(episodes, **options)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def padding_mask(self) -> Tensor:
        """bool [B, T], True for the tokens of the response (tool output included), False for padding."""
        return torch.arange(self.response_ids.shape[1]) < self.lengths[:, None]

    @property
    def truncated(self) -> Tensor:
        """bool [B], finish reason LENGTH or MAX_TURNS; neither the last id nor the width of the batch has a say."""
        return torch.tensor([reason in _TRUNCATED for reason in self.finish_reasons], dtype=torch.bool)

    def select(self, indices: Tensor | Sequence[int] | Sequence[bool] | slice) -> Rollout:
        """The rows at these indices (or where this bool mask is True), in that order; repeats are allowed.

        T, group and episode ids stay as they are, so that a part can be compared with the whole.

        Raises:
            RolloutError: an index is out of range or a mask does not have B entries.
        """
        index = row_index(indices, len(self))
        picked = index.tolist()
        part = object.__new__(Rollout)  # rows of a valid rollout are valid: this is called for every micro-batch
        vars(part).update(
            prompt_ids=[self.prompt_ids[i] for i in picked],
            response_ids=self.response_ids[index],
            lengths=self.lengths[index],
            response_mask=self.response_mask[index],
            logprobs=None if self.logprobs is None else self.logprobs[index],
            temperature=self.temperature[index],
            filtered=self.filtered[index],
            group=self.group[index],
            episode=self.episode[index],
            weight_version=self.weight_version[index],
            finish_reasons=[self.finish_reasons[i] for i in picked],
            rows=[self.rows[i] for i in picked],
            texts=[self.texts[i] for i in picked],
            raw_texts=[self.raw_texts[i] for i in picked],
            extras={name: value[index] if isinstance(value, Tensor) else [value[i] for i in picked] for name, value in self.extras.items()},
        )
        return part

    @staticmethod
    def concat(parts: Iterable[Rollout]) -> Rollout:
        """The rows of all parts, one after the other, padded to the longest T.

        Group and episode ids are renumbered from 0: rows that shared one within a part still do, rows of different parts never do.

        Raises:
            RolloutError: no parts, log-probabilities in some parts only, or extras that differ in name, kind, dtype or shape.
        """
        parts = list(parts)
        if not parts:
            raise RolloutError("concat needs at least one rollout, got none")
        width = max(part.response_ids.shape[1] for part in parts)
        with_logprobs = {part.logprobs is not None for part in parts}
        if len(with_logprobs) > 1:
            raise RolloutError(
                "logprobs must be present in all parts of concat or in none, got both; score the parts without them first "
                "or set logprobs to None in the others"
            )
        joined: dict[str, Any] = {"logprobs": None}
        for name in ("response_ids", "response_mask", *(["logprobs"] if parts[0].logprobs is not None else [])):
            joined[name] = torch.cat([widened(getattr(part, name), width) for part in parts])
        for name in ("lengths", "temperature", "filtered", "weight_version"):
            joined[name] = torch.cat([getattr(part, name) for part in parts])
        for name in ("prompt_ids", "finish_reasons", "rows", "texts", "raw_texts"):
            joined[name] = [value for part in parts for value in getattr(part, name)]
        return Rollout(
            **joined,
            group=renumbered([part.group for part in parts]),
            episode=renumbered([part.episode for part in parts]),
            extras={name: _joined_extra(name, parts, width) for name in _extra_names(parts)},
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rollout to a folder of safetensors and JSON lines; see `rlhf.rollout.storage`."""
        from rlhf.rollout.storage import save_rollout

        save_rollout(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rollout:
        """Read what `save` wrote, bit for bit; runs no code from the folder."""
        from rlhf.rollout.storage import load_rollout

        return load_rollout(path)

    def metrics(self) -> dict[str, float]:
        """What this rollout looks like, under the names of the metric glossary; an empty one has its counts only.

        Lengths are those of whole responses whatever the mask; `rollout/response_tokens` counts the sampled tokens (mask True).
        Rates are fractions of rows. `rollout/mixed_version_fraction` counts rows that hold tokens of older weights than the newest here.
        """
        count = len(self)
        result = {
            "rollout/rows": float(count),
            "rollout/groups": float(self.group.unique().numel()),
            "rollout/episodes": float(self.episode.unique().numel()),
            "rollout/response_tokens": float(self.response_mask.sum()),
        }
        if not count:
            return result
        newest = self.weight_version.max()
        latest = self.extras.get("weight_version_max")
        if isinstance(latest, Tensor):
            newest = torch.maximum(newest, latest.max())
        aborted = sum(reason is FinishReason.ABORT for reason in self.finish_reasons)
        return result | {
            "rollout/prompt_length": sum(len(ids) for ids in self.prompt_ids) / count,
            "rollout/response_length": self.lengths.double().mean().item(),
            "rollout/response_length_min": float(self.lengths.min()),
            "rollout/response_length_max": float(self.lengths.max()),
            "rollout/truncation_rate": self.truncated.double().mean().item(),
            "rollout/abort_rate": aborted / count,
            "rollout/mixed_version_fraction": (self.weight_version != newest).double().mean().item(),
        }

    def to_pandas(self, tokenizer: Any = None) -> pandas.DataFrame:
        """One line per response, for reading; see `rlhf.rollout.views.to_pandas`."""
        from rlhf.rollout.views import to_pandas

        return to_pandas(self, tokenizer)

    def to_dataset(self, tokenizer: Any = None) -> datasets.Dataset:
        """The lines of `to_pandas` with the ids, as a `datasets.Dataset`; see `rlhf.rollout.views.to_dataset`."""
        from rlhf.rollout.views import to_dataset

        return to_dataset(self, tokenizer)

    def __repr__(self) -> str:
        from rlhf.rollout.views import one_line

        return one_line(self)

    def _repr_html_(self) -> str:
        from rlhf.rollout.views import html_table

        return html_table(self)


def _decode(tokenizer: Any, ids_lists: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
    # Cleaning up spaces would show rewards a text that the policy did not write.
    return [tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False) for ids in ids_lists]


def _extra_names(parts: list[Rollout]) -> list[str]:
    names = list(parts[0].extras)
    for i, part in enumerate(parts):
        differing = set(names) ^ set(part.extras)
        if differing:
            raise RolloutError(
                f"extras must have the same keys in all parts of concat, got {sorted(differing)} in only one of parts 0 and {i}; "
                "add the key to the others or delete it with rollout.extras.pop(key)"
            )
    return names


def _joined_extra(name: str, parts: list[Rollout], width: int) -> Tensor | list[Any]:
    values = [part.extras[name] for part in parts]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return [entry for value in values for entry in value]
    if len(tensors) < len(values):
        raise RolloutError(f"extras[{name!r}] must be a tensor in all parts of concat or a list in all, got both")
    if all(value.dim() > 1 and value.shape[1] == part.response_ids.shape[1] for value, part in zip(tensors, parts, strict=True)):
        tensors = [widened(value, width) for value in tensors]
    if len({(value.dtype, value.shape[1:]) for value in tensors}) > 1:
        got = ", ".join(f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" for value in tensors)
        raise RolloutError(f"extras[{name!r}] must agree in dtype and in all dimensions but the first (or have T as the second), got {got}")
    return torch.cat(tensors)
