"""Adapters: what is trained, what is frozen in a reference, what is saved, and that the base never moves."""

from __future__ import annotations

import importlib.util
import json
import threading

import peft
import pytest
import torch
from torch import nn

from rlhf import Actor, ConfigError, Critic, LoRA, MissingDependencyError, ModelError, SamplingParams, TransformersEngine, load_causal_lm
from rlhf.adapters import adapter_is_zero, add_lora, is_adapted, merged_model, merged_parameters, own_turn
from rlhf.ppo import Experience, ValueLoss
from rlhf.sft import SupervisedLoss
from tests.batches import ragged_rollout
from tests.models import FAMILIES, char_tokenizer, tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A saved model with tokenizer, for adapters to name as their base."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def lora_actor(family="qwen2", lora=None, **options):
    torch.manual_seed(0)  # of the adapter's first factor
    return Actor(add_lora(tiny_model(family), lora or LoRA(rank=2)), char_tokenizer(), **{"lr": 1e-2} | options)


def train(actor, steps=2):
    for _ in range(steps):
        actor.update(Experience(rollout=ragged_rollout()), SupervisedLoss())
    return actor


def base_weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters() if ".lora_" not in name}


def assert_bitwise(model, before):
    for name, value in model.named_parameters():
        if name in before:
            assert torch.equal(value, before[name]), name


