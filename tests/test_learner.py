"""One optimiser step, done right: whatever way a batch is cut, the gradient is the same, and what fails leaves no trace."""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

import pytest
import torch

import rlhf
from rlhf import Actor, ConfigError, Critic, Experience, LossOutput, PolicyLoss, RLHFWarning, Rollout, ValueLoss
from rlhf.learner import combine_steps
from rlhf.models import ScalarHead
from rlhf.ppo import token_weights
from rlhf.scoring import plan_micro_batches
from tests.batches import gradients, plain_statistics, ragged_rollout, with_exact_norms
from tests.models import tiny_model

MODES = [("token-mean", None), ("sequence-mean", None), ("sequence-mean-token-sum", None), ("constant", 12.0)]


def actor_of(family="qwen2", dtype=torch.float64, **options):
    model = tiny_model(family).to(dtype)
    return Actor(with_exact_norms(model) if dtype == torch.float64 else model, **{"lr": 1e-3} | options)


def batch_of(actor=None, rollout=None, *, seed=0, noise=0.3, dtype=torch.float64, **fields):
    """An experience with advantages, a starting point beside the policy, and a reference."""
    rollout = ragged_rollout(seed=seed, prompts=3, n=2) if rollout is None else rollout
    generator = torch.Generator().manual_seed(seed)
    shape = rollout.response_ids.shape

    def random(scale=1.0):
        return scale * torch.randn(shape, generator=generator, dtype=dtype) * rollout.response_mask

    old = (actor.logprobs(rollout) if actor else torch.zeros(shape)).to(dtype) + random(noise)
    tensors = {"old_logprobs": old, "ref_logprobs": old + random(noise), "advantages": random(), "returns": random(), "values": random()}
    return Experience(rollout=rollout, **tensors | fields)


def gradient_of(learner, batch, loss, budget=10_000):
    learner.zero_grad()
    learner.micro_batch_tokens = budget
    metrics = learner.forward_backward(batch, loss)
    result = gradients(learner.module)
    learner.zero_grad()
    return result, metrics


def assert_same(got, want, *, relative):
    assert got.keys() == want.keys()
    scale = max(float(value.abs().max()) for value in want.values())
    assert scale > 1e-6, "a gradient of nothing proves nothing"
    for name, value in want.items():
        error = float((got[name] - value).abs().max())
        assert error <= relative * scale, (name, error, scale)


def weights_of(learner):
    return {name: value.detach().clone() for name, value in learner.module.named_parameters()}


def assert_unchanged(learner, before):
    for name, value in learner.module.named_parameters():
        assert torch.equal(value, before[name]), name


# ------------------------------------------------------------------ any split, the same gradient


