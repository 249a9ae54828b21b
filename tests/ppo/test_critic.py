"""The critic: V of the state before each sampled token, and after the last one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf import Critic, Experience, ModelError, Rollout, ValueLoss
from rlhf.models import ScalarHead
from tests.batches import ragged_rollout
from tests.models import tiny_model


def critic_of(family="qwen2", **options):
    head = ScalarHead(32)
    nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    nn.init.constant_(head.linear.bias, 0.5)
    return Critic(tiny_model(family), head=head, **options)


def states(critic, prompt, response):
    """V of the state before each token of the response and after the last, one unpadded row."""
    ids = torch.cat([torch.as_tensor(prompt), torch.as_tensor(response)]).long()
    hidden = critic.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    return critic.module.head(hidden).detach()


@pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
def test_values_stand_before_their_tokens_and_last_after_the_last(layout):
    critic = critic_of(micro_batch_tokens=40)
    critic.module.layout = layout
    rollout = ragged_rollout()
    values, last = critic.values(rollout)
    assert values.dtype == last.dtype == torch.float32
    for i, length in enumerate(rollout.lengths.tolist()):
        expected = states(critic, rollout.prompt_ids[i], rollout.response_ids[i, :length])
        mask = rollout.response_mask[i, :length]
        torch.testing.assert_close(values[i, :length], torch.where(mask, expected[:-1], 0), rtol=0, atol=1e-5)
        assert float(last[i]) == pytest.approx(float(expected[-1]), abs=1e-5)
        assert not values[i, length:].any()
    assert not values.requires_grad


def test_the_first_value_is_that_of_the_prompt_alone():
    """An offset by one, into the prompt or the response, would say something else."""
    critic = critic_of()
    values, last = critic.values(Rollout.build([[5, 6, 7]], [[8, 9]]))
    of_prompt = states(critic, [5, 6, 7], [])
    assert float(values[0, 0]) == pytest.approx(float(of_prompt[0]), abs=1e-5)
    assert float(values[0, 1]) == pytest.approx(float(states(critic, [5, 6, 7, 8], [])[0]), abs=1e-5)
    assert float(last[0]) == pytest.approx(float(states(critic, [5, 6, 7, 8, 9], [])[0]), abs=1e-5)
    assert len({round(float(value), 4) for value in (*values[0], last[0])}) == 3


def test_the_value_after_an_empty_response_is_the_prompts():
    critic = critic_of()
    values, last = critic.values(Rollout.build([[5, 6], [5, 6]], [[], [7]]))
    assert values.shape == (2, 1)
    assert values[0].tolist() == [0.0]
    assert float(last[0]) == pytest.approx(float(values[1, 0]), abs=1e-6)


def test_no_rows_have_no_values():
    values, last = critic_of().values(Rollout.build([], []))
    assert (values.shape, last.shape) == ((0, 0), (0,))


def test_ids_in_the_padding_change_no_value():
    critic, rollout = critic_of(), ragged_rollout()
    before = critic.values(rollout)
    rollout.response_ids[~rollout.padding_mask] = 33
    assert all(torch.equal(a, b) for a, b in zip(before, critic.values(rollout), strict=True))


def test_an_update_brings_values_to_the_returns():
    critic = Critic(tiny_model("qwen2"), lr=1e-2)
    rollout = ragged_rollout()
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(rollout.response_ids.shape, generator=generator) * rollout.response_mask
    batch = Experience(rollout=rollout, values=critic.values(rollout).values, returns=returns)
    errors = [critic.update(batch)["critic/value_loss"] for _ in range(60)]
    start = 0.5 * float(returns[rollout.response_mask].square().mean())
    assert errors[0] == pytest.approx(start, rel=1e-5), "a new critic says 0"
    assert errors[-1] < 0.3 * errors[0], "rows of one prompt share its state and not their returns: 0 is out of reach"


def test_the_value_loss_of_an_update_is_that_of_its_definition():
    critic = critic_of()
    rollout = ragged_rollout()
    values = critic.values(rollout).values
    batch = Experience(rollout=rollout, values=values, returns=(values + 2.0) * rollout.response_mask)
    metrics = critic.update(batch, ValueLoss(clip=0.2))
    assert metrics["critic/value_loss"] == pytest.approx(0.5 * 4.0, rel=1e-5)
    assert metrics["critic/clip_fraction"] == 0.0
    assert metrics["critic/error_abs"] == pytest.approx(2.0, rel=1e-5)
    assert critic.weight_version == 1


def test_greedy_rows_may_train_a_critic():
    critic = critic_of()
    rollout = ragged_rollout(temperature=0.0)
    critic.update(Experience(rollout=rollout, returns=torch.zeros(rollout.response_ids.shape)))
    assert critic.weight_version == 1


def test_the_head_of_the_language_model_is_dropped():
    names = [name for name, _ in critic_of().module.named_parameters()]
    assert not any("lm_head" in name for name in names)
    assert sum(name.startswith("head.") for name in names) == 2


def test_a_backbone_without_head_will_do():
    model = tiny_model("qwen2")
    whole, bare = Critic(model), Critic(model.model)
    assert whole.model is bare.model


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(ModelError, match="expected a language model or backbone of transformers; got Linear"):
        Critic(nn.Linear(2, 2))