# ------------------------------------------------------------------ what is trained


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_is_trained_and_it_starts_as_the_model(family):
    actor, plain = lora_actor(family), Actor(tiny_model(family))
    rollout = ragged_rollout()
    assert torch.equal(actor.logprobs(rollout), plain.logprobs(rollout))
    before = base_weights(actor.model)
    train(actor)
    assert_bitwise(actor.model, before)
    assert float((actor.logprobs(rollout) - plain.logprobs(rollout)).abs().max()) > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_trains_through_recomputed_activations_too(checkpointing):
    actor = lora_actor(gradient_checkpointing=checkpointing)
    actor.forward_backward(Experience(rollout=ragged_rollout()), SupervisedLoss())
    plain = lora_actor()
    plain.forward_backward(Experience(rollout=ragged_rollout()), SupervisedLoss())
    for ours, theirs in zip(actor._trained, plain._trained, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    assert any(bool(parameter.grad.any()) for parameter in actor._trained)


def test_a_loraconfig_of_peft_is_taken_as_it_is_but_for_dropout():
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
    actor = lora_actor(lora=config)
    assert {name.split(".")[-4] for name, parameter in actor.model.named_parameters() if parameter.requires_grad} == {"q_proj"}
    train(actor)
    rollout = ragged_rollout()
    assert torch.equal(actor.logprobs(rollout), actor.logprobs(rollout)), "dropout would differ between two passes"


def test_other_configs_and_second_adapters_are_refused():
    with pytest.raises(ConfigError, match=r"rlhf.LoRA\(rank=...\) or a peft.LoraConfig; got int"):
        add_lora(tiny_model("qwen2"), 8)
    with pytest.raises(ConfigError, match="rank must be a whole number of at least 1; got 0"):
        LoRA(rank=0)
    with pytest.raises(ConfigError, match="alpha must be above 0"):
        LoRA(alpha=0)
    with pytest.raises(ConfigError, match=r"does not fit Qwen2ForCausalLM.*q_projj"):
        add_lora(tiny_model("qwen2"), LoRA(target_modules=("q_projj",)))
    with pytest.raises(ConfigError, match="already has an adapter"):
        add_lora(add_lora(tiny_model("qwen2"), LoRA(rank=2)), LoRA(rank=2))


def test_the_number_of_trained_parameters_is_shown():
    # q and o: 2 · (32 + 32), k and v: 2 · (32 + 16), gate, up and down: 3 · (32 + 64), each × rank 2 × 2 layers
    assert "trains 2,048 of " in repr(lora_actor())
    plain = Actor(tiny_model("qwen2"))
    total = sum(parameter.numel() for parameter in plain.model.parameters())
    assert f"Actor(Qwen2ForCausalLM, trains {total:,} of {total:,} parameters, float32 on cpu, version 0)" == repr(plain)


def test_an_adapter_on_a_cpu_is_float32_beside_bfloat16_weights():
    """A bfloat16 product with an inner dimension of the rank takes 30 times the float32 one there (docs/decisions/adapters.md)."""
    actor = Actor(add_lora(tiny_model("qwen2").bfloat16(), LoRA(rank=2)), lr=1e-2)
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in actor.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    train(actor)
    assert not adapter_is_zero(actor.model)


def test_a_float32_head_and_an_adapter_on_the_head_exclude_each_other():
    model = add_lora(tiny_model("qwen2"), LoRA(rank=2, target_modules=("q_proj", "lm_head")))
    assert float(train(Actor(model, lr=1e-2)).logprobs(ragged_rollout()).abs().max()) > 0
    with pytest.raises(ConfigError, match="fp32_head needs a plain linear head; got Linear"):
        Actor(model, fp32_head=True)


# ------------------------------------------------------------------ references


@pytest.mark.parametrize("trained_before", [False, True], ids=["new adapter", "trained adapter"])
def test_a_reference_is_the_policy_at_the_call_and_later_updates_do_not_reach_it(trained_before):
    actor, rollout = lora_actor(), ragged_rollout(temperature=0.7)
    if trained_before:
        train(actor)
    frozen = actor.logprobs(rollout)
    parameters = sum(parameter.numel() for parameter in actor.model.parameters())
    reference = actor.reference()
    assert torch.equal(reference.logprobs(rollout), frozen), "KL at step 0 is 0, not nearly 0"
    assert (reference._frozen is None) is not trained_before
    train(actor)
    assert torch.equal(reference.logprobs(rollout), frozen)
    assert float((actor.logprobs(rollout) - frozen).abs().max()) > 1e-3
    assert sum(parameter.numel() for parameter in actor.model.parameters()) == parameters, "no second model, no second adapter in the first"


def test_several_references_keep_their_own_moments():
    actor, rollout = lora_actor(), ragged_rollout()
    references, expected = [], []
    for _ in range(3):
        references.append(actor.reference())
        expected.append(actor.logprobs(rollout))
        train(actor)
    for reference, want in zip(references, expected, strict=True):
        assert torch.equal(reference.logprobs(rollout), want)
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3


def test_what_is_trained_beside_the_adapter_is_frozen_with_it():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    actor, rollout = lora_actor(lora=config), ragged_rollout()
    assert not adapter_is_zero(actor.model)
    reference, frozen = actor.reference(), actor.logprobs(rollout)
    head = actor.model.get_base_model().lm_head.modules_to_save["default"].weight
    before = head.detach().clone()
    train(actor)
    assert not torch.equal(head, before)
    assert torch.equal(reference.logprobs(rollout), frozen)


@pytest.mark.parametrize("trained_before", [False, True], ids=["adapter off", "frozen copy"])
def test_a_reference_leaves_no_trace_even_when_it_fails(trained_before):
    actor, twin = lora_actor(), lora_actor()
    if trained_before:
        train(actor)
        train(twin)
    frozen_by_hand = next(parameter for name, parameter in actor.model.named_parameters() if ".lora_A." in name)
    frozen_by_hand.requires_grad_(False)  # peft's own switch would set it again
    reference = actor.reference()
    batch = Experience(rollout=ragged_rollout())
    actor.forward_backward(batch, SupervisedLoss())
    state = [(id(p), p.requires_grad, p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in actor.model.parameters()]
    reference.logprobs(ragged_rollout())
    handle = actor.model.get_base_model().model.norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        reference.logprobs(ragged_rollout())
    handle.remove()
    for (name, wants, value, grad), parameter in zip(state, actor.model.parameters(), strict=True):
        assert (name, wants) == (id(parameter), parameter.requires_grad)
        assert torch.equal(parameter, value)
        assert (grad is None) == (parameter.grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)
    assert actor.model.training
    assert actor.weight_version == twin.weight_version
    assert actor.model.active_adapter == "default"
    assert torch.equal(actor.logprobs(ragged_rollout()), twin.logprobs(ragged_rollout()))


def test_a_reference_does_not_reach_into_a_generation_that_runs():
    actor = train(lora_actor())
    engine = TransformersEngine(actor, progress=False)
    sampling = SamplingParams(n=4, max_new_tokens=60, min_new_tokens=60, seed=3)
    expected = engine.generate(["12+3="], sampling)
    reference, rollout = actor.reference(), ragged_rollout()
    train(actor, 0)
    moved = lora_actor()  # a reference of another moment than the weights that generate
    frozen = {name: value + 0.5 for name, value in reference._frozen.items()}
    reference._frozen = frozen
    stop, rounds = threading.Event(), []

    def score():
        while not stop.is_set():
            reference.logprobs(rollout)
            rounds.append(1)

    thread = threading.Thread(target=score)
    thread.start()
    try:
        got = engine.generate(["12+3="], sampling)
    finally:
        stop.set()
        thread.join()
    assert rounds
    assert torch.equal(got.response_ids, expected.response_ids)
    assert torch.equal(got.logprobs, expected.logprobs)
    assert moved.weight_version == 0


def test_who_waits_for_a_turn_is_next():
    model, order = tiny_model("qwen2"), []
    started = threading.Event()

    def waiting():
        started.set()
        with own_turn(model):
            order.append("waiting")

    with own_turn(model):
        thread = threading.Thread(target=waiting)
        thread.start()
        started.wait()
        while not _turns(model).gate.locked():
            pass
        order.append("holder")
    with own_turn(model):
        order.append("holder again")
    thread.join()
    assert order == ["holder", "waiting", "holder again"]


def _turns(model):
    from rlhf.adapters import _TURNS

    return _TURNS[model]


# ------------------------------------------------------------------ saving and loading


def test_a_saved_adapter_is_small_comes_back_and_goes_on_training(checkpoint, tmp_path):
    actor, rollout = train(Actor.from_pretrained(checkpoint, lora=LoRA(rank=2), lr=1e-2, device="cpu")), ragged_rollout()
    actor.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert "adapter_model.safetensors" in files
    assert not any(name.startswith("model") for name in files)
    loaded = Actor.from_pretrained(tmp_path, lr=1e-2, device="cpu")
    assert torch.equal(loaded.logprobs(rollout), actor.logprobs(rollout))
    assert loaded.tokenizer("12").input_ids == actor.tokenizer("12").input_ids
    assert [p.requires_grad for p in loaded.model.parameters()] == [p.requires_grad for p in actor.model.parameters()]
    before = loaded.logprobs(rollout)
    reference = loaded.reference()
    assert torch.equal(reference.logprobs(rollout), before), "a policy that starts from a trained adapter is its own reference"
    train(loaded)
    assert float((loaded.logprobs(rollout) - before).abs().max()) > 1e-3


def test_an_adapter_is_not_put_on_an_adapter(checkpoint, tmp_path):
    Actor.from_pretrained(checkpoint, lora=LoRA(rank=2), device="cpu").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="holds an adapter, which goes on being trained; leave lora out"):
        Actor.from_pretrained(tmp_path, lora=LoRA(rank=2), device="cpu")


def test_an_adapter_without_its_base_says_what_is_missing(checkpoint, tmp_path):
    Actor.from_pretrained(checkpoint, lora=LoRA(rank=2), device="cpu").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for base, message in (("", "does not say which model it belongs to"), (str(tmp_path / "gone"), "belongs to .*gone.*can be loaded")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(ModelError, match=message):
            Actor.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_give_the_same_policy_and_leave_the_base_bit_for_bit(family, tmp_path):
    actor, rollout = train(lora_actor(family)), ragged_rollout()
    before = base_weights(actor.model)
    actor.save_pretrained(tmp_path, merged=True)
    assert_bitwise(actor.model, before)
    assert is_adapted(actor.model)
    merged = Actor.from_pretrained(tmp_path, device="cpu")
    assert not is_adapted(merged.model)
    torch.testing.assert_close(merged.logprobs(rollout), actor.logprobs(rollout), rtol=0, atol=2e-5)
    assert float((merged.logprobs(rollout) - Actor(tiny_model(family)).logprobs(rollout)).abs().max()) > 1e-3


def test_a_hundred_merges_of_a_bfloat16_model_do_not_move_it():
    """Merging in place and subtracting again drifts by 1e-3 (trl issue 6688)."""
    actor = Actor(add_lora(tiny_model("qwen2").bfloat16(), LoRA(rank=2)), lr=1e-2)
    train(actor)
    before = base_weights(actor.model)
    for _ in range(100):
        merged_parameters(actor.model)
    assert_bitwise(actor.model, before)
    for _ in range(100):  # what is not done
        actor.model.merge_adapter()
        actor.model.unmerge_adapter()
    assert any(not torch.equal(value, before[name]) for name, value in actor.model.named_parameters() if name in before)


@pytest.mark.parametrize("dora", [False, True])
def test_merged_parameters_are_those_of_the_merged_model(dora):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], use_dora=dora, task_type="CAUSAL_LM")
    model = train(lora_actor(lora=config)).model
    got, want = merged_parameters(model), dict(merged_model(model).named_parameters())
    assert got.keys() == want.keys() == dict(tiny_model("qwen2").named_parameters()).keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    assert got["model.norm.weight"] is model.get_base_model().model.norm.weight, "layers without an adapter are not copied"


