"""The one method that a user writes, and what is made of all it may return or raise."""

from __future__ import annotations

import inspect
import math
import sys
import traceback
import warnings
from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from rlhf.errors import ConfigError, RewardError, RLHFWarning, unknown_option
from rlhf.reward.rewards import Fault, Rewards, Status, last_rows, on_last_token, scalar
from rlhf.reward.sample import Sample, sample_of
from rlhf.rollout.batch import Rollout

if TYPE_CHECKING:
    from rlhf.reward.compose import WeightedSum

_POLICIES = ("record", "raise", "abstain")
_LARGEST = torch.finfo(torch.float32).max
OnError = str | float


class RewardFunction(ABC):  # noqa: B024  (either of two methods will do; __new__ says so)
    """Judges responses. Write `score`, or `score_group` if the judgement needs all responses to one prompt.

    A wrong or malformed *response* earns 0.0 (or whatever the reward says), status OK. A failure of the *reward* is never a score:

    | `score` gives | score | status |
    | --- | --- | --- |
    | a finite number (int, float, bool, or a numpy or torch scalar) | that number | OK |
    | a list with one finite number for each response token | its sum, the list in `token_scores` | OK |
    | None | NaN | ABSTAIN |
    | NaN, infinity, anything else, or an exception | NaN | ERROR, the reason in `rewards.errors`, one RLHFWarning a call |

    `on_error` says what a failure becomes: "record" (as above), "raise" (a RewardError), "abstain" (NaN, ABSTAIN) or a number (that
    score, OK). Failures are counted in `reward/error_rate` whatever it says. `score_group` gives a list with one such result for each
    sample of the group; another count raises whatever `on_error` says, for then no score belongs to any sample.

    Rows of one episode (a multi-turn context that forked) are judged once, by the sample of the episode's last row, and share that score.
    In `token_scores`, a row that was given one number only has it on its last token that counts.

    `name` (metrics, messages) and `on_error` are class attributes: a subclass may set them in its body, or leave `__init__` to this class
    and take them as keywords. A subclass with an `__init__` of its own need not call this one.

    >>> class Short(RewardFunction):
    ...     def score(self, sample):
    ...         return 1.0 if len(sample.response) < 10 else 0.0
    >>> rollout = Rollout.build([[1], [1]], [[2], [3]], texts=["42", "It is forty-two."])
    >>> (0.5 * Short())(rollout).scores.tolist()
    [0.5, 0.0]
    """

    name: str = "RewardFunction"
    on_error: OnError = "record"
    __array_ufunc__ = None  # numpy.float64(0.5) * reward is ours to answer

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def __new__(cls, *args: Any, **options: Any) -> RewardFunction:
        judges = (cls.score, cls.score_group)
        if judges == (RewardFunction.score, RewardFunction.score_group) and cls.__call__ is RewardFunction.__call__:
            raise TypeError(f"{cls.__name__} judges nothing: define score(self, sample), or score_group(self, samples)")
        if any(inspect.iscoroutinefunction(judge) for judge in judges):
            raise TypeError(f"{cls.__name__} has an async score, which is not awaited here; write a plain def")
        return super().__new__(cls)

    def __init__(self, *, name: str | None = None, on_error: OnError | None = None) -> None:
        if name is not None:
            self.name = name
        if on_error is not None:
            self.on_error = _checked_policy(on_error)

    def score(self, sample: Sample) -> float | list[float] | None:
        """The score of one response; a list with one entry for each of its tokens; or None to abstain."""
        raise NotImplementedError(f"{self.name} defines no score(self, sample)")

    def score_group(self, samples: list[Sample]) -> Sequence[float | list[float] | None]:
        """One result of the kinds `score` gives for each sample; they answer one prompt, in the order of the rollout."""
        return [self.score(sample) for sample in samples]

    def part_names(self) -> list[str]:
        """The names that `rewards.parts` will have; composites give each part a name of its own."""
        return [self.name]

    def check(self, rows: Iterable[Any]) -> None:  # noqa: B027  (most rewards can judge any row)
        """Raise a DataError if some of these rows or Prompts cannot be judged; call it before the first rollout."""

    def __call__(self, rollout: Rollout) -> Rewards:
        """Judge every row.

        Raises:
            RewardError: `score_group` gave another number of results than samples, or something failed under on_error="raise".
        """
        if not isinstance(rollout, Rollout):
            raise RewardError(f"{self.name} judges a Rollout, got {type(rollout).__name__}; for one Sample call .score(sample)")
        policy = _checked_policy(self.on_error)
        judged = last_rows(rollout.episode)
        samples = [sample_of(rollout, row) for row in judged]
        verdicts = [
            self._verdict(result, sample, row, policy)
            for result, sample, row in zip(self._results(samples, rollout.group[judged].tolist()), samples, judged, strict=True)
        ]
        self._warn(verdicts, judged, rollout)

        verdict_of = dict(zip(rollout.episode[judged].tolist(), range(len(judged)), strict=True))
        owner = [verdict_of[episode] for episode in rollout.episode.tolist()]
        rewards = Rewards(
            scores=torch.tensor([verdicts[i].score for i in owner], dtype=torch.float32),
            status=[verdicts[i].status for i in owner],
            faults=[verdicts[i].fault for i in owner],
            logged={
                name: [samples[i].logged.get(name) for i in owner]
                for name in dict.fromkeys(name for sample in samples for name in sample.logged)
            },
            episode=rollout.episode.clone(),
        )
        rewards.parts[self.name] = rewards.scores.clone()
        if any(verdict.tokens is not None for verdict in verdicts):
            rewards.token_scores = on_last_token(rewards.scores, rollout)
            for verdict, row in zip(verdicts, judged, strict=True):
                if verdict.tokens is not None:
                    rewards.token_scores[row] = 0.0
                    rewards.token_scores[row, : len(verdict.tokens)] = torch.tensor(verdict.tokens, dtype=torch.float32)
        return rewards

    def _results(self, samples: list[Sample], groups: list[int]) -> list[Any]:
        """What the user's method gives for each sample, a `_Failure` where it raised. Where samples are run is decided here alone."""
        if type(self).score_group is RewardFunction.score_group:
            return [_attempt(self.score, sample) for sample in samples]
        places: dict[int, list[int]] = {}
        for place, group in enumerate(groups):
            places.setdefault(group, []).append(place)
        results: list[Any] = [None] * len(samples)
        for members in places.values():
            found = _attempt(self.score_group, [samples[place] for place in members])
            if isinstance(found, _Failure):
                found = [found] * len(members)
            elif not isinstance(found, (list, tuple)) and getattr(found, "ndim", None) == 1:
                found = found.tolist()
            if not isinstance(found, (list, tuple)) or len(found) != len(members):
                got = f"{len(found)} results" if isinstance(found, (list, tuple)) else type(found).__name__
                raise RewardError(f"{self.name}.score_group must return a list of {len(members)} results, one for each sample; got {got}")
            for place, result in zip(members, found, strict=True):
                results[place] = result
        return results

    def _verdict(self, result: Any, sample: Sample, row: int, policy: OnError) -> _Verdict:
        if result is None:
            return _Verdict(Status.ABSTAIN, math.nan)
        error = None
        if isinstance(result, _Failure):
            reason, error = result.reason, result.error
        else:
            score, tokens, wrong = _read(result, len(sample.response_ids))
            if wrong is None:
                return _Verdict(Status.OK, score, tokens)
            reason = wrong
        fault = Fault(Status.ERROR, reason)
        if policy == "raise":
            raise RewardError(f"{self.name} failed on row {row}: {reason}") from error
        if policy == "record":
            return _Verdict(Status.ERROR, math.nan, fault=fault)
        if policy == "abstain":
            return _Verdict(Status.ABSTAIN, math.nan, fault=fault)
        return _Verdict(Status.OK, float(policy), fault=fault)

    def _warn(self, verdicts: list[_Verdict], judged: list[int], rollout: Rollout) -> None:
        failed = [(row, verdict.fault) for row, verdict in zip(judged, verdicts, strict=True) if verdict.fault is not None]
        if failed:
            row, fault = failed[0]
            uid = rollout.rows[row].get("uid")
            where = f"row {row}" if uid is None else f"row {row} (uid {uid})"
            warnings.warn(
                f"reward {self.name} failed on {len(failed)} of {len(judged)} samples; {where}: {fault.reason.splitlines()[0]}; "
                f"rewards.errors holds every reason, and on_error={self.on_error!r} decides what becomes of them",
                RLHFWarning,
                stacklevel=3,
            )

    def __add__(self, other: RewardFunction) -> WeightedSum:
        from rlhf.reward.compose import WeightedSum

        return WeightedSum([(1.0, self), (1.0, other)])

    def __radd__(self, other: object) -> RewardFunction:
        if isinstance(other, int) and other == 0:  # sum([...]) starts from 0
            return self
        raise ConfigError(f"only rewards can be added to {self.name}, got {other!r}; a constant added to every score changes no advantage")

    def __sub__(self, other: RewardFunction) -> WeightedSum:
        from rlhf.reward.compose import WeightedSum

        return WeightedSum([(1.0, self), (-1.0, other)])

    def __mul__(self, weight: float) -> WeightedSum:
        from rlhf.reward.compose import WeightedSum

        return WeightedSum([(weight, self)])

    __rmul__ = __mul__

    def __neg__(self) -> WeightedSum:
        return self * -1.0

    def __repr__(self) -> str:
        return f"{self.name}()"


