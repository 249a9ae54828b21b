"""The errors of rlhf: every one is an `RLHFError` and the standard type that Python programmers expect.

A message says what was expected, what came and what to do about it. The exceptions hold nothing but that message, so they
survive pickling and cross process boundaries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class RLHFError(Exception):
    """Base of all errors raised on purpose by this library."""


class ShapeError(RLHFError, ValueError):
    """A tensor has the wrong shape, dtype or device."""


class ConfigError(RLHFError, ValueError):
    """Options that are unknown, out of range, or contradict each other."""


class DataError(RLHFError, ValueError):
    """A data file or row cannot be used; the message names the row and the key."""


class RolloutError(RLHFError, ValueError):
    """Parts of a rollout do not fit together (ids, log-probabilities, masks, turns)."""


class StaleRolloutError(RLHFError, RuntimeError):
    """Rows were sampled by other weights than those about to be trained, and no correction was asked for."""


class ModelError(RLHFError, ValueError):
    """A model or tokenizer cannot be loaded or cannot do what is asked of it."""


class EngineError(RLHFError, RuntimeError):
    """Generation failed or the engine is not in a state to generate."""


class RewardError(RLHFError, RuntimeError):
    """A reward function broke its contract (wrong count, not a number, raised)."""


class MissingDependencyError(RLHFError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class RLHFWarning(UserWarning):
    """Something works but probably not as intended; the text says what to do."""


def unknown_option(argument: str, got: object, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> ConfigError:
    """The error for a name that is not among the known ones, with the nearest known name as a suggestion.

    Args:
        argument: name of the argument, as the user wrote it.
        got: what came.
        known: the names that are accepted.
        aliases: names used elsewhere (verl, TRL) and ours for the same thing.
    """
    names = list(known)
    suggestion = (aliases or {}).get(str(got)) or next(iter(difflib.get_close_matches(str(got), names, n=1)), None)
    hint = f"; did you mean {suggestion!r}?" if suggestion else ""
    return ConfigError(f"{argument} must be one of {', '.join(map(repr, names))}; got {got!r}{hint}")


def missing_dependency(package: str, extra: str, purpose: str) -> MissingDependencyError:
    """The error for an optional package that is not installed, naming the extra that brings it."""
    return MissingDependencyError(f"{purpose} needs the package {package!r}, which is not installed; run pip install 'rlhf[{extra}]'")
