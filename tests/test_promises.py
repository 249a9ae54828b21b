"""The promises of the design that one process can keep: through the whole path from a rollout to a step, each able to fail."""

from __future__ import annotations

import warnings

import pytest
import torch

from rlhf import (
    GAE,
    GRPO,
    Actor,
    AdaptiveKL,
    Critic,
    KLPenalty,
    PolicyLoss,
    Rollout,
    SamplingParams,
    TransformersEngine,
    ValueLoss,
    make_experience,
)
from rlhf.models import ScalarHead
from tests.batches import gradients, plain_statistics, ragged_rollout, rewards_of, with_exact_norms
from tests.models import FAMILIES, char_tokenizer, tiny_model

EXACT = 1e-10  # float64: the order of a few hundred additions


def critic_of(model, **options):
    head = ScalarHead(32, dtype=model.dtype)
    torch.nn.init.normal_(head.linear.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return Critic(model, head=head, **options)


def scores_of(rollout):
    """Binary, by the ids, so that a row keeps its score wherever it stands; one row has none."""
    scores = [float(row["score"]) for row in rollout.rows]
    return rewards_of([None if score < 0 else score for score in scores])


def whole_path(rollout, algorithm, *, family="qwen2", budget=100_000, layout="shared", order=None):
    """Everything from a rollout to gradients in float64: advantages and returns by row, losses, gradients by name."""
    order = torch.arange(len(rollout)) if order is None else order
    part = rollout.select(order)
    actor = Actor(with_exact_norms(tiny_model(family).double()), micro_batch_tokens=budget)
    critic = critic_of(with_exact_norms(tiny_model(family, seed=1).double()), micro_batch_tokens=budget)
    reference = Actor(with_exact_norms(tiny_model(family, seed=2).double()), micro_batch_tokens=budget)
    for learner in (actor, critic, reference):
        learner.module.layout = layout
    if algorithm == "ppo":
        experience = make_experience(part, scores_of(part), actor=actor, reference=reference, critic=critic)
        experience = experience.with_advantages(GAE(lam=0.95), kl=KLPenalty(AdaptiveKL(0.1, target=0.1, horizon=100)))
        loss = PolicyLoss(entropy_coef=0.01)
    else:
        experience = make_experience(part, scores_of(part), actor=actor, reference=reference)
        experience = experience.with_advantages(GRPO())
        loss = PolicyLoss(aggregate="sequence-mean", kl_coef=0.1)
    # a policy that has moved, so that ratios, clips and KL are not those of the first step
    experience.old_logprobs = experience.old_logprobs + 0.3 * torch.sin(10 * experience.old_logprobs) * part.response_mask
    result = {f"loss {name}": torch.tensor(value) for name, value in actor.forward_backward(experience, loss).items()}
    result |= {f"actor {name}": value for name, value in gradients(actor.module).items()}
    if algorithm == "ppo":
        result |= {f"loss {name}": torch.tensor(value) for name, value in critic.forward_backward(experience, ValueLoss(clip=0.2)).items()}
        result |= {f"critic {name}": value for name, value in gradients(critic.module).items()}
    place = torch.argsort(order)
    return result | {"advantages": experience.advantages[place], "returns": experience.returns[place]}


def worst(results, expected):
    """The largest difference and its name."""
    assert results.keys() == expected.keys()
    return max((float((results[name] - value).abs().max()), name) for name, value in expected.items())


@pytest.fixture
def rollout():
    result = ragged_rollout(seed=5, prompts=3, n=4, longest=12, temperature=[1.0, 0.7, 1.3] * 4)
    generator = torch.Generator().manual_seed(0)
    for row in result.rows:
        row["score"] = int(torch.randint(0, 2, (1,), generator=generator))
    result.rows[5]["score"] = -1
    return result


# ------------------------------------------------------------------ 1: padding, order and batching change nothing


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_padding_order_and_batching_change_nothing(rollout, algorithm, family):
    expected = whole_path(rollout, algorithm, family=family)
    assert max(float(value.abs().max()) for name, value in expected.items() if name.startswith("actor ")) > 1e-3
    assert expected["advantages"].abs().max() > 0.1
    order = torch.randperm(len(rollout), generator=torch.Generator().manual_seed(1))
    wider = Rollout.concat([rollout, Rollout.build([[5]], [[6] * 20])]).select(slice(0, -1))
    wider.response_ids[~wider.padding_mask] = 42
    for name, options in {
        "order": {"order": order},
        "one row at a time": {"budget": 1},
        "some": {"budget": 45},
        "rows apart": {"layout": "padded"},
        "one line": {"layout": "packed", "budget": 60},
        "all at once": {"order": order.flip(0), "budget": 30, "layout": "padded"},
    }.items():
        difference = worst(whole_path(rollout, algorithm, family=family, **options), expected)
        assert difference[0] < EXACT, (name, difference)
    rollout.response_ids[~rollout.padding_mask] = 17
    assert worst(whole_path(rollout, algorithm, family=family), expected)[0] == 0.0, "ids in the padding"
    padded = whole_path(wider, algorithm, family=family)
    width = rollout.response_ids.shape[1]
    for name in ("advantages", "returns"):
        assert not padded[name][:, width:].any()
        padded[name] = padded[name][:, :width]
    assert worst(padded, expected)[0] < EXACT, "a wider batch"


@pytest.mark.parametrize("fault", ["mask off by one", "groups by stride", "sign"])
@pytest.mark.filterwarnings("ignore:.*no sampled token to carry their reward")
def test_planted_faults_are_seen(rollout, fault, monkeypatch):
    """What the promise above compares would differ, were one of these wrong."""
    expected = whole_path(rollout, "grpo")
    if fault == "mask off by one":
        rollout.response_mask = rollout.response_mask.roll(1, 1) & rollout.padding_mask
    elif fault == "groups by stride":
        rollout.group = torch.arange(3).repeat(4)
    else:
        plain = GRPO.__call__
        monkeypatch.setattr(GRPO, "__call__", lambda self, e: type(r := plain(self, e))(-r.advantages, r.returns))
    assert worst(whole_path(rollout, "grpo"), expected)[0] > 1e-3


# ------------------------------------------------------------------ 3: first-step identities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_identical_micro_batches_the_first_ratio_is_exactly_one(family, dtype, rollout):
    rollout.rows[5]["score"] = 1  # every row is trained, so that the micro-batches of scoring and training are the same
    actor = Actor(tiny_model(family).to(dtype), micro_batch_tokens=60)
    experience = make_experience(rollout, scores_of(rollout), actor=actor, reference=actor.reference()).with_advantages(GRPO())
    metrics = actor.update(experience, PolicyLoss(kl_coef=0.1))
    assert metrics["actor/ratio_mean"] == metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/clip_fraction"] == metrics["actor/kl_old"] == metrics["actor/kl_reference"] == 0.0
    assert metrics["actor/grad_norm"] > 0, "GRPO's first loss is about 0 and its gradient is not"
    assert experience.metrics()["kl/reference_k1"] == experience.metrics()["kl/reference_k3"] == 0.0


def test_on_other_micro_batches_it_is_one_to_1e_5(rollout):
    actor = Actor(tiny_model("qwen2"), micro_batch_tokens=60)
    experience = make_experience(rollout, scores_of(rollout), actor=actor).with_advantages(GRPO())
    for layout, budget in (("padded", 60), ("shared", 1), ("packed", 100)):
        actor.module.layout, actor.micro_batch_tokens = layout, budget
        metrics = actor.forward_backward(experience, PolicyLoss())
        assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["actor/clip_fraction"] == 0.0
        assert metrics["actor/kl_old"] < 1e-5


@pytest.mark.parametrize("clip, dual_clip", [(0.2, None), ((0.2, 0.28), 3.0)])
def test_the_first_gradient_is_that_of_reinforce(rollout, clip, dual_clip):
    actor = Actor(with_exact_norms(tiny_model("qwen2").double()))
    experience = make_experience(rollout, scores_of(rollout), actor=actor).with_advantages(GRPO())
    actor.forward_backward(experience, PolicyLoss(clip=clip, dual_clip=dual_clip))
    got = {name: parameter.grad.clone() for name, parameter in actor.model.named_parameters()}
    logprobs, _ = plain_statistics(actor.model, rollout)
    counted = experience.loss_weights > 0
    actor.zero_grad()
    (-experience.advantages * logprobs)[counted].sum().div(counted.sum()).backward()
    for name, parameter in actor.model.named_parameters():
        assert float((got[name] - parameter.grad).abs().max()) < EXACT, name
    assert max(float(value.abs().max()) for value in got.values()) > 1e-3


def test_a_score_above_its_group_makes_its_response_more_likely():
    actor = Actor(tiny_model("qwen2"), lr=1e-3)
    rollout = Rollout.build([[5, 6]] * 2, [[7, 8, 1], [9, 10, 1]], group=[0, 0])
    before = actor.logprobs(rollout).sum(1)
    actor.update(make_experience(rollout, rewards_of([1.0, 0.0]), actor=actor).with_advantages(GRPO()))
    gain = actor.logprobs(rollout).sum(1) - before
    assert gain[0] > 0 > gain[1]


# ------------------------------------------------------------------ 10: the same seed, the same run


def three_steps(algorithm, seed):
    """Sampling, scoring and training, as a user would write it; every weight and metric at the end."""
    torch.manual_seed(1234)  # nothing may depend on the global state: `seed` alone decides
    torch.rand(seed + 1)
    actor = Actor(tiny_model("qwen2"), char_tokenizer(), lr=1e-3, seed=seed, micro_batch_tokens=200)
    critic = critic_of(tiny_model("qwen2", seed=1), lr=1e-3, seed=seed, micro_batch_tokens=200)
    engine = TransformersEngine(actor, seed=seed, progress=False)
    kl = KLPenalty(AdaptiveKL(0.1, target=0.01, horizon=50))
    metrics = []
    for _ in range(3):
        rollout = engine.generate(["12=", "345=", "6="], SamplingParams(n=4, max_new_tokens=8), weights=actor)
        rewards = rewards_of([float(row.sum() % 5) for row in rollout.response_ids * rollout.response_mask])
        ppo = algorithm == "ppo"
        experience = make_experience(rollout, rewards, actor=actor, critic=critic if ppo else None, reference=actor if ppo else None)
        experience = experience.with_advantages(GAE(), kl=kl) if ppo else experience.with_advantages(GRPO())
        metrics.append(actor.update(experience, epochs=2, mini_batch_size=8))
        if ppo:
            metrics.append(critic.update(experience, epochs=2, mini_batch_size=8))
        metrics.append(experience.metrics() | rollout.metrics() | rewards.metrics())
    weights = {f"actor {name}": value.detach() for name, value in actor.module.named_parameters()}
    return weights | {f"critic {name}": value.detach() for name, value in critic.module.named_parameters()}, repr(metrics)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_same_seed_gives_the_same_run_bit_for_bit(algorithm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first, metrics), (again, again_metrics), (other, other_metrics) = (three_steps(algorithm, seed) for seed in (0, 0, 1))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert metrics == again_metrics
    assert any(not torch.equal(value, other[name]) for name, value in first.items() if name.startswith("actor"))
    assert metrics != other_metrics


# ------------------------------------------------------------------ 11: the ids trained on are the ids sampled


def trained_ids(rollout):
    """(prompt, response, sampled?) of every row as the scoring module's forward was given them."""
    actor = Actor(tiny_model("qwen2"))
    actor.module.layout = "padded"
    rows = []
    for i in range(len(rollout)):
        fed = {}

        plain = actor.module.forward

        def spy(input_ids, *rest, fed=fed, plain=plain):
            fed["ids"], fed["targets"] = input_ids[0].tolist(), rest[3].tolist()
            return plain(input_ids, *rest)

        actor.module.forward = spy
        actor.logprobs(rollout.select([i]))
        actor.module.forward = plain
        rows.append((fed["ids"], fed["targets"]))
    return rows


def test_the_ids_trained_on_are_the_ids_sampled_through_saving_selecting_and_joining(tmp_path):
    """Decoding and encoding again would change them: <pad> within a response has no text of its own, and 12 may be 1 2."""
    tokenizer = char_tokenizer()
    engine = TransformersEngine(tiny_model("qwen2"), tokenizer, seed=0, progress=False)
    rollout = engine.generate(["12=", "34="], SamplingParams(n=3, max_new_tokens=12, temperature=2.0))
    sampled = [rollout.response_ids[i, : rollout.lengths[i]].tolist() for i in range(6)]
    changed = [tokenizer(text, add_special_tokens=False).input_ids for text in rollout.texts]
    assert changed != sampled, "a check that re-tokenised text would pass proves nothing"
    rollout.save(tmp_path / "rollout")
    order = [4, 1, 5, 0]
    joined = Rollout.concat([Rollout.load(tmp_path / "rollout").select(order), rollout.select([2])])
    for (fed, targets), i in zip(trained_ids(joined), [*order, 2], strict=True):
        prompt = rollout.prompt_ids[i].tolist()
        assert fed == prompt + sampled[i][:-1]
        assert targets == sampled[i]
    assert torch.equal(joined.logprobs[0], rollout.logprobs[4])


def test_the_ids_trained_on_are_the_ids_sampled_through_turns_and_tools():
    turns = [([5, 6], [7, 8], [-0.1, -0.2], 0), ([5, 6, 7, 8, 30, 31], [9, 1], [-0.3, -0.4], 0), ([5, 40], [10, 1], [-0.5, -0.6], 0)]
    rollout = Rollout.from_turns([turns])
    assert rollout.episode.tolist() == [0, 0], "the third turn's template rewrote the past: a further row"
    (first, first_targets), (second, second_targets) = trained_ids(rollout)
    assert first == [5, 6, 7, 8, 30, 31, 9]
    assert first_targets == [7, 8, 9, 1], "what the tool said is read and not trained on"
    assert (second, second_targets) == ([5, 40, 10], [10, 1])


def test_what_the_engine_says_of_a_token_is_what_the_trainer_says():
    actor = Actor(tiny_model("qwen2"), char_tokenizer())
    rollout = TransformersEngine(actor, progress=False).generate(
        ["12=", "3="], SamplingParams(n=4, max_new_tokens=10, temperature=0.8, seed=0)
    )
    experience = make_experience(rollout, rewards_of([0.0, 1.0] * 4), actor=actor)
    torch.testing.assert_close(experience.old_logprobs, rollout.logprobs, rtol=0, atol=1e-5)
    assert experience.metrics()["mismatch/engine_abs_logratio"] < 1e-5
