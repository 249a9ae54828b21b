"""Prompts: rows of a data set with the token ids that the policy continues."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor

from rlhf.data.loader import PromptLoader, PromptSampler
from rlhf.data.sources import Paths, Row, normalise_rows, read_dataset, read_jsonl, read_parquet, strip_none
from rlhf.errors import ConfigError, DataError, ModelError, RLHFWarning, unknown_option

OVERLONG = ("error", "drop", "truncate_left", "truncate_right")
_BAR_FROM_ROWS = 2000  # fewer rows are tokenised before a progress bar could be read


@dataclass(frozen=True, eq=False)
class Prompt:
    """What the policy is asked to continue, and the row it comes from.

    Attributes:
        ids: int64 [P], token ids, generation prompt included.
        row: the row: prompt, ground_truth, data_source, ability, extra_info, uid and whatever else the data holds.
        inputs: further forward inputs by name (images); None for text.
    """

    ids: Tensor
    row: Row
    inputs: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        text = str(self.row.get("prompt", ""))
        return f"Prompt({len(self.ids)} tokens, uid={self.row.get('uid')!r}, {text if len(text) <= 60 else text[:57] + '...'!r})"


@dataclass(frozen=True)
class PromptReport:
    """What became of the rows: read = kept + dropped; truncated rows are kept. Lengths in tokens, of the kept prompts."""

    read: int
    kept: int
    dropped: int
    truncated: int
    shortest: int
    longest: int


def encode_prompt(
    content: str | Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    allow_special_tokens_in_text: bool = False,
) -> list[int]:
    """The token ids of a prompt, up to where the policy goes on.

    Text is taken as it stands: it gets the prefix that the tokenizer gives to texts (a beginning-of-sequence token, say), unless it
    already starts with it, and nothing at its end. Control tokens that it spells out become control ids, since such a text is a
    template rendered by the user.

    Chat messages go through the tokenizer's chat template with its generation prompt; the template alone decides about a
    beginning-of-sequence token. What people wrote must not act as control ids, so messages that spell out a special token are refused.

    Args:
        content: text, or messages with role and content (text or text parts).
        tokenizer: a transformers tokenizer.
        chat_template_kwargs: more arguments of the template (`{"enable_thinking": False}`).
        continue_final_message: messages that end with an assistant turn leave it open for the policy to continue; otherwise they
            are refused.
        allow_special_tokens_in_text: let messages spell out special tokens; they become control ids.

    Raises:
        DataError: the prompt is empty, is neither text nor messages, or its template or tokenizer cannot take it.
        ModelError: messages, but the tokenizer has no chat template.
        ConfigError: chat_template_kwargs holds an argument that is set here.
    """
    control = None if allow_special_tokens_in_text or isinstance(content, str) else _special_tokens_pattern(tokenizer)
    return _encode(content, tokenizer, _checked_template_kwargs(chat_template_kwargs), continue_final_message, control)


class PromptDataset(Sequence[Prompt]):
    """Prompts with their rows, tokenised once at construction.

    Takes the flat schema (`prompt`: text or chat messages, `ground_truth`) and verl's (`data_source`, `prompt`, `ability`,
    `reward_model.ground_truth`, `extra_info`); see `rlhf.data.sources.normalise_rows` for what a row becomes, and `encode_prompt` for
    what its ids are. Rows with equal texts are different prompts. Errors name the row, counted from 0 over all that was read.

    >>> dataset = PromptDataset.from_parquet("train.parquet", tokenizer, max_prompt_tokens=512, overlong="drop")  # doctest: +SKIP
    >>> train, held_out = dataset.split(200)  # doctest: +SKIP
    >>> for batch in train.loader(prompts_per_step=128): ...  # doctest: +SKIP

    Args:
        rows: dicts, one a prompt (a list, or any finite iterable of mappings).
        tokenizer: the policy's tokenizer.
        max_prompt_tokens: limit in tokens, chat template included; None for no limit.
        overlong: what to do with longer prompts: raise an "error", "drop" the row, or keep the last ("truncate_left") or the first
            ("truncate_right") max_prompt_tokens ids, template tokens not spared.
        prompt_key, ground_truth_key: where rows keep these; a dot enters a nested dict.
        chat_template_kwargs, continue_final_message, allow_special_tokens_in_text: see `encode_prompt`.

    Raises:
        DataError: no rows, a broken row, a prompt over the limit, or none left after dropping.
        ModelError: chat messages, but the tokenizer has no chat template.
        ConfigError: options that are unknown or contradict each other.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: Any,
        *,
        max_prompt_tokens: int | None = None,
        overlong: str = "error",
        prompt_key: str = "prompt",
        ground_truth_key: str = "ground_truth",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        allow_special_tokens_in_text: bool = False,
    ) -> None:
        if overlong not in OVERLONG:
            raise unknown_option("overlong", overlong, OVERLONG, {"left": "truncate_left", "right": "truncate_right", "filter": "drop"})
        if tokenizer is None:
            raise ConfigError("tokenizer must be the policy's tokenizer, got None; pass actor.tokenizer or rlhf.load_tokenizer(path)")
        if max_prompt_tokens is not None and (not isinstance(max_prompt_tokens, int) or max_prompt_tokens < 1):
            raise ConfigError(f"max_prompt_tokens must be a whole number, at least 1, got {max_prompt_tokens!r}; use None for no limit")
        if max_prompt_tokens is None and overlong != "error":
            raise ConfigError(f"overlong={overlong!r} needs a limit, got max_prompt_tokens=None; set max_prompt_tokens")
        template_kwargs = _checked_template_kwargs(chat_template_kwargs)
        control = None if allow_special_tokens_in_text else _special_tokens_pattern(tokenizer)

        normalised = normalise_rows(rows, prompt_key=prompt_key, ground_truth_key=ground_truth_key)
        if not normalised:
            raise DataError("expected at least one row, got an empty data set; check the file or the filter before it")
        encoded = []
        for index, row in enumerate(_with_bar(normalised)):
            try:
                encoded.append(_encode(row["prompt"], tokenizer, template_kwargs, continue_final_message, control))
            except DataError as error:
                raise DataError(f"row {index}: key {prompt_key!r}: {error}") from error

        self.tokenizer = tokenizer
        self._read = len(normalised)
        self._truncated: frozenset[str] = frozenset()
        self._prompts = self._within_limit(normalised, encoded, max_prompt_tokens, overlong)

    @classmethod
    def from_parquet(cls, paths: Paths, tokenizer: Any, **options: Any) -> PromptDataset:
        """From one or several parquet files; paths with a scheme (`s3://`, `hdfs://`) are read by `datasets`. Options as in the class."""
        return cls(read_parquet(paths), tokenizer, **options)

    @classmethod
    def from_jsonl(cls, paths: Paths, tokenizer: Any, **options: Any) -> PromptDataset:
        """From one or several files of JSON lines; paths with a scheme are read by `datasets`. Options as in the class."""
        return cls(read_jsonl(paths), tokenizer, **options)

    @classmethod
    def from_dataset(cls, dataset: Any, tokenizer: Any, **options: Any) -> PromptDataset:
        """From a `datasets.Dataset` or a finite `IterableDataset`. Options as in the class."""
        return cls(read_dataset(dataset), tokenizer, **options)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def __repr__(self) -> str:
        report = self.report
        sources = ", ".join(sorted(filter(None, self.data_sources)))
        changed = f"; {report.dropped} of {report.read} rows dropped" if report.dropped else ""
        changed += f"; {report.truncated} truncated" if report.truncated else ""
        described = f"{len(self)} prompts of {report.shortest} to {report.longest} tokens"
        return f"PromptDataset({described}{f' from {sources}' if sources else ''}{changed})"

    @property
    def report(self) -> PromptReport:
        """How many rows were read, kept, dropped and truncated, and the shortest and longest prompt."""
        lengths = [len(prompt) for prompt in self._prompts]
        return PromptReport(self._read, len(self), self._read - len(self), len(self._truncated), min(lengths), max(lengths))

    @property
    def uids(self) -> list[str]:
        """The uid of each row, in order."""
        return [prompt.row["uid"] for prompt in self._prompts]

    @property
    def data_sources(self) -> set[str]:
        """Which data sources the rows name ("" for rows that name none), for a reward that routes by them to check before the run."""
        return {prompt.row["data_source"] for prompt in self._prompts}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all uids and token ids in order: equal for equal data under an equal tokenizer."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(f"{prompt.row['uid']!r}:{prompt.ids.tolist()}\n".encode())
        return digest.hexdigest()[:32]

    def select(self, indices: Iterable[int]) -> PromptDataset:
        """The rows at these indices, in this order, each at most once.

        Raises:
            DataError: no index, one that is out of range, or one that comes twice.
        """
        chosen = [int(index) for index in indices]
        if not chosen:
            raise DataError("expected at least one index, got none")
        if outside := [index for index in chosen if not -len(self) <= index < len(self)]:
            raise DataError(f"index {outside[0]} is out of range for {len(self)} rows")
        if len({index % len(self) for index in chosen}) < len(chosen):
            raise DataError("an index comes twice; each row may be chosen once, and epochs= of the loader repeats rows")
        part = object.__new__(type(self))
        part.tokenizer = self.tokenizer
        part._prompts = [self._prompts[index] for index in chosen]
        part._read = len(chosen)
        part._truncated = self._truncated & set(part.uids)
        return part

    def split(self, held_out: int | float, seed: int = 0) -> tuple[PromptDataset, PromptDataset]:
        """Two disjoint datasets, (rest, held out), drawn at random by the seed; each keeps the order of rows.

        Rows with equal prompts may fall on both sides; give such data a split of its own.

        Args:
            held_out: how many rows the second one gets: a count, or a fraction below 1.
            seed: chooses the rows; the global random state is neither read nor changed.

        Raises:
            ConfigError: one of the two would be empty.
        """
        count = int(held_out) if isinstance(held_out, (int, float)) else 0
        if isinstance(held_out, float):
            count = round(held_out * len(self)) if held_out < 1 else 0  # 1.0 could mean one row or all of them
        if not 0 < count < len(self):
            raise ConfigError(
                f"held_out must leave rows on both sides: a whole number below {len(self)} or a fraction between 0 and 1; got {held_out!r}"
            )
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        return self.select(sorted(order[count:])), self.select(sorted(order[:count]))

    def loader(
        self,
        prompts_per_step: int,
        *,
        seed: int = 0,
        epochs: int | None = 1,
        drop_last: bool = True,
        sampler: PromptSampler | None = None,
        shuffle: bool = True,
    ) -> PromptLoader:
        """Batches of prompts in a seeded order, with a state to resume from; see `PromptLoader`."""
        return PromptLoader(self, prompts_per_step, seed=seed, epochs=epochs, drop_last=drop_last, sampler=sampler, shuffle=shuffle)

    def _within_limit(self, rows: list[Row], encoded: list[list[int]], limit: int | None, overlong: str) -> list[Prompt]:
        longer = [index for index, ids in enumerate(encoded) if limit is not None and len(ids) > limit]
        if longer:
            longest = max(map(len, encoded))
            over = f"{len(longer)} of {len(rows)} rows are longer than max_prompt_tokens={limit} (the longest: {longest} tokens)"
            if overlong == "error":
                first = longer[0]
                raise DataError(
                    f"row {first}: the prompt has {len(encoded[first])} tokens; {over}; raise the limit, "
                    f"or choose overlong='drop', 'truncate_left' or 'truncate_right'"
                )
            if overlong == "drop" and len(longer) == len(rows):
                shortest = min(map(len, encoded))
                raise DataError(
                    f"overlong='drop' with max_prompt_tokens={limit} dropped all {len(rows)} rows; "
                    f"the shortest prompt has {shortest} tokens; raise the limit to at least that"
                )
            warnings.warn(
                f"{over}; {'dropped' if overlong == 'drop' else 'truncated'} as overlong={overlong!r} says", RLHFWarning, stacklevel=3
            )
        if overlong == "drop":
            dropped = set(longer)
            kept = [index for index in range(len(rows)) if index not in dropped]
        else:
            kept = list(range(len(rows)))
            self._truncated = frozenset(rows[index]["uid"] for index in longer)
        shorten = slice(-limit, None) if limit is not None and overlong == "truncate_left" else slice(limit)
        return [Prompt(torch.tensor(encoded[index][shorten], dtype=torch.long), rows[index]) for index in kept]


