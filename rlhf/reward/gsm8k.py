"""GSM8K and its like: grade-school problems whose answer is one number behind a marker."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from rlhf.errors import ConfigError, DataError, RewardError, unknown_option
from rlhf.reward.function import OnError, RewardFunction
from rlhf.reward.numbers import Number, exact, last_number, one_number, plain
from rlhf.reward.sample import Sample, ground_truth_of, rows_of

_MODES = ("strict", "flexible")
_CONTENT = re.compile(r"[^\W_]")
_MAX_EMPTY_MARKERS = 1000  # markers with nothing behind them that are passed over


class GSM8K(RewardFunction):
    """1 where the response's last marked number equals the gold number exactly, else 0.

    The answer stands on the first line with a letter or digit after the last marker that is followed by one. Compatibility
    characters are folded first (full-width digits, Unicode minus). Thousands commas, currency, percent sign, units, `\\boxed{}`,
    bold and a full stop are not part of the number; fractions, decimals and scientific notation are compared by exact value, with
    no rounding and no tolerance. On the line there must be one number: a list of guesses, a range, a tuple, a date, a
    calculation that was not carried out (`40 + 2`; after `=` it was) or a number with a magnitude (`5k`, `5 million`) pays nothing.

    The gold may be a number, its text, or the whole worked solution ending in `#### n`. A gold that is missing or no number is a
    fault of the data: the sample is ERROR, not 0. A response without an answer is 0 whatever the gold text says.

    Args:
        mode: "strict" reads marked answers only. "flexible" takes the last number in the text where the marked line cannot be read
            as one number (after that line, if it holds several) or where there is no marker; two numbers joined by "or", a comma list
            of three, or a list in brackets are guesses and pay nothing.
        format_score: paid for a wrong answer that could be read as a number; below 1.
        marker: what announces the answer, matched as it is written; one that starts with a letter must start a word.
        name: its name in the metrics.
        on_error: see `RewardFunction`.

    >>> GSM8K().score(Sample("", "6 * 7 = 42\\n#### 42 apples.", "42"))
    1.0
    >>> GSM8K("flexible").score(Sample("", "It comes to $1,234.50", 1234.5))
    1.0
    """

    def __init__(
        self,
        mode: str = "strict",
        format_score: float = 0.0,
        *,
        marker: str = "####",
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(name=name, on_error=on_error)
        if mode not in _MODES:
            raise unknown_option("mode", mode, _MODES)
        if not isinstance(format_score, (int, float)) or not math.isfinite(format_score) or format_score >= 1:
            raise ConfigError(f"format_score must be a finite number below 1, what a right answer earns; got {format_score!r}")
        if not isinstance(marker, str) or not marker.strip():
            raise ConfigError(f"marker must be text such as '####' or 'A:'; got {marker!r}")
        self.mode = mode
        self.format_score = float(format_score)
        self.marker = marker
        self._marker = _compiled(marker)

    def score(self, sample: Sample) -> float:
        if sample.ground_truth is None:
            raise RewardError(f"{self.name} found no gold answer: the row needs 'ground_truth' or reward_model.ground_truth")
        answer = self.answer(sample.response)
        if answer is None:
            return 0.0
        gold = self._gold(sample.ground_truth)
        if gold is None:
            raise RewardError(f"{self.name} needs a gold answer that is one number; got {sample.ground_truth!r:.200}")
        return 1.0 if answer == gold else self.format_score

    def answer(self, text: str) -> Number | None:
        """The number a response gives as its answer; None if it gives none."""
        text = plain(text)
        line, rest = _marked(text, self._marker)
        if line is None:
            return last_number(text) if self.mode == "flexible" else None
        number, refused = one_number(line)
        if number is not None or self.mode == "strict":
            return number
        return last_number(rest if refused else text)

    def check(self, rows: Iterable[Any]) -> None:
        """Raise a DataError naming the rows whose gold answer is missing or not one number."""
        golds = [ground_truth_of(row) for row in rows_of(rows)]
        bad = [(index, gold) for index, gold in enumerate(golds) if gold is None or self._gold(gold) is None]
        if bad:
            shown = "; ".join(f"row {index}: {gold!r:.80}" for index, gold in bad[:3])
            raise DataError(
                f"{self.name} needs a 'ground_truth' (or reward_model.ground_truth) that is one number in every row; "
                f"{len(bad)} of {len(golds)} rows have none: {shown}"
            )

    def _gold(self, gold: object) -> Number | None:
        if not isinstance(gold, str):
            return exact(gold)
        gold = plain(gold)
        for marker in (_HASHES, self._marker):
            line, _ = _marked(gold, marker)
            if line is not None:
                return one_number(line).number
        return one_number(gold).number

    def __repr__(self) -> str:
        return f"GSM8K(mode={self.mode!r}, format_score={self.format_score}, marker={self.marker!r})"


def _compiled(marker: str) -> re.Pattern[str]:
    marker = plain(marker)
    # "######" announces an answer as "####" does, and "USA: 5" does not hold the marker "A:"
    return re.compile((r"(?<![^\W_])" if marker[0].isalnum() else "") + re.escape(marker) + re.escape(marker[-1]) + "*")


_HASHES = _compiled("####")


def _marked(text: str, marker: re.Pattern[str]) -> tuple[str | None, str]:
    """The line that the last marker with anything behind it announces, and the text after that line; (None, "") without one."""
    end = len(text)
    for start, stop in reversed(deque((match.span() for match in marker.finditer(text)), _MAX_EMPTY_MARKERS)):
        content = _CONTENT.search(text, stop, end)
        if content is None:
            end = start
            continue
        begin = text.rfind("\n", stop, content.start()) + 1 or stop
        newline = text.find("\n", content.start(), end)
        if newline < 0:
            return text[begin:end], ""
        return text[begin:newline], text[newline + 1 :]
    return None, ""