@pytest.mark.parametrize("aggregate, constant", MODES)
@pytest.mark.parametrize("dtype, relative", [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_the_gradient_does_not_depend_on_the_micro_batches(aggregate, constant, dtype, relative):
    rollout = Rollout.build(
        [[5, 6, 7]] * 4,
        [[8], [9, 10, 11, 12], [13, 14], [15] * 9],
        response_masks=[[True], [True, True, False, True], [True] * 2, [True] * 9],
    )
    actor = actor_of(dtype=dtype)
    batch = batch_of(actor, rollout, dtype=dtype)
    loss = PolicyLoss(aggregate=aggregate, constant=constant, entropy_coef=0.1, kl_coef=0.2)
    actor.module.layout = "padded"
    whole, metrics = gradient_of(actor, batch, loss)
    for budget in (1, 12, 22):
        split, split_metrics = gradient_of(actor, batch, loss, budget)
        assert_same(split, whole, relative=relative)
        assert split_metrics == pytest.approx(metrics, rel=100 * relative, abs=100 * relative)
    counts = {len(plan_micro_batches(rollout, budget=budget, layout="padded")) for budget in (1, 12, 22, 10_000)}
    assert counts == {4, 3, 2, 1}
    actor.module.layout = "shared"
    assert_same(gradient_of(actor, batch, loss)[0], whole, relative=relative)


@pytest.mark.parametrize("aggregate, constant", MODES)
def test_the_gradient_does_not_depend_on_the_order_of_the_rows(aggregate, constant):
    actor = actor_of()
    batch, loss = batch_of(actor), PolicyLoss(aggregate=aggregate, constant=constant)
    whole, _ = gradient_of(actor, batch, loss)
    for seed in range(3):
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
        assert_same(gradient_of(actor, batch.select(order), loss, 20)[0], whole, relative=1e-10)


@pytest.mark.parametrize("aggregate, constant", MODES)
def test_a_batch_given_twice_has_the_gradient_of_one(aggregate, constant):
    """Means do not grow with the batch, Dr. GRPO's among them."""
    actor = actor_of()
    batch, loss = batch_of(actor), PolicyLoss(aggregate=aggregate, constant=constant)
    once, metrics = gradient_of(actor, batch, loss)
    twice, double = gradient_of(actor, batch.select([*range(6), *range(6)]), loss)
    assert_same(twice, once, relative=1e-10)
    assert double == pytest.approx(metrics, abs=1e-10)


def token_losses(policy, batch, weights):
    """The advantage of a token as its loss, with a gradient."""
    return LossOutput((weights * (batch.advantages + policy.logprobs - policy.logprobs.detach())).sum(), {})


@pytest.mark.parametrize("budget", [1, 10_000])
def test_token_mean_weighs_tokens_however_the_rows_are_cut(budget):
    """10 tokens that cost 1 and 90 that cost 3 cost 2.8 in the mean; a mean of row means would say 2.0."""
    rollout = Rollout.build([[5], [6]], [[7] * 10, [8] * 90])
    costs = torch.ones(2, 90) * torch.tensor([[1.0], [3.0]])
    actor = actor_of(dtype=torch.float32, micro_batch_tokens=budget)
    batch = Experience(rollout=rollout, advantages=costs)
    for mode, constant, expected in [("token-mean", None, 2.8), ("sequence-mean", None, 2.0), ("constant", 100.0, 1.4)]:

        class Loss:
            def weights(self, mask, *, tokens, sequences, mode=mode, constant=constant):
                return token_weights(mask, mode, constant=constant, tokens=tokens, sequences=sequences)

            def __call__(self, policy, batch, weights):
                return token_losses(policy, batch, weights)

        assert actor.forward_backward(batch, Loss())["actor/loss"] == pytest.approx(expected, abs=1e-6)
    assert actor.forward_backward(batch, token_losses)["actor/loss"] == pytest.approx(2.8, abs=1e-6), "token-mean without weights"
    rollout = Rollout.build([[5], [6]], [[7], [8] * 9])
    batch = Experience(rollout=rollout, advantages=torch.tensor([[1.0] * 9, [0.0] * 9]))
    assert actor.forward_backward(batch, token_losses)["actor/loss"] == pytest.approx(0.1, abs=1e-6)


def test_rows_and_tokens_that_are_left_out_do_not_count():
    """lengths 2 and 4, token losses 1 and 0: sequence-mean 0.5, token-mean 1/3; a third row without weight changes neither."""
    rollout = Rollout.build([[5], [6], [7]], [[8] * 2, [9] * 4, [10] * 4])
    costs = torch.tensor([[1.0] * 4, [0.0] * 4, [100.0] * 4])
    keep = rollout.response_mask.float()
    keep[2] = 0
    batch = Experience(rollout=rollout, advantages=costs, loss_weights=keep)
    actor = actor_of(dtype=torch.float32)
    assert actor.forward_backward(batch, token_losses)["actor/loss"] == pytest.approx(1 / 3, abs=1e-6)
    token_losses_by_row = type(
        "Loss", (), {"weights": PolicyLoss(aggregate="sequence-mean").weights, "__call__": staticmethod(token_losses)}
    )()
    assert actor.forward_backward(batch, token_losses_by_row)["actor/loss"] == pytest.approx(0.5, abs=1e-6)


def test_the_critics_gradient_does_not_depend_on_the_micro_batches():
    head = ScalarHead(32, dtype=torch.float64)
    torch.nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    critic = Critic(with_exact_norms(tiny_model("qwen2").double()), head=head)
    batch = batch_of()
    whole, metrics = gradient_of(critic, batch, ValueLoss(clip=0.2))
    assert metrics["critic/value_loss"] == pytest.approx(metrics["critic/loss"], rel=1e-10)
    for budget in (1, 25):
        assert_same(gradient_of(critic, batch, ValueLoss(clip=0.2), budget)[0], whole, relative=1e-10)


def test_a_planted_wrong_denominator_is_seen(monkeypatch):
    """Counting tokens by micro-batch instead of by mini-batch is the classic fault."""
    actor = actor_of()
    batch, loss = batch_of(actor), PolicyLoss()
    whole, _ = gradient_of(actor, batch, loss)

    def local(self, policy, batch, weights):
        return plain(self, policy, batch, token_weights(weights > 0, "token-mean"))

    plain = PolicyLoss.__call__
    monkeypatch.setattr(PolicyLoss, "__call__", local)
    with pytest.raises(AssertionError):
        assert_same(gradient_of(actor, batch, loss, 20)[0], whole, relative=1e-10)


# ------------------------------------------------------------------ accumulation and steps


def test_two_calls_add_their_gradients():
    actor = actor_of()
    batch = batch_of(actor)

    class Summed:
        def weights(self, mask, *, tokens, sequences):
            return mask.double()

        def __call__(self, policy, batch, weights):
            return LossOutput((weights * -batch.advantages * policy.logprobs).sum(), {})

    whole, _ = gradient_of(actor, batch, Summed())
    actor.forward_backward(batch.select([0, 1, 2]), Summed())
    actor.forward_backward(batch.select([3, 4, 5]), Summed())
    assert_same(gradients(actor.module), whole, relative=1e-10)
    actor.optim_step()
    assert not gradients(actor.module), "a step forgets them"


def test_a_loss_that_raises_leaves_earlier_gradients_as_they_were():
    actor = actor_of(micro_batch_tokens=20)
    batch = batch_of(actor)
    actor.forward_backward(batch, PolicyLoss())
    before, calls = gradients(actor.module), []

    def broken(policy, batch, weights):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("mine")
        return PolicyLoss()(policy, batch, weights)

    with pytest.raises(KeyError, match="mine"):
        actor.forward_backward(batch, broken)
    for name, value in gradients(actor.module).items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("size, steps", [(None, 1), (6, 1), (4, 2), (2, 3), (1, 6), (5, 2)])
@pytest.mark.parametrize("epochs", [1, 3])
def test_an_update_takes_one_step_per_mini_batch_and_epoch(size, steps, epochs):
    actor = actor_of(dtype=torch.float32)
    metrics = actor.update(batch_of(dtype=torch.float32), PolicyLoss(), epochs=epochs, mini_batch_size=size)
    assert actor.weight_version == epochs * steps == epochs * math.ceil(6 / (size or 6))
    assert metrics["actor/skipped_steps"] == 0


def rows_seen(actor, batch, **options):
    """The rows of each micro-batch, which are those of each mini-batch under a large budget."""
    seen = []

    def spy(policy, part, weights):
        seen.append((part.rollout.extras["row"].tolist(), weights))
        return LossOutput((policy.logprobs * 0).sum(), {})

    actor.micro_batch_tokens = 100_000
    actor.update(batch, spy, **options)
    return seen


def numbered(rollout):
    rollout.extras["row"] = torch.arange(len(rollout))
    return batch_of(rollout=rollout, dtype=torch.float32)


def test_the_last_smaller_mini_batch_weighs_by_its_own_counts():
    batch = numbered(Rollout.build([[5]] * 5, [[6] * 3] * 5))
    seen = rows_seen(actor_of(dtype=torch.float32), batch, mini_batch_size=2)
    assert [len(rows) for rows, _ in seen] == [2, 2, 1]
    for rows, weights in seen:
        assert weights.sum().item() == pytest.approx(1.0, abs=1e-6), "a mean over the tokens of this step"
        assert weights.max().item() == pytest.approx(1 / (3 * len(rows)), abs=1e-6)


def test_groups_stay_whole_where_the_size_allows_and_are_shuffled():
    batch = numbered(ragged_rollout(prompts=6, n=4))
    orders = []
    for rows, _ in rows_seen(actor_of(dtype=torch.float32), batch, mini_batch_size=8, epochs=3):
        groups = [row // 4 for row in rows]
        assert sorted(groups) == sorted([*set(groups)] * 4), "two whole groups"
        orders.append(tuple(dict.fromkeys(groups)))
    for epoch in range(3):
        assert sorted(group for pair in orders[3 * epoch : 3 * epoch + 3] for group in pair) == list(range(6)), "every group once an epoch"
    assert len({frozenset(pair) for pair in orders}) > 3, "not the same pairs every time"


def test_a_group_is_split_only_where_the_size_forces_it():
    batch = numbered(ragged_rollout(prompts=2, n=4))
    parts = [sorted(rows) for rows, _ in rows_seen(actor_of(dtype=torch.float32), batch, mini_batch_size=2)]
    assert sorted(parts) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(abs(parts.index([a, a + 1]) - parts.index([a + 2, a + 3])) == 1 for a in (0, 4)), "its parts follow each other"


def test_one_mini_batch_keeps_the_order_of_the_rows():
    batch = numbered(ragged_rollout(prompts=4, n=2))
    assert [rows for rows, _ in rows_seen(actor_of(dtype=torch.float32), batch, epochs=2)] == [list(range(8))] * 2


def test_the_shuffle_follows_the_seed():
    batch = numbered(ragged_rollout(prompts=8, n=1))
    first, again, other = (
        [rows for rows, _ in rows_seen(actor_of(dtype=torch.float32, seed=seed), batch, mini_batch_size=1, epochs=2)] for seed in (3, 3, 4)
    )
    assert first == again != other
    assert first[:8] != first[8:], "every epoch its own order"


def test_the_same_seed_gives_the_same_weights_bit_for_bit():
    def run(seed):
        actor = actor_of(dtype=torch.float32, seed=seed)
        actor.update(batch_of(actor, dtype=torch.float32), PolicyLoss(), epochs=2, mini_batch_size=2)
        return weights_of(actor)

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_an_empty_batch_and_impossible_sizes_are_refused():
    actor = actor_of(dtype=torch.float32)
    batch = batch_of(dtype=torch.float32)
    with pytest.raises(ConfigError, match="between 1 and the 6 responses of the batch; got 7"):
        actor.update(batch, PolicyLoss(), mini_batch_size=7)
    with pytest.raises(ConfigError, match="between 1 and the 6 responses"):
        actor.update(batch, PolicyLoss(), mini_batch_size=0)
    with pytest.raises(ConfigError, match="epochs must be at least 1; got 0"):
        actor.update(batch, PolicyLoss(), epochs=0)
    with pytest.raises(ConfigError, match="the batch has no responses"):
        actor.update(batch.select([]), PolicyLoss())
    assert actor.weight_version == 0


def test_loss_weights_must_fit_the_tokens_that_were_sampled():
    actor = actor_of(dtype=torch.float32)
    rollout = ragged_rollout()
    everywhere = torch.ones(rollout.response_ids.shape)
    for weights, message in [
        (everywhere, "must be 0 where response_mask is False"),
        (-rollout.response_mask.float(), "must be at least 0"),
        (everywhere * math.nan, "must be at least 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            actor.forward_backward(batch_of(rollout=rollout, dtype=torch.float32, loss_weights=weights), PolicyLoss())


# ------------------------------------------------------------------ clipping, and what is not finite


def linear(coefficient):
    """A loss whose gradient is `coefficient` times that of the sum of log-probabilities."""
    return lambda policy, batch, weights: LossOutput(coefficient * (weights * policy.logprobs).sum(), {})


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported():
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0), "lr": None}
    actor = actor_of(max_grad_norm=0.5, **sgd)
    batch, before = batch_of(actor), weights_of(actor)
    gradient, _ = gradient_of(actor, batch, linear(100.0))
    norm = math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))
    assert norm > 1
    metrics = actor.update(batch, linear(100.0))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert metrics["actor/lr"] == 1.0
    for name, value in actor.module.named_parameters():
        torch.testing.assert_close(before[name] - value.detach(), gradient[name] * 0.5 / norm, rtol=1e-6, atol=1e-12)


def test_a_gradient_below_the_norm_is_left_alone():
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0), "lr": None}
    actor = actor_of(max_grad_norm=1e6, **sgd)
    batch, before = batch_of(actor), weights_of(actor)
    gradient, _ = gradient_of(actor, batch, linear(1.0))
    actor.update(batch, linear(1.0))
    for name, value in actor.module.named_parameters():
        assert torch.equal(value, before[name] - gradient[name])