def _with_bar(rows: list[Row]) -> Iterable[Row]:
    if len(rows) < _BAR_FROM_ROWS:
        return rows
    from tqdm.auto import tqdm

    return tqdm(rows, desc="tokenising prompts", unit="row", leave=False)


def _checked_template_kwargs(chat_template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    kwargs = dict(chat_template_kwargs or {})
    ours = {
        "conversation",
        "tokenize",
        "return_dict",
        "return_tensors",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
    }
    if clash := sorted(ours & kwargs.keys()):
        raise ConfigError(
            f"chat_template_kwargs must not hold {clash[0]!r}, which encode_prompt sets; pass the template's own arguments only"
        )
    return kwargs


def _special_tokens_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(name) for name in tokenizer.all_special_tokens} | {str(token) for token in added if token.special}
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _encode(
    content: Any, tokenizer: Any, template_kwargs: dict[str, Any], continue_final_message: bool, control: re.Pattern[str] | None
) -> list[int]:
    if isinstance(content, str):
        if not content:
            raise DataError("expected a prompt, got an empty text; give at least a beginning-of-sequence token")
        ids = _encode_text(content, tokenizer)
    else:
        messages = _checked_messages(content, control)
        ids = _encode_messages(messages, tokenizer, template_kwargs, continue_final_message)
    if not ids:
        raise DataError(
            f"{type(tokenizer).__name__} made no token ids of {content!r:.80}; AutoTokenizer may have replaced the class that was "
            f"saved (it does beside a qwen2 config); load it with PreTrainedTokenizerFast.from_pretrained"
        )
    return ids


