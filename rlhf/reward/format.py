"""Whether a response has the form that was asked for."""

from __future__ import annotations

import re

from rlhf.errors import ConfigError, unknown_option
from rlhf.reward.function import OnError, RewardFunction
from rlhf.reward.sample import Sample

_MATCHES = ("full", "search")
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>")


class Format(RewardFunction):
    """1 where the response matches a regular expression, else 0.

    The raw response is matched, for tags may be special tokens that the clean text lacks. Blanks around it and end tokens behind
    it are not part of it. The dot matches newlines too, unless the pattern was compiled without re.DOTALL.

    A pattern is searched with Python's `re`, which can take exponential time on nested repeats such as `(a+)+`: bound them, or
    repeat over classes that exclude the next character. A lazy `.+?` between tags also matches further tags; `(?:(?!</?think>).)+`
    does not.

    Args:
        pattern: regular expression, as text or compiled.
        match: "full", the pattern describes the whole response; "search", it occurs somewhere.
        end_tokens: texts that may stand at the end of the raw response.
        name: its name in the metrics.
        on_error: see `RewardFunction`.

    Raises:
        ConfigError: the pattern does not compile, or match is unknown.

    >>> Format(r"<think>.+</think>.+").score(Sample("", "<think>6 * 7</think>42<|im_end|>"))
    1.0
    """

    def __init__(
        self,
        pattern: str | re.Pattern[str],
        match: str = "full",
        *,
        end_tokens: tuple[str, ...] = END_TOKENS,
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(name=name, on_error=on_error)
        if match not in _MATCHES:
            raise unknown_option("match", match, _MATCHES)
        try:
            self.pattern = re.compile(pattern, re.DOTALL) if isinstance(pattern, str) else re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(f"pattern must be a regular expression for text, got {pattern!r:.200}: {error}") from None
        if not isinstance(self.pattern.pattern, str):
            raise ConfigError(f"pattern must be a regular expression for text, got one for bytes: {pattern!r:.200}")
        if isinstance(end_tokens, str) or not all(isinstance(token, str) and token for token in end_tokens):
            raise ConfigError(f"end_tokens must be a tuple of texts, none of them empty; got {end_tokens!r}")
        self.match = match
        self.end_tokens = tuple(end_tokens)

    def score(self, sample: Sample) -> float:
        text = _without_end_tokens((sample.raw_response or "").strip(), self.end_tokens)
        found = self.pattern.fullmatch(text) if self.match == "full" else self.pattern.search(text)
        return 1.0 if found else 0.0

    def __repr__(self) -> str:
        return f"Format({self.pattern.pattern!r}, match={self.match!r})"


def _without_end_tokens(text: str, end_tokens: tuple[str, ...]) -> str:
    end = len(text)
    while True:  # moves an index, for copying the text at each of many end tokens would be quadratic
        for token in end_tokens:
            if text.endswith(token, 0, end):
                break
        else:
            return text[:end]
        end -= len(token)
        while end and text[end - 1].isspace():
            end -= 1