def test_the_norm_of_bfloat16_gradients_is_taken_in_float32():
    """257 ones have the norm 16.03; a running sum in bfloat16 sticks at 256."""
    actor = actor_of(dtype=torch.bfloat16, master_weights=False, max_grad_norm=1e9)
    for parameter in actor._trained:
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in actor._trained)
    assert actor.optim_step()["actor/grad_norm"] == pytest.approx(math.sqrt(count), rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_leaves_no_trace(bad, dtype):
    """Clipping [3, inf] to norm 1 would leave [0, NaN]."""
    actor = actor_of(dtype=dtype, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    batch = batch_of(actor, dtype=torch.float32)
    actor.update(batch, linear(1.0))
    before = weights_of(actor)
    masters = [value.detach().clone() for value in actor._optimized]
    state = {index: {k: v.clone() for k, v in entry.items()} for index, entry in actor.optimizer.state_dict()["state"].items()}
    rate = actor.optimizer.param_groups[0]["lr"]

    metrics = actor.update(batch, linear(bad))
    assert (metrics["actor/skipped_steps"], actor.skipped_steps, actor.weight_version) == (1.0, 1, 1)
    assert_unchanged(actor, before)
    assert all(torch.equal(a, b) for a, b in zip(actor._optimized, masters, strict=True))
    for index, entry in actor.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[index][name]) for name, value in entry.items())
    assert actor.optimizer.param_groups[0]["lr"] == rate
    assert not gradients(actor.module)

    assert actor.update(batch, linear(1.0))["actor/skipped_steps"] == 0
    assert actor.weight_version == 2
    assert any(not torch.equal(value, before[name]) for name, value in actor.module.named_parameters())


