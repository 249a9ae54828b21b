"""Optimisers: the factories do what they are named after, each on the parameters it is for, and their states survive."""

from __future__ import annotations

import copy
import importlib.util
import math

import pytest
import torch
from torch import nn

from rlhf import Actor, ConfigError, Critic, LoRA, MissingDependencyError, Rollout, adamw, adamw_8bit, cosine_decay, linear_decay, muon
from rlhf.adapters import add_lora
from rlhf.models import hidden_matrices
from rlhf.ppo import Experience
from rlhf.sft import SupervisedLoss
from tests.batches import ragged_rollout
from tests.models import tiny_model


def batch_of(rollout: Rollout) -> Experience:
    generator = torch.Generator().manual_seed(0)
    return Experience(rollout=rollout, returns=torch.randn(rollout.response_ids.shape, generator=generator) * rollout.response_mask)


def names_of(learner, parameters) -> set[str]:
    names = {id(parameter): name for name, parameter in learner.module.named_parameters()}
    return {names[id(parameter)] for parameter in parameters}


# ------------------------------------------------------------------ AdamW


def test_adamw_takes_its_textbook_step():
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = adamw(lr=0.1, weight_decay=0.5)([weight])
    weight.grad = torch.tensor([3.0, -0.01], dtype=torch.float64)
    optimizer.step()
    # the first step of Adam is lr · sign(g) up to eps; the decay is lr · wd · w, beside it
    assert weight.tolist() == pytest.approx([1 - 0.1 * 0.5 - 0.1, -2 + 0.1 * 0.5 * 2 + 0.1], abs=1e-6)


