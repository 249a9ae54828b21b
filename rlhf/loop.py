"""The loop of the README, ready-made. It uses public objects only: copy it to start your own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from rlhf.data import PromptDataset
from rlhf.errors import ConfigError
from rlhf.learner import Loss
from rlhf.monitor import EvalSet, MetricsFile, combine_processes
from rlhf.parallel import gather_objects, is_main_process
from rlhf.ppo import GAE, Actor, Critic, KLPenalty, PolicyLoss, ValueLoss, make_experience
from rlhf.ppo.experience import Correction, Estimator, ScoresTokens
from rlhf.reward.rewards import Rewards
from rlhf.rollout.batch import Rollout
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.sampling import SamplingParams, check_sampling


@dataclass
class OnPolicyLoop:
    """Sample, judge, estimate, update; evaluate every so often; write down what happened.

    Attributes:
        engine: a RolloutEngine, or any callable `prompts -> Rollout` (an agent, stored data).
        loader: yields lists of prompts, as `PromptDataset.loader(...)` does.
        reward: `rollout -> Rewards`.
        actor: the policy.
        estimator: `GAE(...)`, `GRPO(...)`, ...
        sampling: how to sample the training rollouts.
        critic: for GAE.
        reference: anything with `logprobs(rollout)`; needed for a KL penalty or KL in the loss.
        kl: penalty in the reward.
        loss, value_loss: what actor and critic minimise.
        epochs: passes over each experience.
        mini_batch_size: responses per optimiser step; all of them if None.
        critic_warmup: first steps that train the critic alone.
        old_logprobs, correction, max_staleness: see `make_experience`.
        evals: named sets.
        eval_every: steps between evaluations, the first before any step and the last after all of them; 0 for none.
        metrics_file: JSON lines under the names of docs/metrics.md, one for each step and one for each evaluation.
        progress: show a bar.
        steps: how many steps have been made.
        history: the metrics of each step of this process.
        evaluations: the metrics of each evaluation; "step" says after how many steps.
    """

    engine: RolloutEngine | Callable[[list[Any]], Rollout]
    loader: Iterable[list[Any]]
    reward: Callable[[Rollout], Rewards]
    actor: Actor
    estimator: Estimator
    sampling: SamplingParams
    critic: Critic | None = None
    reference: ScoresTokens | None = None
    kl: KLPenalty | None = None
    loss: Loss = field(default_factory=PolicyLoss)
    value_loss: Loss = field(default_factory=ValueLoss)
    epochs: int = 1
    mini_batch_size: int | None = None
    critic_warmup: int = 0
    old_logprobs: str = "actor"
    correction: Correction | None = None
    max_staleness: int | None = 0
    evals: Mapping[str, EvalSet] = field(default_factory=dict)
    eval_every: int = 0
    metrics_file: str | Path | None = None
    progress: bool = True
    steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list, repr=False)
    evaluations: list[dict[str, float]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.critic_warmup and self.critic is None:
            raise ConfigError(f"critic_warmup={self.critic_warmup} needs a critic; pass critic= or leave it out")
        if self.kl is not None and self.reference is None:
            raise ConfigError("kl= needs a reference; pass reference=actor.reference()")
        if self.eval_every and not self.evals:
            raise ConfigError(f"eval_every={self.eval_every} has nothing to evaluate; pass evals={{'name': EvalSet(...)}}")
        self._check_parts()
        self._file = MetricsFile(self.metrics_file) if self.metrics_file is not None and is_main_process() else None

    def _check_parts(self) -> None:
        """Say before the first rollout what would fail, or do nothing, after it."""
        name = type(self.estimator).__name__
        if isinstance(self.loader, PromptDataset):
            raise ConfigError("loader must yield batches, got a PromptDataset; pass prompts.loader(prompts_per_step=128)")
        for part, value in (("reward", self.reward), ("estimator", self.estimator), ("loss", self.loss), ("value_loss", self.value_loss)):
            if isinstance(value, type) or not callable(value):
                got = f"the class {value.__name__}; write {value.__name__}()" if isinstance(value, type) else f"{value!r:.80}"
                raise ConfigError(f"{part} must be an object that can be called; got {got}")
        if not isinstance(self.evals, Mapping) or not all(isinstance(each, EvalSet) for each in self.evals.values()):
            raise ConfigError(f"evals must be a dict from name to EvalSet, {{'name': EvalSet(prompts)}}; got {type(self.evals).__name__}")
        if isinstance(self.estimator, GAE) and self.critic is None:
            raise ConfigError("GAE needs a critic; pass critic=, or an estimator that does without, such as GRPO()")
        if getattr(self.estimator, "reads", None) == "scores" and (self.kl is not None or self.critic is not None):
            used, advice = ("kl=", "PolicyLoss(kl_coef=...)") if self.kl is not None else ("critic=", "GAE(), or leave critic= out")
            raise ConfigError(f"{name} reads one score a response, so {used} has no place to act; use {advice}")
        if getattr(self.loss, "kl_coef", 0) and self.reference is None:
            raise ConfigError("kl_coef of the loss needs a reference; pass reference=actor.reference()")
        if self.eval_every < 0 or self.critic_warmup < 0:
            raise ConfigError(f"eval_every and critic_warmup must be at least 0; got {self.eval_every} and {self.critic_warmup}")
        if not isinstance(self.engine, RolloutEngine):
            if not callable(self.engine):
                raise ConfigError(f"engine must be a RolloutEngine or a callable, prompts -> Rollout; got {type(self.engine).__name__}")
            if self.evals:
                raise ConfigError("a callable engine samples as it likes, so evals= cannot be sampled as they ask; pass a RolloutEngine")
            return
        check_sampling(self.sampling)
        if self.sampling.temperature == 0:
            raise ConfigError("sampling has temperature 0, and greedy responses cannot be trained on; use SamplingParams(temperature=1.0)")
        if self.sampling.filtered and self.correction is None:
            raise ConfigError("sampling filters by top-p, top-k or min-p, which training cannot see; leave them out, or pass correction=")

    def run(self, steps: int | None = None) -> list[dict[str, float]]:
        """Make `steps` further steps, or as many as the loader has batches for; returns their metrics."""
        first = len(self.history)
        batches = iter(self.loader)
        with tqdm(total=self._expected(steps), desc="train", unit="step", disable=not (self.progress and is_main_process())) as bar:
            while steps is None or len(self.history) - first < steps:
                if self.eval_every and self.steps % self.eval_every == 0:
                    self._record_evaluation()
                batch = next(batches, None)
                if batch is None:
                    break
                self._record(self.step(batch), bar)
            if self.eval_every:
                self._record_evaluation()
        return self.history[first:]

    def _expected(self, steps: int | None) -> int | None:
        """How many steps a run will make, for the bar; None where the loader does not say."""
        try:
            left: int | None = len(self.loader) - getattr(self.loader, "batches", 0)  # type: ignore[arg-type]
        except TypeError:
            left = None
        return left if steps is None else steps if left is None else min(steps, left)

    def step(self, batch: list[Any]) -> dict[str, float]:
        """One step on a batch of prompts; returns its metrics."""
        clock = _Clock()
        if self.steps == 0:
            self._say_units(batch)
        with clock("sync"):
            if isinstance(self.engine, RolloutEngine):
                self.engine.sync(self.actor)
        with clock("rollout"):
            rollout = self._generate(batch, self.sampling)
        with clock("reward"):
            rewards = self.reward(rollout)
        with clock("logprobs"):
            experience = make_experience(
                rollout,
                rewards,
                actor=self.actor,
                reference=self.reference,
                critic=self.critic,
                old_logprobs=self.old_logprobs,
                correction=self.correction,
                max_staleness=self.max_staleness,
            ).with_advantages(self.estimator, kl=self.kl)
        metrics = {"step": float(self.steps)} | rollout.metrics() | rewards.metrics() | experience.metrics()
        with clock("update"):
            if self.steps >= self.critic_warmup:
                metrics |= self.actor.update(experience, self.loss, epochs=self.epochs, mini_batch_size=self.mini_batch_size)
            if self.critic is not None:
                metrics |= self.critic.update(experience, self.value_loss, epochs=self.epochs, mini_batch_size=self.mini_batch_size)
        if hasattr(self.loader, "update"):
            self.loader.update(rollout, rewards)
        self.steps += 1
        metrics = combine_processes(metrics | clock.metrics())
        metrics["throughput/tokens_per_second"] = metrics["rollout/response_tokens"] / max(metrics["time/step"], 1e-9)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Score the policy on every named set: "eval/<name>/mean", "eval/<name>/pass@k", ..."""
        start = time.perf_counter()
        if isinstance(self.engine, RolloutEngine):
            self.engine.sync(self.actor)
        metrics = {
            f"eval/{name}/{metric}": value
            for name, evaluation in self.evals.items()
            for metric, value in evaluation.run(self._generate, self.reward).items()
        }
        return metrics | {"time/eval": time.perf_counter() - start}

    def _generate(self, prompts: list[Any], sampling: SamplingParams) -> Rollout:
        if isinstance(self.engine, RolloutEngine):
            return self.engine.generate(prompts, sampling, weights=self.actor)
        return self.engine(prompts)

    def _record_evaluation(self) -> None:
        """Evaluate and write it down, unless that was done after this very step."""
        if self.evaluations and self.evaluations[-1]["step"] == self.steps:
            return
        self.evaluations.append({"step": float(self.steps)} | self.evaluate())
        if self._file is not None:
            self._file.write(self.evaluations[-1])

    def _record(self, metrics: dict[str, float], bar: Any) -> None:
        self.history.append(metrics)
        if self._file is not None:
            self._file.write(metrics)
        shown = {"reward": "reward/mean", "kl": "kl/reference_k3", "length": "rollout/response_length"}
        bar.set_postfix({label: f"{metrics[name]:.3g}" for label, name in shown.items() if name in metrics}, refresh=False)
        bar.update()

    def _say_units(self, batch: list[Any]) -> None:
        prompts = sum(gather_objects(len(batch)))
        if not self.progress or not is_main_process():
            return
        responses = prompts * self.sampling.n
        size = self.mini_batch_size or responses
        tqdm.write(
            f"a step: {prompts} prompts × {self.sampling.n} = {responses} responses; mini-batches of {size} responses, "
            f"{self.epochs * -(-responses // size)} optimiser steps"
        )


class _Clock:
    """Wall seconds by phase and of the whole step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._phases[f"time/{phase}"] = time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return self._phases | {"time/step": time.perf_counter() - self._start}
