"""Numbers in model text: found word by word, compared exactly in value, never evaluated.

A number is kept as its decimal digits, a power of ten and a denominator, so `1e400` and an answer of five thousand digits cost
no more than their length, and neither a float's rounding nor Python's limit on integer text comes into it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

_MAX_FRACTION_DIGITS = 300  # of numerator and denominator: reducing a fraction needs integer arithmetic, whose cost must stay bounded
_MAX_EXPONENT_DIGITS = 18
_MAX_NUMBERS_ON_LINE = 16  # a line with more is a list whatever it says
_MAX_PASSED_OVER = 1000  # words with a digit that are no number, before the search for the last number gives up


class Number(NamedTuple):
    """A rational number in its one canonical form, so that `==` is equality of value.

    value = ± digits · 10^exponent / denominator

    Attributes:
        negative: whether the value is below 0.
        digits: decimal digits without leading or trailing zeros; "" for zero.
        exponent: power of ten.
        denominator: coprime to the digits and to 10; 1 for every terminating decimal.
    """

    negative: bool
    digits: str
    exponent: int
    denominator: int = 1


ZERO = Number(False, "", 0)


class _Plain(dict[int, str | int]):
    """`str.translate` table that maps a character to its plain ASCII form, filled as characters turn up.

    NFKC one character at a time: composing never makes a digit, and reordering combining marks is quadratic in their number.
    Superscripts, circled digits and vulgar fractions are kept apart from a number they follow: `5²` is not 52, `1½` is not 11/2.
    """

    def __missing__(self, code: int) -> str | int:
        character = chr(code)
        plain = unicodedata.normalize("NFKC", character)
        kind = unicodedata.decomposition(character).partition(" ")[0]
        digit = unicodedata.decimal(character, None)
        value: str | int = code
        if unicodedata.category(character) == "Cf":
            value = ""  # zero-width characters, byte-order marks
        elif character in "‐‑‒–−﹣－":
            value = "-"
        elif character in "—―":
            value = " ; "
        elif digit is not None:
            value = str(digit)
        elif kind == "<fraction>":
            value = " " + plain.replace("⁄", "/")
        elif plain.isascii():
            value = "^" + plain if kind in ("<super>", "<sub>", "<circle>", "<compat>") and plain.strip(".()").isdigit() else plain
        self[code] = value
        return value


_PLAIN = _Plain()


def plain(text: str) -> str:
    """The text with full-width and other compatibility characters, foreign digits and every kind of minus in ASCII."""
    return text if text.isascii() else text.translate(_PLAIN).replace("⁄", "/")


# What is taken out of a line before it is cut into words. No pattern can match the same text in two ways, so each is linear.
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator notes
_TAG = re.compile(r"</?[A-Za-z|][^<>0-9]{0,40}>")
_FRACTION = re.compile(r"\\[dtc]?frac *\{ *([0-9]+) *\} *\{ *([0-9]+) *\}")
_WRAPPER = re.compile(r"\\(?:boxed|fbox|text|textbf|textit|mathbf|mathrm|mbox|emph|underline) *\{")
_EQUALS = re.compile(r"(?<![<>!=])=+")
_UNSPACED = re.compile(r"(?<=[぀-ヿ㐀-鿿가-힣])(?=[-$0-9])")  # scripts that put no blank before a number

_NUMBER = re.compile(
    r"""(?P<sign>[+-]?) (?:[A-Za-z]{0,3}[$€£¥₹₩₽¢])? (?P<inner>-?)
        (?P<whole> [0-9]{1,3}(?:,[0-9]{3})+(?![0-9,]) | [0-9]+ | (?=\.[0-9]) )
        (?:\.(?P<part>[0-9]*))?
        (?:[eE](?P<exponent>[+-]?[0-9]+))?
        (?:/(?P<denominator>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|[0-9]+))?""",
    re.VERBOSE,
)
_POWER_UNIT = r"(?:[kcdm]?m|ft|in|yd|mi)\^?[23]"
_UNIT = re.compile(rf"%|°[CF]?|[-/]?[^\W\d_]+(?:[-/.'][^\W\d_]+)*|[-/]?{_POWER_UNIT}|[^\W\d_]+/{_POWER_UNIT}")
_UNIT_WORD = re.compile(_POWER_UNIT)
_MAGNITUDES = {"k", "K", "M", "B", "bn", "mn", "hundred", "thousand", "million", "billion", "trillion"}
_LEFT = "([{*_`\"'\\~≈“‘"
_RIGHT = ")]}*_`\"'\\~.,;:!?$€£¥₹₩₽¢…。、”’"
_OPERATORS = {"+", "-", "*", "/", "^", "x", "X", "×", "·", "÷", "\\times", "\\cdot", "\\div"}
_DIGIT = re.compile("[0-9]")
_PROPER = re.compile("([0-9]{1,9})/([0-9]{1,9})")
_WHOLE = re.compile("(-?)([0-9]{1,9})")


def words_of(line: str) -> list[str]:
    """The words of one line that went through `plain`: LaTeX wrappers, tags and calculator notes removed, `=` standing alone."""
    if "<" in line:
        line = _TAG.sub(" ", _CALCULATION.sub("", line))
    if "\\" in line:
        line = _FRACTION.sub(lambda m: (" " if line[m.start() - 1 : m.start()].isdigit() else "") + f"{m[1]}/{m[2]}", line)
        line = _WRAPPER.sub(" ", line).replace("\\%", "%").replace("\\$", "$").replace(",\\!", ",")
    if not line.isascii():
        line = _UNSPACED.sub(" ", line)
    return _EQUALS.sub(" = ", line.replace("{,}", ",")).split()


def _canonical(negative: bool, digits: str, exponent: int, denominator: str = "1") -> Number | None:
    """The canonical form; None for a denominator of 0 and for fractions too long to reduce."""
    digits = digits.lstrip("0")
    below = 1
    if denominator != "1":
        if max(len(digits), len(denominator)) > _MAX_FRACTION_DIGITS or not denominator.strip("0"):
            return None
        above, below = int(digits or "0"), int(denominator)
        common = math.gcd(above, below)
        above, below = above // common, below // common
        for factor, cofactor in ((2, 5), (5, 2)):  # n / 2 = 5 n / 10, so only what is coprime to 10 stays below the line
            while below % factor == 0:
                above, below, exponent = above * cofactor, below // factor, exponent - 1
        digits = str(above).lstrip("0")
    if not digits:
        return ZERO
    stripped = digits.rstrip("0")
    return Number(negative, stripped, exponent + len(digits) - len(stripped), below)


def _read_word(word: str) -> Number | None:
    """The number a word is, without currency, unit, percent sign, bold and punctuation; None if it is none (`1,2`, `10-20`, `5:30`)."""
    before, colon, after = word.rpartition(":")
    if colon and after and not _DIGIT.search(before):
        word = after
    word = word.lstrip(_LEFT).rstrip(_RIGHT)
    match = _NUMBER.match(word)
    if match is None:
        return None
    rest = word[match.end() :]
    if rest in _MAGNITUDES or (rest and not _UNIT.fullmatch(rest)) or (match["sign"] and match["inner"]):
        return None
    exponent, part = match["exponent"] or "0", match["part"] or ""
    if len(exponent) > _MAX_EXPONENT_DIGITS:
        return None
    negative = "-" in (match["sign"], match["inner"])
    denominator = (match["denominator"] or "1").replace(",", "")
    return _canonical(negative, match["whole"].replace(",", "") + part, int(exponent) - len(part), denominator)


def _mixed(whole: str, fraction: str) -> Number | None:
    """`1` and `1/2` as 3/2; None where the two words are not a whole number and a proper fraction."""
    left, right = _WHOLE.fullmatch(whole.lstrip(_LEFT)), _PROPER.fullmatch(fraction.rstrip(_RIGHT))
    if left is None or right is None or int(right[1]) >= int(right[2]):
        return None
    return _canonical(left[1] == "-", str(int(left[2]) * int(right[2]) + int(right[1])), 0, right[2])


def numbers_backwards(words: list[str]) -> Iterator[tuple[int, Number | None]]:
    """Every word that holds a digit, from the last to the first: its place and the number it is.

    None stands for what looks like a number and is none: dates, ranges, tuples, times, versions, numbers with a magnitude (`5k`,
    `5 million`), and operands of a calculation that was not carried out (`40 + 2`).
    """

    def has_digit(place: int) -> bool:
        return 0 <= place < len(words) and _DIGIT.search(words[place]) is not None

    def is_operand(place: int) -> bool:
        if place + 2 < len(words) and words[place + 1] in _OPERATORS and has_digit(place + 2):
            return True
        if place == 0:
            return False
        before = words[place - 1]
        if words[place][0] in "+-":
            return before[-1].isdigit()
        return before in _OPERATORS and (has_digit(place - 2) or (before == "-" and place > 1))

    place = len(words)
    while place > 0:
        place -= 1
        if not has_digit(place) or _UNIT_WORD.fullmatch(words[place].rstrip(_RIGHT)):
            continue
        at = place
        value = _read_word(words[place])
        if "/" in words[place] and place > 0 and (mixed := _mixed(words[place - 1], words[place])) is not None:
            value, place = mixed, place - 1
        following = words[at + 1].rstrip(_RIGHT) if at + 1 < len(words) else ""
        if (
            is_operand(place)
            or is_operand(at)
            or following in _MAGNITUDES
            or following.lower().rstrip("s") in _MAGNITUDES - {"k", "m", "b"}
        ):
            value = None
        yield place, value


class Reading(NamedTuple):
    """What a line says when asked for one number.

    Attributes:
        number: the number, None if there is not exactly one.
        refused: True where the line does hold digits, but several numbers or something that is none.
    """

    number: Number | None
    refused: bool


def one_number(line: str) -> Reading:
    """The one number of a line, after its last `=` if there is one; equal numbers (`1/2 = 0.5`, `72 (72.00)`) count as one.

    A list of guesses (`72 or 73`), a range, a tuple or an unfinished calculation is refused, and so is a minus that stands apart.

    >>> one_number("$1,234.50 in total").number == exact("1234.5")
    True
    >>> one_number("72 or 73")
    Reading(number=None, refused=True)
    """
    words = words_of(line)
    if "=" in words:
        last = len(words) - 1 - words[::-1].index("=")
        if any(_DIGIT.search(word) for word in words[last:]):
            words = words[last + 1 :]
    found: Number | None = None
    for count, (place, number) in enumerate(numbers_backwards(words)):
        apart = place > 0 and words[place - 1] == "-"
        if number is None or apart or (found is not None and number != found) or count >= _MAX_NUMBERS_ON_LINE:
            return Reading(None, True)
        found = number
    return Reading(found, False)


def last_number(text: str) -> Number | None:
    """The last number in the text, which went through `plain`; None if there is none or if it ends a list of guesses.

    Dates, ranges, tuples and the like are passed over. A list of guesses is two different numbers joined by "or", three or more
    joined by commas, or any that stand in brackets.
    """
    passed_over = 0
    for line in reversed(text.splitlines()):
        if _DIGIT.search(line) is None:
            continue
        words = words_of(line)
        for place, number in numbers_backwards(words):
            if number is not None:
                return None if _ends_guesses(words, place, number) else number
            passed_over += 1
            if passed_over > _MAX_PASSED_OVER:
                return None
    return None


def _ends_guesses(words: list[str], place: int, number: Number) -> bool:
    """Whether the number at this place is the last of several alternatives."""
    earlier = words[max(0, place - 4) : place]  # "72 dollars, or maybe 73": a unit and one word more may stand between
    if any(word.lower().strip(",;/") in ("or", "and/or") for word in earlier[-2:]):
        alternatives = [other for _, other in numbers_backwards(earlier)]
        if any(other != number for other in alternatives):
            return True
    listed = 0
    while listed < 2 and place - listed > 0:
        word = words[place - listed - 1]
        if word[-1] not in ",;" or _DIGIT.search(word) is None:
            break
        listed += 1
    return listed == 2 or (listed == 1 and words[place - 1][0] in "([{")


def exact(value: object) -> Number | None:
    """The exact value of a gold answer given as text or as a Python, numpy or torch number; None if it is no finite number.

    A float means the decimal it is printed as: 0.1 is one tenth. Text is read as `one_number` does.
    """
    if isinstance(value, str):
        return one_number(plain(value)).number
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        value = Decimal(repr(value))
    if isinstance(value, int):
        value = Decimal(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            return None
        sign, digits, exponent = value.as_tuple()
        return _canonical(bool(sign), "".join(map(str, digits)), int(exponent))
    if isinstance(value, Fraction):
        return _canonical(value < 0, str(abs(value.numerator)), 0, str(value.denominator))
    return None
