"""Errors: caught as ours or as the standard type, sent between processes, and helpful about a misspelt option."""

from __future__ import annotations

import inspect
import pickle

import pytest

from rlhf import errors

ERRORS = {
    "RLHFError": Exception,
    "ShapeError": ValueError,
    "ConfigError": ValueError,
    "DataError": ValueError,
    "RolloutError": ValueError,
    "StaleRolloutError": RuntimeError,
    "ModelError": ValueError,
    "EngineError": RuntimeError,
    "RewardError": RuntimeError,
    "MissingDependencyError": ImportError,
}


def test_the_table_of_this_file_is_complete() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == {*ERRORS, "RLHFWarning"}


@pytest.mark.parametrize(("name", "standard"), ERRORS.items())
def test_an_error_is_ours_and_the_standard_type(name: str, standard: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.RLHFError)
    assert issubclass(kind, standard)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_survives_pickling_with_its_type_and_message(name: str) -> None:
    error = getattr(errors, name)("mask must be bool, got float32")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "mask must be bool, got float32"


def test_the_warning_is_a_user_warning() -> None:
    assert issubclass(errors.RLHFWarning, UserWarning)


def test_an_unknown_option_is_answered_with_all_names_and_the_nearest() -> None:
    error = errors.unknown_option("aggregate", "token-means", ("token-mean", "constant"))
    assert isinstance(error, errors.ConfigError)
    assert str(error) == "aggregate must be one of 'token-mean', 'constant'; got 'token-means'; did you mean 'token-mean'?"


def test_an_unknown_option_far_from_every_name_gets_no_suggestion() -> None:
    assert str(errors.unknown_option("mode", "xyz", ("strict", "flexible"))) == "mode must be one of 'strict', 'flexible'; got 'xyz'"


def test_a_name_used_elsewhere_is_translated() -> None:
    error = errors.unknown_option("aggregate", "dapo", ("token-mean", "constant"), {"dapo": "token-mean"})
    assert str(error).endswith("got 'dapo'; did you mean 'token-mean'?")


def test_an_unknown_option_may_be_of_any_type() -> None:
    assert "got None" in str(errors.unknown_option("mode", None, ("strict",)))


def test_a_missing_package_is_named_with_its_extra() -> None:
    error = errors.missing_dependency("math_verify", "math", "MathVerify")
    assert isinstance(error, ImportError)
    assert str(error) == "MathVerify needs the package 'math_verify', which is not installed; run pip install 'rlhf[math]'"
