"""Sampling options are checked when they are made, not when a run is a day old."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import pytest

from rlhf.errors import ConfigError
from rlhf.rollout import SamplingParams


def test_the_signature_and_defaults_are_those_of_the_design() -> None:
    parameters = inspect.signature(SamplingParams).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "n": 1,
        "max_new_tokens": 128,
        "min_new_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "stop": (),
        "stop_token_ids": (),
        "seed": None,
    }


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n": 0}, "n must be 1 or above, got 0"),
        ({"n": 2.0}, "n must be an integer, got 2.0 of type float"),
        ({"n": True}, "n must be an integer, got True"),
        ({"n": None}, "n must be an integer, got None"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or above, got 0"),
        ({"max_new_tokens": "64"}, "max_new_tokens must be an integer, got '64'"),
        ({"min_new_tokens": -1}, "min_new_tokens must be 0 or above, got -1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens must be at most max_new_tokens=8, got 9"),
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or above, got -0.1"),
        ({"temperature": math.inf}, "temperature must be a finite number, got inf"),
        ({"temperature": math.nan}, "temperature must be a finite number, got nan"),
        ({"temperature": "1"}, "temperature must be a finite number, got '1'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"temperature": True}, "temperature must be a finite number, got True"),
        ({"top_p": 0.0}, r"top_p must be above 0 and at most 1 \(which keeps all tokens\), got 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p must be a finite number"),
        ({"top_k": 0}, "top_k must be 1 or above, or -1 to keep all tokens, got 0"),
        ({"top_k": -2}, "top_k must be 1 or above, or -1"),
        ({"top_k": None}, "top_k must be an integer"),
        ({"min_p": -0.1}, "min_p must be 0"),
        ({"min_p": 1.0}, "min_p must be 0"),
        ({"stop": ""}, "stop must be a non-empty text or a list of them, got ''"),
        ({"stop": ["a", ""]}, "stop must be a non-empty text"),
        ({"stop": ["a", 3]}, "stop must be a non-empty text"),
        ({"stop": 3}, "stop must be a non-empty text"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids must be token ids of 0 and above, got \(-1,\)"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids must be an integer, got '</s>'"),
        ({"stop_token_ids": "</s>"}, "stop_token_ids must be an integer, got '</s>'"),
        ({"seed": -1}, "seed must be 0 or above, or None for fresh randomness, got -1"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options, name, stored",
    [
        ({"stop": "</answer>"}, "stop", ("</answer>",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": [7, 9]}, "stop_token_ids", (7, 9)),
        ({"stop_token_ids": np.array([7])}, "stop_token_ids", (7,)),
        ({"stop_token_ids": 7}, "stop_token_ids", (7,)),
        ({"stop_token_ids": None}, "stop_token_ids", ()),
        ({"temperature": 1}, "temperature", 1.0),
        ({"n": np.int64(4)}, "n", 4),
        ({"seed": 0}, "seed", 0),
        ({"min_new_tokens": 8, "max_new_tokens": 8}, "min_new_tokens", 8),
        ({"top_p": 1}, "top_p", 1.0),
        ({"min_p": 0.999}, "min_p", 0.999),
    ],
)
def test_options_are_stored_in_one_form(options: dict[str, Any], name: str, stored: Any) -> None:
    value = getattr(SamplingParams(**options), name)
    assert value == stored
    assert type(value) is type(stored)


@pytest.mark.parametrize(
    "options, filtered",
    [
        ({}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 1}, True),
        ({"min_p": 0.05}, True),
        ({"temperature": 0.6}, False),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, False),
        ({"min_new_tokens": 4}, False),
        ({"stop": "x", "stop_token_ids": [3]}, False),
    ],
    ids=["defaults", "top-p", "top-k", "min-p", "temperature", "greedy", "min_new_tokens", "stops"],
)
def test_filtered_says_whether_tokens_were_kept_out(options: dict[str, Any], filtered: bool) -> None:
    assert SamplingParams(**options).filtered is filtered


def test_options_cannot_be_changed_only_replaced() -> None:
    sampling = SamplingParams(n=2, stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.n = 3
    changed = sampling.replace(n=3)
    assert (sampling.n, changed.n, changed.stop) == (2, 3, ("x",))
    assert hash(changed) == hash(SamplingParams(n=3, stop=["x"]))


def test_replacing_checks_again() -> None:
    with pytest.raises(ConfigError, match="min_new_tokens must be at most max_new_tokens=2"):
        SamplingParams(min_new_tokens=4).replace(max_new_tokens=2)


def test_a_name_from_another_library_is_translated() -> None:
    with pytest.raises(ConfigError, match="got 'max_tokens'; did you mean 'max_new_tokens'"):
        SamplingParams().replace(max_tokens=4)
