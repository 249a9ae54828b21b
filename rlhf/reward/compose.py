"""Rewards made of rewards: weighted sums, and one reward for each source of data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rlhf.errors import ConfigError, DataError, RewardError
from rlhf.reward.function import RewardFunction
from rlhf.reward.rewards import Fault, Rewards, Status, on_last_token, scalar
from rlhf.reward.sample import rows_of
from rlhf.rollout.batch import Rollout


class WeightedSum(RewardFunction):
    """`0.9 * A() + 0.1 * B()`: every part judges every row, and its own unweighted scores are kept in `rewards.parts`.

    A part that abstains drops out of its row's sum, the other weights staying as they are; a part with ERROR or TIMEOUT makes the
    sum so; if all abstain the sum does. A weight of 0 watches a part without paying it. Token scores add; beside them, a part
    without token scores puts its weighted score on the row's last token that counts.

    A sum of sums is one sum. Parts are not changed, so one may stand in several sums; `on_error` is each part's own.
    Keep the weight of correctness dominant: with 0.9 and 0.1, a well-formed wrong answer (0.1) earns less than a badly formed
    right one (0.9).

    Attributes:
        terms: (weight, part) pairs, sums among them flattened.

    Raises:
        ConfigError: no terms, a weight is not a finite number, or a part is no reward.
    """

    terms: tuple[tuple[float, RewardFunction], ...]

    def __init__(self, terms: Iterable[tuple[float, RewardFunction]]) -> None:
        flat: list[tuple[float, RewardFunction]] = []
        for factor, part in terms:
            if not isinstance(part, RewardFunction):
                raise ConfigError(
                    f"a sum of rewards takes rewards, got {part!r:.80}; wrap a function with @verifier, and leave out constants, "
                    "which change no advantage"
                )
            weight = None if isinstance(factor, bool) else scalar(factor)
            if weight is None or not math.isfinite(weight):
                raise ConfigError(f"the weight of {part.name} must be a finite number, got {factor!r:.80}")
            inner = part.terms if isinstance(part, WeightedSum) else ((1.0, part),)
            flat += [(weight * inner_weight, reward) for inner_weight, reward in inner]
        if not flat:
            raise ConfigError("a sum of rewards needs at least one, got none")
        self.terms = tuple(flat)
        self.name = " + ".join(f"{weight:g}*{part.name}" for weight, part in self.terms)

    def part_names(self) -> list[str]:
        return [name for names in _named_apart([part for _, part in self.terms]) for name in names.values()]

    def check(self, rows: Iterable[Any]) -> None:
        rows = list(rows_of(rows))
        for _, part in self.terms:
            part.check(rows)

    def __call__(self, rollout: Rollout) -> Rewards:
        judged = [(weight, part(rollout)) for weight, part in self.terms]
        status = [_combined(statuses) for statuses in zip(*(rewards.status for _, rewards in judged), strict=True)]
        ok = torch.tensor([state is Status.OK for state in status], dtype=torch.bool)
        total = torch.zeros(len(rollout), dtype=torch.float64)
        for weight, rewards in judged:
            total += weight * rewards.scores.double().nan_to_num(nan=0.0)
        token_scores = None
        if any(rewards.token_scores is not None for _, rewards in judged):
            token_scores = torch.zeros(rollout.response_ids.shape, dtype=torch.float32)
            for weight, rewards in judged:
                tokens = on_last_token(rewards.scores, rollout) if rewards.token_scores is None else rewards.token_scores
                token_scores += weight * tokens
            token_scores[~ok] = 0.0
        parts: dict[str, torch.Tensor] = {}
        logged: dict[str, list[Any]] = {}
        for names, (_, rewards) in zip(_named_apart([part for _, part in self.terms]), judged, strict=True):
            for name, scores in rewards.parts.items():
                parts[names.get(name) or _unique(name, parts)] = scores
            for name, values in rewards.logged.items():
                logged[_unique(name, logged)] = values
        return Rewards(
            scores=total.masked_fill(~ok, math.nan).float(),
            status=status,
            parts=parts,
            token_scores=token_scores,
            faults=[_joined(faults) for faults in zip(*(rewards.faults for _, rewards in judged), strict=True)],
            logged=logged,
            episode=rollout.episode.clone(),
        )

    def __repr__(self) -> str:
        return " + ".join(f"{weight:g} * {part!r}" for weight, part in self.terms)


class Router(RewardFunction):
    """One reward for each source of data, chosen by the row's `data_source`.

    Rows of the same source (rows of one prompt, so whole groups and episodes) are judged together, and sources that share one reward
    object are too. Scores pass through as they are: rewards of unlike range (0/1 beside -1/+1) never meet within one prompt's group, but
    they do where advantages are whitened over the batch (GAE), so scale them there: `Router({"a": A(), "b": 0.5 * B()})`.

    Args:
        routes: source → reward.
        default: judges all other sources; without one they raise, in `check` and in a call.
        key: the row's key that names the source.
        name: its name in messages.

    Raises:
        ConfigError: no routes, or one that is no reward.
        DataError: from `check` or a call, a row's source is unknown; the message lists the known ones.
    """

    def __init__(
        self,
        routes: Mapping[str, RewardFunction],
        default: RewardFunction | None = None,
        *,
        key: str = "data_source",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.routes = dict(routes)
        self.default = default
        self.key = key
        if not self.routes:
            raise ConfigError("Router needs at least one route, such as {'openai/gsm8k': GSM8K()}; got none")
        for source, reward in [*self.routes.items(), ("default", default)]:
            if not isinstance(reward, RewardFunction) and not (source == "default" and reward is None):
                raise ConfigError(f"the route {source!r} must be a reward, got {reward!r:.80}; wrap a function with @verifier")

    def part_names(self) -> list[str]:
        return [name for names in _named_apart(self._rewards()) for name in names.values()]

    def _rewards(self) -> list[RewardFunction]:
        """Each reward object once, in the order of the routes."""
        rewards = [*self.routes.values(), *([] if self.default is None else [self.default])]
        return list({id(reward): reward for reward in rewards}.values())

    def check(self, rows: Iterable[Any]) -> None:
        """Raise a DataError if a source is unknown or if its reward cannot judge one of its rows."""
        rows = list(rows_of(rows))
        for reward, members in self._by_reward(rows):
            reward.check(rows[row] for row in members)

    def __call__(self, rollout: Rollout) -> Rewards:
        if not isinstance(rollout, Rollout):
            raise RewardError(f"{self.name} judges a Rollout, got {type(rollout).__name__}")
        judged: list[Rewards] = []
        order: list[int] = []
        rewards_used = self._rewards()
        names_of = dict(zip(map(id, rewards_used), _named_apart(rewards_used), strict=True))
        routed = self._by_reward(rollout.rows)
        results = [reward(rollout.select(members)) for reward, members in routed]
        with_tokens = any(rewards.token_scores is not None for rewards in results)
        for (reward, members), rewards in zip(routed, results, strict=True):
            tokens = rewards.token_scores
            if with_tokens and tokens is None:
                tokens = on_last_token(rewards.scores, rollout.select(members))
            parts = {names_of[id(reward)].get(name, name): scores for name, scores in rewards.parts.items()}
            judged.append(replace(rewards, parts=parts, token_scores=tokens))
            order += members
        if not judged:
            return Rewards(torch.zeros(0), [], episode=rollout.episode.clone())
        joined = Rewards.concat(judged).select(torch.tensor(order).argsort())
        joined.episode = rollout.episode.clone()
        return joined

    def _by_reward(self, rows: Iterable[Mapping[str, Any]]) -> list[tuple[RewardFunction, list[int]]]:
        """Each reward object with the rows it judges."""
        members: dict[int, tuple[RewardFunction, list[int]]] = {}
        unknown: dict[str, list[int]] = {}
        for row, data in enumerate(rows):
            source = data.get(self.key)
            reward = self.routes.get(source, self.default) if isinstance(source, str) else self.default
            if reward is None:
                unknown.setdefault(repr(source), []).append(row)
            else:
                members.setdefault(id(reward), (reward, []))[1].append(row)
        if unknown:
            listed = ", ".join(f"{source} ({len(found)} rows, first row {found[0]})" for source, found in list(unknown.items())[:5])
            raise DataError(
                f"{self.name} has no reward for {self.key} {listed}; known sources: {', '.join(map(repr, self.routes))}; "
                "add a route or pass default="
            )
        return list(members.values())

    def __repr__(self) -> str:
        routes = ", ".join(f"{source!r}: {reward!r}" for source, reward in self.routes.items())
        return f"{self.name}({{{routes}}}{'' if self.default is None else f', default={self.default!r}'})"


def _combined(statuses: tuple[Status, ...]) -> Status:
    for status in (Status.ERROR, Status.TIMEOUT, Status.OK):
        if status in statuses:
            return status
    return Status.ABSTAIN


def _joined(faults: tuple[Fault | None, ...]) -> Fault | None:
    """The faults of one row's parts as one, of the kind that the sum's status has."""
    known = [fault for fault in faults if fault is not None]
    if not known:
        return None
    kind = Status.ERROR if any(fault.kind is Status.ERROR for fault in known) else Status.TIMEOUT
    return Fault(kind, "\n".join(fault.reason for fault in known))


def _named_apart(rewards: list[RewardFunction]) -> list[dict[str, str]]:
    """For each reward, its part names and the names they get beside the others'. Known before a call, so no batch renames a metric."""
    taken: dict[str, None] = {}
    result = []
    for reward in rewards:
        names = {}
        for name in reward.part_names():
            names[name] = _unique(name, taken)
            taken[names[name]] = None
        result.append(names)
    return result


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """The name, or `name_2`, `name_3`, … if it is taken."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