def test_a_batch_without_a_token_to_train_on_changes_nothing():
    actor = actor_of(dtype=torch.float32)
    batch, before = batch_of(dtype=torch.float32), weights_of(actor)
    batch.loss_weights = torch.zeros_like(batch.loss_weights)
    metrics = actor.update(batch, PolicyLoss(), epochs=2, mini_batch_size=2)
    assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0.0
    assert actor.weight_version == actor.skipped_steps == 0
    assert_unchanged(actor, before)


def test_an_empty_response_beside_others_trains_them_alone():
    actor = actor_of()
    with_empty = batch_of(rollout=Rollout.build([[5], [5], [6]], [[7, 8], [], [1]]), noise=0.0)
    without = with_empty.select([0, 2])
    assert_same(gradient_of(actor, with_empty, PolicyLoss())[0], gradient_of(actor, without, PolicyLoss())[0], relative=1e-12)


# ------------------------------------------------------------------ out of memory


def fail_at(actor, calls, monkeypatch):
    """Let the module's forward run out of memory at these calls."""
    plain, count = type(actor.module).forward, []

    def forward(self, *args):
        count.append(len(args[0]))
        if len(count) in calls:
            raise torch.OutOfMemoryError("simulated")
        return plain(self, *args)

    monkeypatch.setattr(type(actor.module), "forward", forward)
    return count