def test_adamw_is_what_a_learning_rate_means():
    plain, named = Actor(tiny_model("qwen2"), lr=1e-3), Actor(tiny_model("qwen2"), optimizer=adamw(lr=1e-3))
    for actor in (plain, named):
        actor.update(batch_of(ragged_rollout()), SupervisedLoss())
    for ours, theirs in zip(plain.module.parameters(), named.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_plain_callable_is_still_a_factory():
    seen = []
    actor = Actor(tiny_model("qwen2"), optimizer=lambda parameters: (seen.extend(parameters), torch.optim.SGD(parameters, lr=0.1))[1])
    assert len(seen) == len(list(actor.module.parameters()))
    assert isinstance(actor.optimizer, torch.optim.SGD)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_adamw_8bit_names_the_extra_that_brings_it_before_anything_is_loaded():
    with pytest.raises(MissingDependencyError, match=r"adamw_8bit needs the package 'bitsandbytes'.*rlhf\[bitsandbytes\]"):
        adamw_8bit(lr=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_adamw_8bit_is_that_of_bitsandbytes():
    import bitsandbytes

    assert isinstance(adamw_8bit(lr=1e-5)([nn.Parameter(torch.zeros(2))]), bitsandbytes.optim.AdamW8bit)


# ------------------------------------------------------------------ Muon


def test_muon_gets_hidden_matrices_and_adamw_embeddings_heads_norms_and_biases():
    for family in ("qwen2", "llama", "gpt2"):  # an untied head, a tied one, transposed matrices and position embeddings
        actor = Actor(tiny_model(family), optimizer=muon(lr=1e-3, adamw_lr=1e-4))
        matrices, rest = (names_of(actor, group["params"]) for group in actor.optimizer.param_groups)
        assert matrices | rest == {name for name, _ in actor.module.named_parameters()}
        assert not matrices & rest
        assert all(any(word in name for word in ("proj", "c_attn", "c_fc")) for name in matrices), matrices
        assert not any("proj.weight" in name for name in rest), rest
        assert any("embed" in name or "wte" in name for name in rest)
        assert [group["lr"] for group in actor.optimizer.param_groups] == [1e-3, 1e-4]


def test_the_scalar_head_of_a_critic_is_not_a_hidden_matrix():
    critic = Critic(tiny_model("qwen2"), optimizer=muon(lr=1e-3))
    rest = names_of(critic, critic.optimizer.param_groups[1]["params"])
    assert {"head.linear.weight", "head.linear.bias"} <= rest
    assert critic.optimizer.param_groups[1]["lr"] == 1e-3


def test_both_factors_of_an_adapter_are_hidden_matrices():
    model = add_lora(tiny_model("qwen2"), LoRA(rank=2))
    actor = Actor(model, optimizer=muon(lr=1e-3))
    assert len(actor.optimizer.param_groups) == 1
    assert all(".lora_" in name for name in names_of(actor, actor.optimizer.param_groups[0]["params"]))
    assert {id(p) for p in actor.optimizer.param_groups[0]["params"]} <= {id(p) for p in hidden_matrices(model)}


def test_muons_step_is_orthogonal_and_as_large_as_adamws():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(8, 32))
    weight.grad = torch.randn(8, 32, generator=generator) * torch.logspace(-2, 2, 32)
    muon(lr=0.01)([weight], []).step()
    singular = torch.linalg.svdvals(weight.detach()) / (0.01 * 0.2 * math.sqrt(32))
    # five Newton-Schulz rounds in bfloat16 leave the singular values between .7 and 1.2 (Jordan et al.)
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3


def test_muon_trains_and_the_masters_of_short_weights_are_split_as_the_weights_are():
    for dtype in (torch.float32, torch.bfloat16):
        actor = Actor(tiny_model("qwen2").to(dtype), optimizer=muon(lr=3e-3))
        matrices, rest = (group["params"] for group in actor.optimizer.param_groups)
        assert {parameter.dtype for parameter in [*matrices, *rest]} == {torch.float32}
        assert all(parameter.dim() == 2 for parameter in matrices)
        losses = [actor.update(batch_of(ragged_rollout()), SupervisedLoss())["actor/loss"] for _ in range(6)]
        assert losses[-1] < losses[0] - 0.3, dtype


def test_schedulers_move_the_rates_of_both_parts():
    actor = Actor(tiny_model("qwen2"), optimizer=muon(lr=1e-2, adamw_lr=1e-3), scheduler=linear_decay(4))
    before = {name: value.detach().clone() for name, value in actor.module.named_parameters()}
    metrics = [actor.update(batch_of(ragged_rollout()), SupervisedLoss()) for _ in range(2)]
    assert [step["actor/lr"] for step in metrics] == pytest.approx([1e-2, 0.75e-2])
    assert [group["lr"] for group in actor.optimizer.param_groups] == pytest.approx([0.5e-2, 0.5e-3])
    for group in actor.optimizer.param_groups:
        group["lr"] = 0.0  # what a schedule writes must reach the parts: nothing moves now
    before = {name: value.detach().clone() for name, value in actor.module.named_parameters()}
    actor.scheduler = None
    actor.update(batch_of(ragged_rollout()), SupervisedLoss())
    assert all(torch.equal(value, before[name]) for name, value in actor.module.named_parameters())


def test_a_restored_state_goes_on_bit_for_bit():
    def new():
        return Actor(tiny_model("qwen2"), optimizer=muon(lr=1e-3, adamw_lr=1e-4))

    batch, first = batch_of(ragged_rollout()), new()
    for _ in range(2):
        first.update(batch, SupervisedLoss())
    state, weights = copy.deepcopy(first.optimizer.state_dict()), {name: value.clone() for name, value in first.module.state_dict().items()}
    assert len(state["state"]) == len(list(first.module.parameters()))
    second, fresh = new(), new()
    for actor in (second, fresh):
        actor.module.load_state_dict(weights)
    second.optimizer.load_state_dict(state)
    for actor in (first, second, fresh):
        actor.update(batch, SupervisedLoss())
    for ours, theirs in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not all(torch.equal(a, b) for a, b in zip(first.module.parameters(), fresh.module.parameters(), strict=True)), (
        "the state matters"
    )
    weights = [parameter.detach().clone() for parameter in second.module.parameters()]
    for group in second.optimizer.param_groups:  # loading made new groups: what a schedule writes must still reach the parts
        group["lr"] = 0.0
    second.update(batch, SupervisedLoss())
    assert all(torch.equal(ours, before) for ours, before in zip(second.module.parameters(), weights, strict=True))


def test_the_joined_optimizer_steps_a_closure_once():
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer, calls = muon(lr=0.1)([weight], [bias]), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (weight.sum() + bias.sum()) ** 2
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 36.0
    assert len(calls) == 1
    assert not weight.eq(1).all()
    assert not bias.eq(1).all()


def test_an_optimizer_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least one optimiser with parameters; got none"):
        muon(lr=0.1)([], [])


# ------------------------------------------------------------------ schedules


def rates(schedule, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule(optimizer)
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return result


def test_schedules_by_hand():
    assert rates(linear_decay(4), 6) == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])
    assert rates(linear_decay(6, warmup=2, final=0.5), 7) == pytest.approx([2 / 3, 4 / 3, 2.0, 1.75, 1.5, 1.25, 1.0])
    assert rates(cosine_decay(4), 5) == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0], abs=1e-12)


@pytest.mark.parametrize("options", [{"warmup": 4}, {"warmup": -1}, {"final": 2.0}])
def test_impossible_schedules_are_refused(options):
    with pytest.raises(ConfigError, match=r"warmup must be|final is a share"):
        cosine_decay(4, **options)