class FunctionReward(RewardFunction):
    """A plain function `function(sample)` as a reward; `verifier` makes one."""

    def __init__(self, function: Callable[[Sample], Any], *, name: str | None = None, on_error: OnError | None = None) -> None:
        if not callable(function) or isinstance(function, RewardFunction):
            raise ConfigError(f"verifier takes a function of one Sample, got {type(function).__name__}")
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"verifier takes a plain function, got the async {function.__name__}, which is not awaited here")
        super().__init__(name=name or getattr(function, "__name__", type(function).__name__), on_error=on_error)
        self.function = function
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def score(self, sample: Sample) -> float | list[float] | None:
        return self.function(sample)

    def __reduce__(self) -> Any:
        qualname = getattr(self.function, "__qualname__", "")
        if getattr(sys.modules.get(self.__module__), qualname, None) is self:
            return qualname  # the decorator took the function's place, so it is found under the function's name
        return _restored, (self.function, self.name, self.on_error)


def _restored(function: Callable[[Sample], Any], name: str, on_error: OnError) -> FunctionReward:
    return FunctionReward(function, name=name, on_error=on_error)


@overload
def verifier(function: Callable[[Sample], Any]) -> FunctionReward: ...
@overload
def verifier(*, name: str | None = None, on_error: OnError | None = None) -> Callable[[Callable[[Sample], Any]], FunctionReward]: ...
def verifier(function: Callable[[Sample], Any] | None = None, *, name: str | None = None, on_error: OnError | None = None) -> Any:
    """Turn a plain function of one sample into a RewardFunction, with or without options.

    >>> @verifier
    ... def short(sample):
    ...     return len(sample.response) < 10
    >>> short.score(Sample("", "42")), short.name
    (True, 'short')
    """
    if function is None:
        return lambda decorated: FunctionReward(decorated, name=name, on_error=on_error)
    return FunctionReward(function, name=name, on_error=on_error)


