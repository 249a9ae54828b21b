"""The ready-made loop: what it does in which order, what it writes down, and that every name it logs is in the glossary."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rlhf
from rlhf.errors import ConfigError
from rlhf.monitor import describe
from tests.models import char_tokenizer, tiny_model


class Wanted(rlhf.RewardFunction):
    """Share of the response's tokens that are the first character of the prompt."""

    def score(self, sample: rlhf.Sample) -> float:
        return sample.response.count(sample.prompt[0]) / max(1, len(sample.response_ids))


@pytest.fixture
def parts() -> dict[str, Any]:
    tokenizer = char_tokenizer()
    actor = rlhf.Actor(tiny_model("qwen2"), tokenizer, lr=1e-3)
    words = [symbol for symbol in tokenizer.get_vocab() if len(symbol) == 1][:4]
    dataset = rlhf.PromptDataset([{"prompt": a + b} for a in words for b in words], tokenizer)
    return {
        "actor": actor,
        "engine": rlhf.TransformersEngine(actor, seed=0),
        "loader": dataset.loader(prompts_per_step=4, seed=0, epochs=2),
        "reward": Wanted(),
        "estimator": rlhf.GRPO(),
        "sampling": rlhf.SamplingParams(n=4, max_new_tokens=6),
        "progress": False,
    }


def test_it_runs_until_the_loader_ends_and_counts_its_steps(parts: dict[str, Any]) -> None:
    loop = rlhf.OnPolicyLoop(**parts)
    assert len(loop.run()) == 8
    assert loop.steps == 8
    with pytest.warns(rlhf.RLHFWarning, match="handed out all"):
        assert loop.run(3) == []


def test_steps_of_two_runs_follow_each_other(parts: dict[str, Any]) -> None:
    loop = rlhf.OnPolicyLoop(**parts)
    first, second = loop.run(2), loop.run(3)
    assert [metrics["step"] for metrics in first + second] == [0, 1, 2, 3, 4]
    assert loop.history == first + second


def test_every_metric_is_in_the_glossary_and_the_file_holds_what_run_returned(parts: dict[str, Any], tmp_path: Path) -> None:
    critic = rlhf.Critic(copy.deepcopy(parts["actor"].model), lr=1e-3)
    parts |= {"critic": critic, "reference": parts["actor"].reference(), "kl": rlhf.KLPenalty(0.01), "estimator": rlhf.GAE()}
    evals = {"small": rlhf.EvalSet(["ab", "ba"], sampling=rlhf.SamplingParams(n=2, max_new_tokens=4))}
    loop = rlhf.OnPolicyLoop(**parts, evals=evals, eval_every=2, metrics_file=tmp_path / "metrics.jsonl", mini_batch_size=8)
    history = loop.run(3)
    names = {name for metrics in [*history, *loop.evaluations] for name in metrics}
    assert {name for name in names if describe(name) is None} == set()
    for name in ("time/rollout", "time/reward", "time/logprobs", "time/update", "time/sync", "throughput/tokens_per_second"):
        assert name in names
    for name in ("actor/entropy", "actor/clip_fraction", "actor/kl_old", "kl/reference_k3", "critic/explained_variance", "actor/grad_norm"):
        assert name in names
    assert [metrics["step"] for metrics in loop.evaluations] == [0, 2, 3]
    assert {"eval/small/mean", "eval/small/pass@1", "eval/small/pass@2", "time/eval"} <= set(loop.evaluations[0])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/mean"] for line in lines if "reward/mean" in line] == [metrics["reward/mean"] for metrics in history]
    assert [line for line in lines if "eval/small/mean" in line] == loop.evaluations


def test_warm_up_steps_train_the_critic_alone(parts: dict[str, Any]) -> None:
    critic = rlhf.Critic(copy.deepcopy(parts["actor"].model), lr=1e-3)
    before = [parameter.clone() for parameter in parts["actor"].model.parameters()]
    loop = rlhf.OnPolicyLoop(**parts | {"estimator": rlhf.GAE()}, critic=critic, critic_warmup=2)
    loop.run(2)
    assert all(torch.equal(a, b) for a, b in zip(before, parts["actor"].model.parameters(), strict=True))
    assert critic.weight_version == 2
    loop.run(1)
    assert parts["actor"].weight_version == 1


