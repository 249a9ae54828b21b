"""Supervised fine-tuning: responses are learned, prompts are not, and an answer ends."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf import (
    Actor,
    ConfigError,
    DataError,
    Rollout,
    SamplingParams,
    SupervisedLoss,
    TransformersEngine,
    supervised_experience,
    train_supervised,
)
from rlhf.ppo import Experience
from tests.batches import plain_statistics, ragged_rollout
from tests.models import EOS, char_tokenizer, tiny_model


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_response_tokens():
    actor, rollout = Actor(tiny_model("qwen2"), micro_batch_tokens=30), ragged_rollout()
    metrics = actor.forward_backward(Experience(rollout=rollout), SupervisedLoss())
    logprobs = plain_statistics(actor.model, rollout)[0].detach()
    expected = -float(logprobs[rollout.response_mask].mean())
    assert metrics["actor/loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["actor/nll"] == pytest.approx(expected, abs=1e-5)


def test_a_sequence_mean_weighs_rows_alike():
    actor, rollout = Actor(tiny_model("qwen2")), ragged_rollout(tools=False)
    logprobs = plain_statistics(actor.model, rollout)[0].detach()
    loss = actor.forward_backward(Experience(rollout=rollout), SupervisedLoss("sequence-mean"))["actor/loss"]
    assert loss == pytest.approx(-float((logprobs.sum(1) / rollout.lengths).mean()), abs=1e-5)


def test_the_prompt_is_read_but_not_learned():
    """Targets: the two response tokens and the end, nothing of the prompt (a first label that nothing predicts included)."""
    tokenizer = char_tokenizer()
    experience = supervised_experience(["12=", "3="], ["21", "3"], tokenizer)
    assert experience.loss_weights.sum() == 5
    assert experience.rollout.response_ids.tolist() == [[5, 4, EOS], [6, EOS, 0]]
    actor = Actor(tiny_model("qwen2"))
    seen = []

    def spy(policy, batch, weights):
        seen.append(int((weights > 0).sum()))
        return SupervisedLoss()(policy, batch, weights)

    actor.forward_backward(experience, spy)
    assert sum(seen) == 5


def test_the_end_is_learned_where_the_pad_token_is_the_end_token_too():
    tokenizer = char_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    questions = [f"{a}{b}=" for a in "0123" for b in "0123"]
    experience = supervised_experience(questions, [question[0] for question in questions], tokenizer)
    assert experience.loss_weights.tolist() == [[1.0, 1.0]] * 16, "answer and end"
    model = tiny_model("qwen2")
    actor = Actor(model, tokenizer, lr=1e-2)
    history = train_supervised(actor, experience, steps=40, batch_size=16, progress=False)
    assert len(history) == 40
    assert history[-1]["actor/nll"] < 0.1 < history[0]["actor/nll"]
    engine = TransformersEngine(actor, progress=False)
    rollout = engine.generate(questions, SamplingParams(temperature=0.0, max_new_tokens=8))
    assert rollout.lengths.tolist() == [2] * 16
    assert rollout.texts == [question[0] for question in questions]


def test_examples_are_drawn_in_shuffled_passes_that_follow_the_seed():
    rollout = Rollout.build([[5]] * 6, [[6]] * 6, extras={"row": torch.arange(6)})
    drawn: list[list[int]] = []

    class Spy(SupervisedLoss):
        def __call__(self, policy, batch, weights):
            drawn.append(sorted(batch.rollout.extras["row"].tolist()))
            return super().__call__(policy, batch, weights)

    def run(seed):
        drawn.clear()
        train_supervised(
            Actor(tiny_model("qwen2")), Experience(rollout=rollout), steps=6, batch_size=3, seed=seed, loss=Spy(), progress=False
        )
        return list(drawn)

    first, again, other = run(0), run(0), run(1)
    assert first == again != other
    for start in (0, 2, 4):
        assert sorted(first[start] + first[start + 1]) == list(range(6)), "every example once a pass"


def test_impossible_sizes_and_no_examples_are_refused():
    actor = Actor(tiny_model("qwen2"), char_tokenizer())
    experience = supervised_experience(["1="], ["1"], actor.tokenizer)
    with pytest.raises(DataError, match="at least one example"):
        supervised_experience([], [], actor.tokenizer)
    with pytest.raises(ConfigError, match=r"at most that of examples \(1\); got 2"):
        train_supervised(actor, experience, steps=1, batch_size=2)
    with pytest.raises(ConfigError, match="steps must be at least 1; got 0"):
        train_supervised(actor, experience, steps=0, batch_size=1)


def test_the_metrics_are_finite_where_a_response_is_the_end_alone():
    actor = Actor(tiny_model("qwen2"), char_tokenizer())
    metrics = train_supervised(actor, supervised_experience(["1="], [""], actor.tokenizer), steps=1, batch_size=1, progress=False)[0]
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/nll"] > 0
