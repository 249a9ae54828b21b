"""Numbers in text: which words are numbers, and equality of exact value."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlhf.reward.numbers import ZERO, Number, exact, last_number, one_number, plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234),
        ("109,200,000", 109_200_000),
        ("1,234.50", Fraction(2469, 2)),
        ("007", 7),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("+5", 5),
        ("-5", -5),
        ("-0", 0),
        ("0.000", 0),
        ("6/8", Fraction(3, 4)),
        ("-6/8", Fraction(-3, 4)),
        ("1.5/2", Fraction(3, 4)),
        ("10/4", Decimal("2.5")),
        ("1e3", 1000),
        ("1.5E-2", Fraction(3, 200)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("$-5", -5),
        ("-$5", -5),
        ("US$1,000", 1000),
        ("42€", 42),
        ("42%", 42),
        ("42km", 42),
        ("42 km/h", 42),
        ("10 m^2", 10),
        ("10 ft2", 10),
        ("(42)", 42),
        ("**42**.", 42),
        ("x = 42", 42),
        ("40+2=42", 42),
        ("1/2 = 0.5", Fraction(1, 2)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("1\\frac{1}{2}", Fraction(3, 2)),
        ("$\\boxed{\\text{42 apples}}$", 42),
        ("1{,}234", 1234),
        ("\\$42", 42),
        ("42</answer>", 42),
        ("<<6*7=42>>42", 42),
        ("５０", 50),
        ("𝟒𝟐", 42),
        ("٤٢", 42),
        ("1½", Fraction(3, 2)),
        ("½", Fraction(1, 2)),
        ("10 m²", 10),
        ("–5", -5),
        ("\ufeff4\u200b2", 42),
    ],
)
def test_one_number_reads_the_value(text, value):
    assert one_number(plain(text)).number == exact(value)


@pytest.mark.parametrize(
    "text",
    [
        "1 2 3", "72 or 73", "72, 73", "72 and 73", "1,2", "(1,2)", "12,34", "1,2345", "10-20", "10 - 20", "10–20", "10 -20", "2024-01-05",
        "5:30", "1.2.3", "40+2", "40 + 2", "6*7", "3 x 4", "3x4", "2^3", "5²", "5₂", "1.5 × 10^3", "3 x10^5", "0x1F",
        "1_000", "\\sqrt{16}", "|-5|", "5k", "$5M",
        "5 million", "5 Thousand", "3 / 4", "1/0", "1/2/3", "- 5", "--5", "-$-5", "1e9999999999999999999", "1" * 301 + "/7", "1 " * 17,
    ],
)  # fmt: skip
def test_what_is_not_one_number_is_refused(text):
    reading = one_number(plain(text))
    assert reading.number is None
    assert reading.refused


@pytest.mark.parametrize("text", ["", ".", "nan", "inf", "infinity", "-", "forty-two", "m^2"])
def test_a_line_without_a_number_is_empty_and_not_refused(text):
    assert one_number(plain(text)) == (None, False)


def test_equality_is_exact_at_any_size():
    assert exact("1e400") != exact("1e500")
    assert exact("1e400") == exact("10e399") == exact("1" + "0" * 400)
    assert exact("1e999999999999") != exact("1e999999999998")
    assert exact("9" * 5000) == exact("9" * 5000 + ".0")
    assert exact("9" * 5000) != exact("9" * 4999 + "8")
    assert exact("12345678901234567891") != exact("12345678901234567890")
    assert exact("0.3333333333") != exact("1/3")
    assert exact("10001") != exact("10000")


def test_a_number_has_one_form():
    assert exact("1,200") == Number(False, "12", 2)
    assert exact("0.75") == exact("3/4") == exact(Fraction(6, 8)) == Number(False, "75", -2)
    assert exact("2/3") == exact(Fraction(4, 6)) == Number(False, "2", 0, 3)
    assert exact("20/3") == Number(False, "2", 1, 3)
    assert exact("5/6") == Number(False, "25", -1, 3)
    assert exact("-0.0") == ZERO


@pytest.mark.parametrize("numerator", [0, 1, -2, 7, 10, -75, 640])
@pytest.mark.parametrize("denominator", [1, 2, 3, 5, 8, 12, 125, 360])
def test_the_form_keeps_the_value_of_every_fraction(numerator, denominator):
    number = exact(f"{numerator}/{denominator}")
    digits = int(number.digits or "0") * Fraction(10) ** number.exponent / number.denominator
    assert (-digits if number.negative else digits) == Fraction(numerator, denominator)
    assert number == exact(Fraction(numerator, denominator))


@pytest.mark.parametrize("value", [3, 3.0, Decimal("3.00"), Fraction(3), np.int64(3), np.float64(3), np.float32(3), torch.tensor(3), "3"])
def test_gold_may_be_any_kind_of_number(value):
    assert exact(value) == Number(False, "3", 0)


def test_a_float_means_the_decimal_it_is_printed_as():
    assert exact(0.1) == exact("1/10")
    assert exact(1e22) == exact("1e22")


@pytest.mark.parametrize("value", [None, True, float("nan"), float("inf"), Decimal("NaN"), [3], b"3", "", "three", "3 or 4"])
def test_gold_that_is_no_number_is_none(value):
    assert exact(value) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 72, in total, so the farmer earns that much.", 72),
        ("It comes to $1,234.50", Decimal("1234.5")),
        ("the total cost of the order is $29.00.", 29),
        ("The total is 15, due on 2024-01-05", 15),
        ("In 2020, 72 people", 72),
        ("I have:\n- 5 apples", 5),
        ("3 boxes and 4 pens make 7\nThat is all.", 7),
        ("She walks 2 to 3 km", 3),
        ("答案是42。", 42),
    ],
)
def test_the_last_number_of_a_text(text, value):
    assert last_number(plain(text)) == exact(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "none", "(1,2)", "(1, 2)", "[1, 2]", "somewhere between 10-20", "due on 2024-01-05", "between 10 - 20", "at 5:30", "41 or 42",
        "41 dollars or 42 dollars", "41 or maybe 42", "1, 2, 3", "1; 2; 3", "40 + 2", "version 1.2.3",
    ],
)  # fmt: skip
def test_a_text_that_ends_in_no_number_or_in_guesses_has_none(text):
    assert last_number(text) is None


def test_text_is_data_and_never_evaluated():
    assert one_number("__import__('os').getpid()").number is None
    assert last_number("10**10**10") is None