def test_out_of_memory_halves_the_budget_and_the_gradient_stays_bitwise_the_same(monkeypatch):
    batch, loss = batch_of(rollout=ragged_rollout(prompts=4, n=2)), PolicyLoss()
    small = actor_of(micro_batch_tokens=32)
    wanted, _ = gradient_of(small, batch, loss, 32)
    actor = actor_of(micro_batch_tokens=64)
    actor.module.layout = small.module.layout = "padded"
    wanted, _ = gradient_of(small, batch, loss, 32)
    earlier = {name: torch.full_like(value, 0.25) for name, value in actor.module.named_parameters() if name in wanted}
    for name, parameter in actor.module.named_parameters():
        parameter.grad = earlier[name].clone() if name in wanted else None
    fail_at(actor, {2}, monkeypatch)
    with pytest.warns(RLHFWarning, match="out of memory with micro_batch_tokens=64; actor goes on with 32. Pass this number") as caught:
        actor.forward_backward(batch, loss)
    assert len(caught) == 1
    assert actor.micro_batch_tokens == 32
    for name, value in gradients(actor.module).items():
        assert torch.equal(value, wanted[name] + 0.25), "the whole mini-batch was redone, and earlier gradients are still there"


def test_memory_may_run_out_several_times_with_one_warning(monkeypatch):
    batch = batch_of(rollout=ragged_rollout(prompts=4, n=2), dtype=torch.float32)
    actor = actor_of(dtype=torch.float32, micro_batch_tokens=128)
    fail_at(actor, {1, 2, 4}, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actor.forward_backward(batch, PolicyLoss())
    assert [str(warning.message)[:70] for warning in caught] == ["out of memory with micro_batch_tokens=128; actor goes on with 16. Pass"]


def test_scoring_survives_too(monkeypatch):
    actor, rollout = actor_of(dtype=torch.float32, micro_batch_tokens=64), ragged_rollout()
    expected = actor.logprobs(rollout)
    fail_at(actor, {1}, monkeypatch)
    with pytest.warns(RLHFWarning, match="out of memory"):
        torch.testing.assert_close(actor.logprobs(rollout), expected, rtol=0, atol=1e-5)


def test_a_row_that_alone_is_too_large_raises_and_the_budget_comes_back(monkeypatch):
    actor, batch = actor_of(dtype=torch.float32, micro_batch_tokens=64), batch_of(dtype=torch.float32)
    fail_at(actor, set(range(1000)), monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        actor.forward_backward(batch, PolicyLoss())
    assert actor.micro_batch_tokens == 64
    assert not gradients(actor.module)


# ------------------------------------------------------------------ precision


def test_small_steps_survive_in_bfloat16_with_master_weights():
    """One step of 1e-6 is far below half a unit of bfloat16's last place, at which weights without masters stand still."""
    step = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0), "lr": None, "max_grad_norm": math.inf}

    def run(**options):
        actor = actor_of(dtype=torch.bfloat16, **step, **options)
        start = weights_of(actor)
        for _ in range(600):
            for parameter in actor._optimized:
                parameter.grad = torch.full_like(parameter, 1e-6)
            actor.optim_step()
        moved = {name: float((start[name].float() - value.detach().float()).mean()) for name, value in actor.module.named_parameters()}
        return actor, start, moved

    actor, start, _ = run()
    assert all(value.dtype == torch.float32 for value in actor._optimized)
    for name, master in zip(start, actor._optimized, strict=True):
        # 600 additions in float32, each rounded at the size of the weight
        assert float((start[name].float() - master.detach()).mean()) == pytest.approx(6e-4, rel=0.06), (
            name
        )  # float32 steps by 1.2e-7 above 1
        assert torch.equal(dict(actor.module.named_parameters())[name], master.bfloat16())
    _, _, stuck = run(master_weights=False)
    large = [name for name in stuck if name.endswith(("norm.weight", "layernorm.weight"))]
    assert large
    assert all(stuck[name] < 1e-5 for name in large), "without masters these steps are rounded away"


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    """1,000 terms of 0.01 are 10; a running sum in bfloat16 stops at 4."""
    actor = actor_of(dtype=torch.bfloat16)
    for _ in range(1000):
        for weight in actor._trained:
            weight.grad = torch.full_like(weight, 0.01)
        actor._masters.collect()
    for master in actor._optimized:
        assert master.grad.dtype == torch.float32
        assert float(master.grad.flatten()[0]) == pytest.approx(10.0, rel=2e-3)  # 0.01 itself is rounded to bfloat16
    assert all(weight.grad is None for weight in actor._trained)


