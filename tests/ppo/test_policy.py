"""Actor and Reference: log-probabilities of the tokens that were sampled, by the weights as they are, or as they were."""

from __future__ import annotations

import pytest
import torch

from rlhf import Actor, ConfigError, Experience, LossOutput, PolicyLoss, Reference, Rollout
from tests.batches import plain_statistics, ragged_rollout
from tests.models import char_tokenizer, tiny_model


def training_batch(rollout, actor):
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(rollout.response_ids.shape, generator=generator) * rollout.response_mask
    return Experience(rollout=rollout, old_logprobs=actor.logprobs(rollout), advantages=advantages)


@pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])
def test_log_probabilities_are_at_each_rows_temperature_and_0_off_the_mask(family, layout):
    actor = Actor(tiny_model(family), micro_batch_tokens=30)
    actor.module.layout = layout
    rollout = ragged_rollout(temperature=[1.0, 0.5, 2.0, 0.0, 1.0, 0.8, 1.0, 3.0, 1.0])
    logprobs = actor.logprobs(rollout)
    torch.testing.assert_close(logprobs, plain_statistics(actor.model, rollout)[0].detach(), rtol=0, atol=1e-5)
    assert logprobs.dtype == torch.float32
    assert not logprobs.requires_grad
    assert not logprobs[~rollout.response_mask].any()


def test_an_empty_rollout_has_log_probabilities_too():
    actor = Actor(tiny_model("qwen2"))
    assert actor.logprobs(Rollout.build([], [])).shape == (0, 0)
    assert actor.logprobs(Rollout.build([[5]], [[]])).shape == (1, 0)


def test_learned_positions_begin_at_0_in_every_row():
    """GPT-2 without position ids is 0.28 nats off where other rows are longer."""
    actor = Actor(tiny_model("gpt2"))
    rows = Rollout.build([[5, 6], [7] * 22], [[8, 9], [10] * 9])
    together, alone = actor.logprobs(rows)[0, :2], actor.logprobs(rows.select([0]))[0, :2]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_reference_is_the_policy_as_it_was():
    actor, rollout = Actor(tiny_model("qwen2"), lr=1e-2), ragged_rollout()
    reference, before = actor.reference(), actor.logprobs(rollout)
    assert torch.equal(reference.logprobs(rollout), before)
    actor.update(training_batch(rollout, actor))
    assert torch.equal(reference.logprobs(rollout), before)
    assert float((actor.logprobs(rollout) - before).abs().max()) > 1e-2
    assert not any(parameter.requires_grad for parameter in reference.module.parameters())
    assert all(parameter.requires_grad for parameter in actor.module.parameters()), "the actor is still trained"


def test_a_reference_can_be_any_model():
    other, rollout = tiny_model("qwen2", seed=1), ragged_rollout()
    expected = plain_statistics(other, rollout)[0].detach()
    torch.testing.assert_close(Reference(other, micro_batch_tokens=16).logprobs(rollout), expected, rtol=0, atol=1e-5)


def test_a_float32_head_is_passed_on_to_the_reference():
    actor = Actor(tiny_model("qwen2").bfloat16(), fp32_head=True)
    rollout = ragged_rollout()
    assert actor.reference().module.head.float32
    assert torch.equal(actor.reference().logprobs(rollout), actor.logprobs(rollout))
    assert not torch.equal(Actor(tiny_model("qwen2").bfloat16()).logprobs(rollout), actor.logprobs(rollout))


def test_greedy_rows_are_refused_in_an_update_unless_they_carry_no_weight():
    actor = Actor(tiny_model("qwen2"))
    rollout = ragged_rollout(temperature=[1.0] * 8 + [0.0])
    batch = training_batch(rollout, actor)
    with pytest.raises(ConfigError, match="1 of 9 rows were sampled at temperature 0; expected temperature > 0 in an update"):
        actor.update(batch)
    with pytest.raises(ValueError, match="temperature 0"):
        actor.forward_backward(batch, PolicyLoss())
    assert actor.weight_version == 0
    batch.loss_weights[8] = 0
    actor.update(batch)
    assert actor.weight_version == 1


def test_the_loss_is_differentiated_at_the_sampling_temperature():
    rollout = ragged_rollout(temperature=0.5)
    actor = Actor(tiny_model("qwen2"))
    actor.forward_backward(Experience(rollout=rollout), lambda policy, batch, w: LossOutput((w * policy.logprobs).sum(), {}))
    got = {name: parameter.grad.clone() for name, parameter in actor.model.named_parameters()}
    actor.zero_grad()
    logprobs, _ = plain_statistics(actor.model, rollout)
    (logprobs.sum() / rollout.response_mask.sum()).backward()
    scale = max(float(value.abs().max()) for value in got.values())
    for name, parameter in actor.model.named_parameters():
        assert float((got[name] - parameter.grad).abs().max()) <= 2e-6 * scale, name


def test_what_an_update_calls_by_default_is_the_clipped_loss():
    metrics = []
    for loss in (None, PolicyLoss()):
        actor = Actor(tiny_model("qwen2"))
        rollout = ragged_rollout()
        metrics.append(actor.update(training_batch(rollout, actor), loss, epochs=2))
    assert metrics[0] == metrics[1]
    assert {"actor/loss", "actor/policy_loss", "actor/clip_fraction", "actor/entropy", "actor/grad_norm", "actor/lr"} <= metrics[0].keys()


def test_the_entropy_that_is_reported_is_the_mean_over_tokens():
    actor, rollout = Actor(tiny_model("qwen2"), micro_batch_tokens=25), ragged_rollout()
    metrics = actor.forward_backward(training_batch(rollout, actor), PolicyLoss())
    entropy = plain_statistics(actor.model, rollout)[1][rollout.response_mask].mean()
    assert metrics["actor/entropy"] == pytest.approx(float(entropy.detach()), abs=1e-5)


def test_actor_and_model_share_their_weights():
    model = tiny_model("qwen2")
    actor = Actor(model, char_tokenizer(), lr=1e-2)
    rollout = ragged_rollout()
    actor.update(training_batch(rollout, actor))
    torch.testing.assert_close(plain_statistics(model, rollout)[0].detach(), actor.logprobs(rollout), rtol=0, atol=1e-5)


def test_an_adapter_alone_is_trained():
    pytest.importorskip("peft")
    from rlhf import LoRA
    from rlhf.adapters import add_lora

    actor = Actor(add_lora(tiny_model("qwen2"), LoRA(rank=2)), lr=1e-2)
    rollout = ragged_rollout()
    before = {name: value.detach().clone() for name, value in actor.model.named_parameters()}
    reference = actor.reference()
    for _ in range(2):
        actor.update(training_batch(rollout, actor))
    moved = {name for name, value in actor.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert float((reference.logprobs(rollout) - actor.logprobs(rollout)).abs().max()) > 1e-4
