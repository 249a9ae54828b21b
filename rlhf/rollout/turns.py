"""Multi-turn episodes as rows to train on: the ids of every turn exactly as they were sampled, merged where contexts continue.

A chat template may rewrite the past (drop earlier thoughts, strip spaces). Ids can therefore only be joined where the next prompt repeats
the last context token for token; anywhere else the episode goes on in a further row, with the prompt that the policy really saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from rlhf.errors import RolloutError
from rlhf.rollout.batch import FinishReason, Rollout
from rlhf.rollout.ragged import id_tensor


@dataclass(frozen=True)
class Turn:
    """One call of the policy.

    Attributes:
        prompt_ids: the whole context that was sent, the turns before included.
        response_ids: what came back, the end token included if one was sampled; may be empty.
        logprobs: as many as response_ids; None where nobody computed them.
        weight_version: the weights that sampled this turn.
        reward: what the environment paid for this turn, None if nothing is known.
        finish_reason: why this turn ended.
    """

    prompt_ids: Sequence[int] | Tensor
    response_ids: Sequence[int] | Tensor
    logprobs: Sequence[float] | Tensor | None = None
    weight_version: int = 0
    reward: float | None = None
    finish_reason: FinishReason | str = FinishReason.STOP


def from_turns(
    episodes: Iterable[Sequence[Turn | tuple[Any, ...] | Mapping[str, Any]]],
    *,
    tokenizer: Any = None,
    temperature: float | Sequence[float] = 1.0,
    filtered: bool | Sequence[bool] = False,
    group: Sequence[int] | Tensor | None = None,
    rows: Sequence[dict[str, Any]] | None = None,
    finish_reasons: Sequence[FinishReason | str | None] | None = None,
    extras: Mapping[str, Sequence[Any] | Tensor] | None = None,
) -> Rollout:
    """Merge the turns of each episode token for token, and open a further row where they do not continue one another.

    If a turn's prompt begins with the whole context so far (prompt, response and what was merged into it), the ids that follow are
    tool output or user text: they join the response with mask False and log-probability 0, then come the sampled ids with mask True.
    Otherwise (a template that rewrites history, a retry, another agent's view) a further row begins with that turn's own prompt and the
    same `episode` and `group`. Only the last context is compared, never an older one.

    A turn with an empty response adds no tokens and opens no row; its reward and finish reason still count. An episode of such turns
    only is one row of length 0 with the first turn's prompt.

    Args:
        episodes: per episode its turns in order: `Turn`s, tuples (prompt_ids, response_ids, logprobs, weight_version[, reward]) or dicts
            of the same names.
        tokenizer: decodes texts, tool output included; without it they are empty.
        temperature: one number, or one for each episode; likewise `filtered`.
        group: one id for each episode; episodes of one prompt share it. By default every episode is a group of its own.
        rows: the dataset row of each episode.
        finish_reasons: how each episode ended (MAX_TURNS, say); it takes the place of the last row's reason. None keeps the last turn's.
            Earlier rows of an episode keep the reason of their own last turn.
        extras: anything else with one entry for each episode; every row of an episode gets it.

    Returns:
        Rollout: rows in the order they began. Its weight_version is the oldest of a row's turns. extras hold
        `turns` int64 [B], turns whose tokens are in the row; `weight_version_max` int64 [B], the newest of a row's turns; and, if
        any turn had a reward, `env_reward` float32 [B], the sum over the episode's turns (the same on all of its rows, NaN for an
        episode without any).

    Raises:
        RolloutError: an episode without turns, an empty prompt, log-probabilities of another count than the ids or on some turns only, a
            reward that is not finite, or a count that does not match the episodes.

    >>> first = Turn([1, 2], [3, 4], [-0.1, -0.2])
    >>> second = Turn([1, 2, 3, 4, 8, 9], [5], [-0.3])          # 8, 9: what the tool said
    >>> merged = from_turns([[first, second]])
    >>> merged.response_ids.tolist(), merged.response_mask.tolist()
    ([[3, 4, 8, 9, 5]], [[True, True, False, False, True]])
    """
    parsed = [[_parse(turn, f"episodes[{e}][{t}]") for t, turn in enumerate(turns)] for e, turns in enumerate(_listed_episodes(episodes))]
    count = len(parsed)
    for e, turns in enumerate(parsed):
        if not turns:
            raise RolloutError(
                f"episodes[{e}] must have at least one turn, got none; leave out episodes in which the policy was never called"
            )
    group_ids = list(range(count)) if group is None else [int(value) for value in _per_episode("group", group, count)]
    row_dicts = [{} for _ in parsed] if rows is None else _per_episode("rows", rows, count)
    reasons = [None] * count if finish_reasons is None else _per_episode("finish_reasons", finish_reasons, count)
    temperatures = [temperature] * count if isinstance(temperature, (int, float)) else _per_episode("temperature", temperature, count)
    filters = [filtered] * count if isinstance(filtered, bool) else _per_episode("filtered", filtered, count)

    merged = [_merge(turns) for turns in parsed]
    for spans, reason in zip(merged, reasons, strict=True):
        if reason is not None:
            spans[-1].finish_reason = reason
    owners = [e for e, spans in enumerate(merged) for _ in spans]
    spans = [span for episode_spans in merged for span in episode_spans]
    return Rollout.build(
        [span.prompt_ids for span in spans],
        [span.response_ids for span in spans],
        logprobs=[span.logprobs for span in spans] if _have_logprobs(parsed) else None,
        response_masks=[span.mask for span in spans],
        temperature=[temperatures[e] for e in owners],
        filtered=[filters[e] for e in owners],
        group=[group_ids[e] for e in owners],
        episode=owners,
        weight_version=[min(span.versions) for span in spans],
        finish_reasons=[span.finish_reason for span in spans],
        rows=[row_dicts[e] for e in owners],
        tokenizer=tokenizer,
        extras={
            **_repeated_extras(extras or {}, owners, count),
            **_environment_rewards(parsed, owners),
            "turns": torch.tensor([span.turns for span in spans], dtype=torch.int64),
            "weight_version_max": torch.tensor([max(span.versions) for span in spans], dtype=torch.int64),
        },
    )


@dataclass(frozen=True)
class _ParsedTurn:
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float] | None
    weight_version: int
    reward: float | None
    finish_reason: FinishReason | str


@dataclass
class _Span:
    """One row in the making."""

    prompt_ids: list[int]
    finish_reason: FinishReason | str
    response_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: int = 0

    def continued_by(self, prompt_ids: list[int]) -> list[int] | None:
        """The ids by which this prompt extends the context so far, or None if it does not begin with it."""
        context = self.prompt_ids + self.response_ids
        return prompt_ids[len(context) :] if prompt_ids[: len(context)] == context else None

    def append(self, ids: list[int], logprobs: list[float] | None, *, sampled: bool) -> None:
        self.response_ids += ids
        self.mask += [sampled] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


def _merge(turns: list[_ParsedTurn]) -> list[_Span]:
    spans: list[_Span] = []
    for turn in turns:
        if turn.response_ids:
            between = spans[-1].continued_by(turn.prompt_ids) if spans else None
            if between is None:
                spans.append(_Span(turn.prompt_ids, turn.finish_reason))
            else:
                spans[-1].append(between, None, sampled=False)
            spans[-1].append(turn.response_ids, turn.logprobs, sampled=True)
            spans[-1].versions.append(turn.weight_version)
            spans[-1].turns += 1
        if spans:
            spans[-1].finish_reason = turn.finish_reason
    if not spans:
        versions = [turn.weight_version for turn in turns]
        spans.append(_Span(turns[0].prompt_ids, turns[-1].finish_reason, versions=versions))
    return spans


def _listed_episodes(episodes: Any) -> list[Any]:
    if not isinstance(episodes, Iterable) or isinstance(episodes, (str, Mapping)):
        raise RolloutError(f"episodes must be a list of lists of turns, got {type(episodes).__name__}")
    listed = list(episodes)
    for e, turns in enumerate(listed):
        if not isinstance(turns, Iterable) or isinstance(turns, (str, Mapping)):
            raise RolloutError(f"episodes[{e}] must be a list of turns, got {type(turns).__name__}; put the turns of an episode in a list")
    return listed


_NAMES = tuple(item.name for item in fields(Turn))


def _parse(turn: object, where: str) -> _ParsedTurn:
    if isinstance(turn, Mapping):
        unknown = sorted(set(turn) - set(_NAMES))
        missing = sorted({"prompt_ids", "response_ids"} - set(turn))
        if unknown or missing:
            raise RolloutError(
                f"{where} must have the keys prompt_ids and response_ids, and none but {', '.join(_NAMES)}; got {', '.join(map(str, turn))}"
            )
        turn = Turn(**turn)
    elif isinstance(turn, (tuple, list)):
        if len(turn) not in (4, 5):
            raise RolloutError(f"{where} must be (prompt_ids, response_ids, logprobs, weight_version[, reward]), got {len(turn)} entries")
        turn = Turn(*turn)
    if not isinstance(turn, Turn):
        raise RolloutError(f"{where} must be a Turn, a tuple or a dict, got {type(turn).__name__}; an episode is a list of turns")
    prompt_ids, response_ids = (id_tensor(getattr(turn, name), f"{where}.{name}").tolist() for name in ("prompt_ids", "response_ids"))
    if not prompt_ids:
        raise RolloutError(f"{where}.prompt_ids must have at least one token, got none; send the whole context with every turn")
    logprobs = None if turn.logprobs is None else _listed(turn.logprobs, f"{where}.logprobs")
    if logprobs is not None and len(logprobs) != len(response_ids):
        raise RolloutError(
            f"{where}.logprobs must have {len(response_ids)} entries, one for each response id, got {len(logprobs)}; "
            "pair them as the engine returned them (is the end token counted once on both sides?)"
        )
    try:
        reward = None if turn.reward is None else float(turn.reward)
    except (TypeError, ValueError):
        raise RolloutError(f"{where}.reward must be a number, got {turn.reward!r:.80}; use None where nothing is known") from None
    if reward is not None and not math.isfinite(reward):
        raise RolloutError(f"{where}.reward must be finite, got {reward}; use None where nothing is known")
    if isinstance(turn.weight_version, bool) or not isinstance(turn.weight_version, int):
        raise RolloutError(f"{where}.weight_version must be an int (-1 if unknown), got {turn.weight_version!r}; the reward comes after it")
    return _ParsedTurn(prompt_ids, response_ids, logprobs, turn.weight_version, reward, turn.finish_reason)


def _listed(values: Any, where: str) -> list[Any]:
    """A flat list, tensor or array as a list."""
    entries = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(entries, (list, tuple)) or any(isinstance(entry, (list, tuple)) for entry in entries):
        raise RolloutError(f"{where} must be a flat list or a 1-D tensor, got {type(values).__name__}, nested or of another kind")
    return list(entries)


def _have_logprobs(parsed: list[list[_ParsedTurn]]) -> bool:
    places: dict[bool, str] = {}
    for e, turns in enumerate(parsed):
        for t, turn in enumerate(turns):
            if turn.response_ids:
                places.setdefault(turn.logprobs is not None, f"episodes[{e}][{t}]")
    if len(places) > 1:
        raise RolloutError(f"logprobs must be given for all turns or for none, got them at {places[True]} but not at {places[False]}")
    if places:
        return True in places
    return any(
        turn.logprobs is not None for turns in parsed for turn in turns
    )  # nothing was sampled: an empty list says that they are known


def _per_episode(name: str, values: Any, count: int) -> list[Any]:
    entries = _listed(values, name)
    if len(entries) != count:
        raise RolloutError(f"{name} must have one entry for each of the {count} episodes, got {len(entries)}")
    return entries


def _repeated_extras(extras: Mapping[str, Any], owners: list[int], count: int) -> dict[str, Any]:
    reserved = sorted({"env_reward", "turns", "weight_version_max"} & set(extras))
    if reserved:
        raise RolloutError(f"extras must not use the keys that from_turns sets itself, got {', '.join(reserved)}; rename them")
    result: dict[str, Any] = {}
    for name, values in extras.items():
        if len(values) != count:
            raise RolloutError(f"extras[{name!r}] must have one entry for each of the {count} episodes, got {len(values)}")
        result[name] = values[torch.tensor(owners, dtype=torch.int64)] if isinstance(values, Tensor) else [values[e] for e in owners]
    return result


def _environment_rewards(parsed: list[list[_ParsedTurn]], owners: list[int]) -> dict[str, Tensor]:
    known = [[turn.reward for turn in turns if turn.reward is not None] for turns in parsed]
    if not any(known):
        return {}
    sums = [math.fsum(rewards) if rewards else math.nan for rewards in known]
    return {"env_reward": torch.tensor([sums[e] for e in owners], dtype=torch.float32)}