def test_the_ratio_of_the_first_step_is_exactly_one_in_bfloat16_too():
    actor = actor_of(dtype=torch.bfloat16)
    rollout = ragged_rollout()
    batch = batch_of(rollout=rollout, dtype=torch.float32, old_logprobs=actor.logprobs(rollout))
    metrics = actor.forward_backward(batch, PolicyLoss())
    assert metrics["actor/ratio_mean"] == metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/clip_fraction"] == metrics["actor/kl_old"] == 0.0


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradients(family):
    rollout = ragged_rollout()
    plain, checkpointed = (actor_of(family, gradient_checkpointing=on) for on in (False, True))
    batch = batch_of(plain, rollout)
    loss = PolicyLoss(entropy_coef=0.1)
    assert_same(gradient_of(checkpointed, batch, loss)[0], gradient_of(plain, batch, loss)[0], relative=1e-12)


def test_gradient_checkpointing_recomputes_the_layers():
    calls = {}
    for on in (False, True):
        actor = actor_of(gradient_checkpointing=on)
        calls[on] = []
        actor.model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_, on=on: calls[on].append(1))
        actor.forward_backward(batch_of(), PolicyLoss())
    assert len(calls[True]) == 2 * len(calls[False])


# ------------------------------------------------------------------ losses of one's own