def _encode_text(text: str, tokenizer: Any) -> list[int]:
    plain = _id_list(tokenizer.encode(text, add_special_tokens=False))
    count_added = getattr(tokenizer, "num_special_tokens_to_add", None)
    if count_added is not None and count_added() == 0:
        return plain
    full = _id_list(tokenizer.encode(text, add_special_tokens=True))
    # Only what stands in front of the text is wanted: a tokenizer that also closes texts would make the policy continue after the end.
    start = next((k for k in range(len(full) - len(plain) + 1) if full[k : k + len(plain)] == plain), None)
    if not plain:
        return []
    if start is None:  # the tokenizer joins its own tokens to the text
        return full
    prefix = full[:start]
    return plain if plain[:start] == prefix else prefix + plain


def _encode_messages(
    messages: list[dict[str, Any]], tokenizer: Any, template_kwargs: dict[str, Any], continue_final_message: bool
) -> list[int]:
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in template_kwargs:
        raise ModelError(
            f"chat messages need a chat template, and {type(tokenizer).__name__} has none; set tokenizer.chat_template, or give text"
        )
    ends_open = messages[-1]["role"] == "assistant"
    if ends_open and not continue_final_message:
        raise DataError(
            "the last message is the assistant's, so there is nothing to answer; remove it, or ask with continue_final_message=True"
        )
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not ends_open,
            continue_final_message=ends_open,
            **template_kwargs,
        )
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise DataError(f"the chat template refused the messages ({type(error).__name__}: {error}); check roles and their order") from error
    return _id_list(encoded)


