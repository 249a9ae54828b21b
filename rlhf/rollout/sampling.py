"""How to sample: one frozen, checked set of options that every engine understands."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf.errors import ConfigError, unknown_option


@dataclass(frozen=True)
class SamplingParams:
    """Options of one generation call. Engines send every field, so no model's generation config can slip in a default.

    Attributes:
        n: responses for each prompt, one group.
        max_new_tokens: most tokens of a response; reaching it gives the finish reason LENGTH.
        min_new_tokens: end tokens are forbidden until the response has this many. Does not count as filtering.
        temperature: logits are divided by it; 0 is greedy and for evaluation only.
        top_p: keep the smallest set of tokens with this probability mass; 1 keeps all.
        top_k: keep this many tokens; -1 keeps all.
        min_p: drop tokens below this fraction of the most likely one's probability; 0 keeps all.
        stop: texts that end a response, one or several; they stay in the ids and the text.
        stop_token_ids: further end tokens besides the tokenizer's and the model's; they stay in the ids.
        seed: makes a call repeatable; the responses of one call differ all the same. None takes fresh randomness.

    Raises:
        ConfigError: a field has the wrong type or is out of range.

    >>> SamplingParams(n=4, stop="</answer>").stop
    ('</answer>',)
    """

    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        settle = partial(object.__setattr__, self)  # a frozen dataclass has no other way to store a normalised value
        for name, least in (("n", 1), ("max_new_tokens", 1), ("min_new_tokens", 0)):
            value = _integer(name, getattr(self, name))
            if value < least:
                raise ConfigError(f"{name} must be {least} or above, got {value}")
            settle(name, value)
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(f"min_new_tokens must be at most max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens}")
        for name in ("temperature", "top_p", "min_p"):
            settle(name, _real(name, getattr(self, name)))
        if self.temperature < 0:
            raise ConfigError(f"temperature must be 0 (greedy) or above, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1 (which keeps all tokens), got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ConfigError(f"min_p must be 0 (which keeps all tokens) or above and below 1, got {self.min_p}")
        settle("top_k", _integer("top_k", self.top_k))
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigError(f"top_k must be 1 or above, or -1 to keep all tokens, got {self.top_k}")
        settle("stop", _stop_texts(self.stop))
        settle("stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.seed is not None:
            settle("seed", _integer("seed", self.seed))
            if self.seed < 0:
                raise ConfigError(f"seed must be 0 or above, or None for fresh randomness, got {self.seed}")

    @property
    def filtered(self) -> bool:
        """Whether top-p, top-k or min-p is in force, so that log-probabilities are not those of the sampling distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with these fields changed and checked again.

        Raises:
            ConfigError: a name is not a field, or the new values do not go together.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                raise unknown_option("a field of SamplingParams", name, names, _ALIASES)
        return dataclasses.replace(self, **changes)


def check_sampling(sampling: object) -> None:
    """Raise a ConfigError unless this is a `SamplingParams`."""
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"sampling must be SamplingParams, got {type(sampling).__name__}; write SamplingParams(n=8, max_new_tokens=128)")


_ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "response_length": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "num_generations": "n",
    "num_return_sequences": "n",
    "sampling_seed": "seed",
    "stop_strings": "stop",
}


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None


def _real(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a number, got {value!r}") from None
    if isinstance(value, (bool, str)) or not math.isfinite(number):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    return number


def _stop_texts(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"stop must be a non-empty text or a list of them, got {value!r}; an empty one would stop everything at once")
    return texts


def _stop_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    entries = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    ids = tuple(_integer("stop_token_ids", entry) for entry in entries)
    if any(entry < 0 for entry in ids):
        raise ConfigError(f"stop_token_ids must be token ids of 0 and above, got {ids}")
    return ids