class _Failure(NamedTuple):
    error: BaseException
    reason: str


class _Verdict(NamedTuple):
    status: Status
    score: float
    tokens: list[float] | None = None
    fault: Fault | None = None


def _attempt(method: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return method(argument)
    except (Exception, SystemExit) as error:  # a verifier that calls sys.exit must not end the run
        try:
            message = str(error)
        except Exception:
            message = "(its message cannot be printed)"
        return _Failure(error, f"{type(error).__name__}: {message}\n{''.join(traceback.format_exception(error))}")


def _read(result: Any, tokens: int) -> tuple[float, list[float] | None, str | None]:
    """(score, token scores, None), or (NaN, None, what is wrong)."""

    def wrong(reason: str) -> tuple[float, None, str]:
        return math.nan, None, reason

    if not isinstance(result, (list, tuple)):
        score = scalar(result)
        if score is None:
            advice = "; call .tolist() for a process reward" if hasattr(result, "tolist") else ""
            return wrong(f"score must be a number, None or a list of numbers, got {type(result).__name__}{advice}")
        if not abs(score) <= _LARGEST:
            return wrong(f"score must be finite in float32, got {score}")
        return score, None, None
    if len(result) != tokens:
        return wrong(f"a process reward must have one entry for each of the {tokens} response tokens, got {len(result)}")
    entries = [scalar(entry) for entry in result]
    for place, entry in enumerate(entries):
        if entry is None or not abs(entry) <= _LARGEST:
            return wrong(f"a process reward must be finite numbers, entry {place} is {result[place]!r:.80}")
    numbers = [entry for entry in entries if entry is not None]
    total = math.fsum(numbers)
    return (total, numbers, None) if abs(total) <= _LARGEST else wrong(f"score must be finite in float32, the entries sum to {total}")


def _checked_policy(policy: object) -> OnError:
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise unknown_option("on_error", policy, _POLICIES)
        return policy
    score = None if isinstance(policy, bool) else scalar(policy)
    if score is None or not abs(score) <= _LARGEST:
        raise ConfigError(f"on_error must be one of {', '.join(map(repr, _POLICIES))} or a finite score; got {policy!r}")
    return score