class Entropy:
    """The entropy as a loss, with the permission to be differentiated through it or without."""

    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __call__(self, policy, batch, weights):
        return LossOutput((weights * (policy.entropy + 0 * policy.logprobs)).sum(), {"mine": policy.entropy.detach().max()})


class DetachedEntropy(Entropy):
    needs: ClassVar[frozenset[str]] = frozenset()


def test_a_loss_that_needs_entropy_is_differentiated_through_it():
    actor = actor_of()
    batch = batch_of(actor, ragged_rollout(temperature=0.7))
    got, metrics = gradient_of(actor, batch, Entropy())
    _, entropy = plain_statistics(actor.model, batch.rollout)
    mask = batch.rollout.response_mask
    loss = entropy[mask].mean()
    actor.model.zero_grad()
    loss.backward()
    wanted = {f"model.{name}": value for name, value in gradients(actor.model).items()}
    assert metrics["actor/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)  # 1 / tokens is float32 without weights()
    assert_same(got, wanted, relative=1e-6)


def test_a_loss_that_does_not_ask_gets_the_entropy_without_gradient():
    actor = actor_of()
    got, metrics = gradient_of(actor, batch_of(actor), DetachedEntropy())
    assert metrics["actor/loss"] > 0
    assert not any(value.any() for value in got.values())


def test_metrics_are_means_over_tokens_or_maxima_and_bear_the_prefix():
    rollout = Rollout.build([[5], [6]], [[7], [8] * 3])
    actor = actor_of(dtype=torch.float32, micro_batch_tokens=1)

    def loss(policy, batch, weights):
        length = batch.rollout.lengths.sum().float()
        return LossOutput((weights * policy.logprobs).sum(), {"length": length, "length_max": length})

    metrics = actor.forward_backward(Experience(rollout=rollout), loss)
    assert metrics["actor/length"] == pytest.approx((1 * 1 + 3 * 3) / 4)
    assert metrics["actor/length_max"] == 3.0
    assert all(isinstance(value, float) for value in metrics.values())


def test_steps_are_combined_by_the_ends_of_their_names():
    steps = [{"a/x": 1.0, "a/r_max": 2.0, "a/skipped_steps": 1.0}, {"a/x": 3.0, "a/r_max": 5.0, "a/skipped_steps": 1.0, "a/only": 7.0}]
    assert combine_steps(steps) == {"a/x": 2.0, "a/r_max": 5.0, "a/skipped_steps": 2.0, "a/only": 7.0}
    assert combine_steps([]) == {}


# ------------------------------------------------------------------ optimisers and schedules


def test_the_default_optimiser_is_plain_adamw():
    group = actor_of(lr=3e-4).optimizer.param_groups[0]
    assert isinstance(actor_of().optimizer, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-4, (0.9, 0.999), 1e-8, 0.0)
    assert Actor(tiny_model("qwen2")).optimizer.param_groups[0]["lr"] == 1e-5


def test_a_scheduler_steps_once_per_optimiser_step():
    actor = actor_of(dtype=torch.float32, lr=1.0e-3, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    batch = batch_of(dtype=torch.float32)
    rates = [actor.update(batch.select([i]), PolicyLoss())["actor/lr"] for i in range(4)]
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])
    actor.optim_step()  # nothing gathered: no step
    assert actor.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 16)
    assert actor.weight_version == 4


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": 1e-3, "optimizer": torch.optim.SGD}, "lr and optimizer were both given"),
        ({"lr": -1.0}, "lr must be a finite number of at least 0; got -1.0"),
        ({"lr": math.nan}, "lr must be a finite number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0; got 0.0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens must be at least 1; got 0"),
        ({"micro_batch_tokens": 1.5}, "micro_batch_tokens must be a whole number; got 1.5"),
        ({"lr": "1e-3"}, "lr must be a finite number of at least 0; got '1e-3'"),
        ({"optimizer": "adamw"}, "optimizer must be a factory.*got str"),
        ({"optimizer": rlhf.adamw}, r"must make a torch.optim.Optimizer.*got adamw.*rlhf.adamw\(1e-5\)"),
        ({"scheduler": "cosine"}, "scheduler must be a factory.*got str"),
        ({"scheduler": rlhf.linear_decay}, "steps must be a whole number of optimiser steps; got AdamW"),
    ],
)
def test_options_that_contradict_or_are_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Actor(tiny_model("qwen2"), **options)