def test_a_tied_weight_appears_once_and_takes_no_adapter_to_be_merged():
    model = lora_actor("llama").model
    assert "lm_head.weight" not in merged_parameters(model)
    tied = add_lora(tiny_model("llama"), LoRA(rank=2, target_modules=("embed_tokens",)))
    with pytest.raises(ModelError, match="embed_tokens' has an adapter and shares its weight"):
        merged_parameters(tied)


def test_an_adapter_is_not_merged_into_quantised_weights():
    model = lora_actor().model
    model.get_base_model().is_quantized = True
    for merge in (merged_model, merged_parameters):
        with pytest.raises(ModelError, match=r"cannot be merged into quantised weights.*save the adapter itself"):
            merge(model)


# ------------------------------------------------------------------ critics


def test_the_scalar_head_is_trained_saved_and_reloaded_with_the_adapter(checkpoint, tmp_path):
    """A reloaded head of random numbers is what TRL and peft users met (trl issue 381, peft issue 1070)."""
    critic, rollout = Critic.from_pretrained(checkpoint, lora=LoRA(rank=2), lr=1e-2, device="cpu"), ragged_rollout()
    before = base_weights(critic.model)
    assert critic.module.head.linear.weight.requires_grad
    for _ in range(3):
        critic.update(Experience(rollout=rollout, returns=torch.ones(rollout.response_ids.shape)), ValueLoss())
    assert_bitwise(critic.model, before)
    values = critic.values(rollout)
    assert float(values.values.abs().max()) > 0.01
    for merged in (False, True):
        folder = tmp_path / str(merged)
        critic.save_pretrained(folder, merged=merged)
        assert (folder / "adapter_model.safetensors").is_file() is not merged
        loaded = Critic.from_pretrained(folder, device="cpu")
        assert torch.equal(loaded.module.head.linear.weight, critic.module.head.linear.weight)
        torch.testing.assert_close(loaded.values(rollout).values, values.values, rtol=0, atol=1e-5)
        torch.testing.assert_close(loaded.values(rollout).last, values.last, rtol=0, atol=1e-5)
    assert not adapter_is_zero(critic.model)