def _id_list(encoded: Any) -> list[int]:
    if isinstance(encoded, Mapping):  # transformers 5 hands out a BatchEncoding where 4 handed out a list
        encoded = encoded["input_ids"]
    ids = encoded.tolist() if hasattr(encoded, "tolist") else list(encoded)
    if ids and isinstance(ids[0], list):
        (ids,) = ids
    return ids


def _checked_messages(content: Any, control: re.Pattern[str] | None) -> list[dict[str, Any]]:
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Iterable):
        raise DataError(f"expected text or a list of chat messages, got {type(content).__name__}")
    messages = list(content)
    if not messages:
        raise DataError("expected chat messages, got an empty list")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number}: expected a dict with role and content, got {message!r:.80}")
        _check_content(number, message)
        if control is not None and (found := next(filter(None, map(control.search, _texts(message))), None)):
            raise DataError(
                f"message {number}: the text holds the special token {found.group()!r}, which would act as a control id; "
                f"clean the text, or allow it with allow_special_tokens_in_text=True"
            )
    return [strip_none(message) for message in messages]


def _check_content(number: int, message: Mapping[str, Any]) -> None:
    role, content = message["role"], message.get("content")
    if isinstance(content, (list, tuple)):
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise DataError(
                    f"message {number}: expected text parts, got {kind!r}; for images build Prompt(ids, row, inputs) with the processor"
                )
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise DataError(f"message {number}: content must be text or a list of parts, got {type(content).__name__}")
    # A tool call stands in for content; a system message may say nothing on purpose, and a tool may print nothing.
    may_be_empty = bool(message.get("tool_calls")) or (content is not None and role in ("system", "tool"))
    if not may_be_empty and not (content or "").strip():
        raise DataError(f"message {number}: the {role} message has no content; remove the row or the message")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)