@pytest.mark.parametrize(
    "loss, message",
    [
        ("ppo", "loss must be a callable.*got 'ppo'"),
        (PolicyLoss, r"got the class PolicyLoss; write PolicyLoss\(\)"),
        (lambda policy, batch, weights: (policy.logprobs * weights).sum(), "must return LossOutput.*got Tensor"),
        (lambda policy, batch, weights: None, "must return LossOutput.*got NoneType"),
        (lambda policy, batch, weights: LossOutput(policy.logprobs * weights, {}), r"must be a 0-dim tensor.*got shape \[6, "),
        (lambda policy, batch, weights: LossOutput((policy.entropy * weights).sum(), {}), r'must have a gradient.*needs = \{"entropy"\}'),
    ],
)
def test_what_a_loss_of_ones_own_forgets_is_named_and_leaves_no_trace(loss, message):
    actor = actor_of(dtype=torch.float32)
    before = weights_of(actor)
    with pytest.raises(ConfigError, match=message):
        actor.update(batch_of(dtype=torch.float32), loss)
    assert_unchanged(actor, before)
    assert gradients(actor.module) == {}


@pytest.mark.parametrize("options", [{"epochs": 1.5}, {"epochs": "2"}, {"mini_batch_size": 2.5}])
def test_counts_of_an_update_are_whole_numbers(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        actor_of(dtype=torch.float32).update(batch_of(dtype=torch.float32), PolicyLoss(), **options)


def test_a_rollout_is_no_experience():
    with pytest.raises(ConfigError, match=r"takes an Experience; got Rollout\. Make one: make_experience"):
        actor_of(dtype=torch.float32).update(ragged_rollout(), PolicyLoss())


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="nothing to train"):
        Actor(tiny_model("qwen2").requires_grad_(False))


def test_a_rate_of_zero_steps_without_moving():
    actor = actor_of(dtype=torch.float32, lr=0.0)
    before = weights_of(actor)
    actor.update(batch_of(dtype=torch.float32), PolicyLoss())
    assert actor.weight_version == 1
    assert_unchanged(actor, before)