# ------------------------------------------------------------------ engines


def test_an_engine_samples_with_the_adapter_on():
    actor = train(lora_actor())
    rollout = TransformersEngine(actor, progress=False).generate(
        ["1+2=", "abc"], SamplingParams(n=3, max_new_tokens=12, temperature=0.8, seed=0)
    )
    torch.testing.assert_close(rollout.logprobs, actor.logprobs(rollout), rtol=0, atol=1e-5)
    base = Actor(tiny_model("qwen2")).logprobs(rollout)
    assert float((rollout.logprobs - base).abs().max()) > 1e-2


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_an_engine_with_plain_weights_takes_the_merged_ones(family):
    actor = train(lora_actor(family))
    before = base_weights(actor.model)
    engine = TransformersEngine(tiny_model(family), char_tokenizer(), progress=False)
    rollout = engine.generate(["1+2="], SamplingParams(n=3, max_new_tokens=12, seed=0), weights=actor)
    assert engine.weight_version == actor.weight_version == 2
    torch.testing.assert_close(rollout.logprobs, actor.logprobs(rollout), rtol=0, atol=2e-5)
    assert_bitwise(actor.model, before)
    train(actor)
    rollout = engine.generate(["1+2="], SamplingParams(n=3, max_new_tokens=12, seed=0), weights=actor)
    torch.testing.assert_close(rollout.logprobs, actor.logprobs(rollout), rtol=0, atol=2e-5)


def test_an_engine_with_an_adapter_of_its_own_takes_the_adapter():
    actor = train(lora_actor())
    engine = TransformersEngine(add_lora(tiny_model("qwen2"), LoRA(rank=2)), char_tokenizer(), progress=False)
    engine.update_weights(actor)
    for ours, theirs in zip(engine.model.parameters(), actor.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ModelError, match="the weights do not fit"):
        engine.update_weights(tiny_model("qwen2"))


# ------------------------------------------------------------------ quantised bases


def test_a_quantization_config_reaches_the_loading(checkpoint, monkeypatch):
    from transformers import AutoModelForCausalLM

    seen = {}

    def from_pretrained(path, **options):
        seen.update(options)
        del options["quantization_config"], options["device_map"]
        return plain(path, **options)

    plain = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    config = object()
    actor = Actor.from_pretrained(checkpoint, lora=LoRA(rank=2), quantization=config, device="cpu")
    assert seen["quantization_config"] is config
    assert seen["device_map"] == {"": torch.device("cpu")}
    assert is_adapted(actor.model)


def test_quantised_weights_without_an_adapter_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="quantised weights cannot be trained; add lora="):
        Actor.from_pretrained(checkpoint, quantization=object(), device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_qlora_without_bitsandbytes_says_what_to_install(checkpoint):
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(MissingDependencyError, match=r"quantization=BitsAndBytesConfig.*rlhf\[bitsandbytes\]"):
        load_causal_lm(checkpoint, quantization=config)


def test_the_rank_of_every_product_is_what_was_asked_for():
    model = add_lora(tiny_model("qwen2"), LoRA(rank=4, alpha=2.0))
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert len(layers) == 14
    assert all(layer.lora_A["default"].weight.shape[0] == 4 for layer in layers)
    assert {layer.scaling["default"] for layer in layers} == {0.5}
    assert all(isinstance(layer.lora_dropout["default"], nn.Identity) for layer in layers)