def test_an_engine_with_weights_of_its_own_is_synced_before_each_rollout(parts: dict[str, Any]) -> None:
    model = copy.deepcopy(parts["actor"].model)
    engine = rlhf.TransformersEngine(model, parts["actor"].tokenizer)
    rlhf.OnPolicyLoop(**parts | {"engine": engine}).run(3)
    assert engine.weight_version == 2  # the third step's update comes after its rollout
    assert parts["actor"].weight_version == 3


def test_a_scripted_engine_stands_in_and_sees_sync_before_generate(parts: dict[str, Any]) -> None:
    engine = rlhf.FakeEngine(parts["actor"].tokenizer, responses=["ab", "ba", "aa", "b"])
    rlhf.OnPolicyLoop(**parts | {"engine": engine}).run(2)
    assert [(call.method, call.weight_version) for call in engine.calls] == [("generate", 0), ("update_weights", 1), ("generate", 1)]


def test_any_callable_from_prompts_to_a_rollout_can_be_the_engine(parts: dict[str, Any]) -> None:
    engine, seen = parts["engine"], []

    def agent(prompts: list[Any]) -> rlhf.Rollout:
        seen.append(len(prompts))
        return engine.generate(prompts, rlhf.SamplingParams(n=2, max_new_tokens=3))

    assert rlhf.OnPolicyLoop(**parts | {"engine": agent}).run(1)[0]["rollout/rows"] == 8
    assert seen == [4]


def test_a_callable_cannot_be_asked_for_greedy_evaluations(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="samples as it likes"):
        rlhf.OnPolicyLoop(**parts | {"engine": lambda prompts: None, "evals": {"one": rlhf.EvalSet(["a"])}})
    with pytest.raises(ConfigError, match="engine must be a RolloutEngine or a callable"):
        rlhf.OnPolicyLoop(**parts | {"engine": None})


def test_the_losses_of_actor_and_critic_cannot_be_exchanged(parts: dict[str, Any]) -> None:
    critic = rlhf.Critic(copy.deepcopy(parts["actor"].model), lr=1e-3)
    rollout = parts["engine"].generate(["ab", "ba"], rlhf.SamplingParams(n=2, max_new_tokens=3))
    experience = rlhf.make_experience(rollout, parts["reward"](rollout), actor=parts["actor"], critic=critic).with_advantages(rlhf.GAE())
    with pytest.raises(ConfigError, match="for a Critic"):
        parts["actor"].update(experience, rlhf.ValueLoss())
    with pytest.raises(ConfigError, match="for an Actor"):
        critic.update(experience, rlhf.PolicyLoss())


def test_a_stale_rollout_is_refused_before_anything_is_trained(parts: dict[str, Any]) -> None:
    stored = parts["engine"].generate(["ab"], rlhf.SamplingParams(n=4, max_new_tokens=3))
    loop = rlhf.OnPolicyLoop(**parts | {"engine": lambda prompts: stored})
    loop.run(1)
    with pytest.raises(rlhf.StaleRolloutError, match=r"\[1\] optimiser steps old"):
        loop.run(1)
    assert parts["actor"].weight_version == 1


def test_a_sampler_is_told_the_results_of_each_step(parts: dict[str, Any]) -> None:
    class Listening(list):
        def update(self, rollout: rlhf.Rollout, rewards: rlhf.Rewards) -> None:
            told.append((len(rollout), len(rewards)))

    told: list[tuple[int, int]] = []
    batches = Listening([list(next(iter(parts["loader"])))])
    rlhf.OnPolicyLoop(**parts | {"loader": batches}).run()
    assert told == [(16, 16)]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"critic_warmup": 3}, "needs a critic"),
        ({"kl": rlhf.KLPenalty(0.1)}, "needs a reference"),
        ({"eval_every": 5}, "nothing to evaluate"),
        ({"eval_every": -1, "evals": {"one": rlhf.EvalSet(["a"])}}, "at least 0; got -1 and 0"),
        ({"eval_every": 5, "evals": [1]}, "evals must be a dict from name to EvalSet.*got list"),
        ({"estimator": rlhf.GAE()}, "GAE needs a critic"),
        ({"estimator": rlhf.GRPO}, r"the class GRPO; write GRPO\(\)"),
        ({"reward": None}, "reward must be an object that can be called; got None"),
        ({"loss": rlhf.PolicyLoss(kl_coef=0.1)}, "kl_coef of the loss needs a reference"),
        ({"kl": rlhf.KLPenalty(0.1), "reference": rlhf.FakeEngine()}, "GRPO reads one score a response, so kl= has no place"),
        ({"critic": object()}, "so critic= has no place to act; use GAE"),
        ({"sampling": None}, "sampling must be SamplingParams, got NoneType"),
        ({"sampling": rlhf.SamplingParams(temperature=0.0)}, "sampling has temperature 0"),
        ({"sampling": rlhf.SamplingParams(top_p=0.9)}, "or pass correction="),
    ],
)
def test_options_that_would_do_nothing_are_refused(parts: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rlhf.OnPolicyLoop(**parts | options)


@pytest.mark.parametrize("end_too", [False, True])
def test_no_pad_token_is_needed(parts: dict[str, Any], end_too: bool) -> None:
    """Ragged rows are padded inside, with ids that nobody reads; a tokenizer whose pad token is its end token is no trap either."""
    tokenizer = parts["actor"].tokenizer
    with_pad = rlhf.OnPolicyLoop(**parts).run(1)[0]
    tokenizer.pad_token = tokenizer.eos_token if end_too else None
    actor = rlhf.Actor(tiny_model("qwen2"), tokenizer, lr=1e-3)
    dataset = parts["loader"].dataset
    again = parts | {"actor": actor, "engine": rlhf.TransformersEngine(actor, seed=0), "loader": dataset.loader(4, seed=0, epochs=2)}
    without = rlhf.OnPolicyLoop(**again).run(1)[0]
    assert [without[name] == with_pad[name] for name in ("reward/mean", "actor/grad_norm", "rollout/response_length")] == [True] * 3


def test_a_dataset_is_no_loader(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"pass prompts\.loader\(prompts_per_step=128\)"):
        rlhf.OnPolicyLoop(**parts | {"loader": parts["loader"].dataset})


def test_the_bar_knows_how_many_steps_there_will_be_and_the_repr_stays_short(parts: dict[str, Any]) -> None:
    loop = rlhf.OnPolicyLoop(**parts)
    assert [loop._expected(steps) for steps in (None, 3, 99)] == [8, 3, 8]
    loop.run(2)
    assert loop._expected(None) == 6
    assert "reward/mean" not in repr(loop)
    endless = rlhf.OnPolicyLoop(**parts | {"loader": parts["loader"].dataset.loader(4, epochs=None)})
    assert [endless._expected(steps) for steps in (None, 5)] == [None, 5]


def test_a_reward_that_fails_on_one_sample_is_counted_and_the_run_goes_on(parts: dict[str, Any]) -> None:
    class Fragile(rlhf.RewardFunction):
        calls = 0

        def score(self, sample: rlhf.Sample) -> float:
            Fragile.calls += 1
            if Fragile.calls == 3:
                raise ValueError("cannot judge this one")
            return float(len(sample.response) % 2)

    with pytest.warns(rlhf.RLHFWarning, match="cannot judge"):
        metrics = rlhf.OnPolicyLoop(**parts | {"reward": Fragile()}).run(1)[0]
    assert metrics["reward/error_rate"] == pytest.approx(1 / 16)
    assert metrics["experience/trained_tokens"] < metrics["rollout/response_tokens"]
