"""Checkpoints of many families through `from_pretrained`: the policy scores, trains and samples as the model itself says."""

from __future__ import annotations

import importlib.util
import math
import warnings

import pytest
import torch

from rlhf import Actor, ConfigError, Critic, LoRA, MissingDependencyError, PolicyLoss, SamplingParams, TransformersEngine, load_causal_lm
from rlhf.models import experts_per_token, router_loss_coef, without_dropout
from rlhf.ppo import Experience, ValueLoss
from rlhf.scoring import load_balancing_loss
from rlhf.sft import SupervisedLoss
from tests.batches import gradients, plain_statistics, ragged_rollout
from tests.models import BOS, EOS, PAD, VOCABULARY, char_tokenizer, smollm2_path, tiny_model

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES = {
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    ),  # the sixth attends to all
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "granite": ("Granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "phi": ("Phi", {"num_key_value_heads": 4}),  # a bias on the head, rotary embeddings on half of each head
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.01}),
}


def make(family, **overrides):
    import transformers

    name, fields = FAMILIES[family]
    text = "Gemma3TextConfig" if family == "gemma3" else f"{name}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, text)(**SIZES | fields | overrides))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms start at constants, which would hide a forgotten one
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder by family, each written once."""
    folders = {}

    def of(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            make(family).save_pretrained(folders[family])
            char_tokenizer().save_pretrained(folders[family])
        return folders[family]

    return of


def batch_of(rollout, actor):
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(rollout.response_ids.shape, generator=generator) * rollout.response_mask
    return Experience(rollout=rollout, old_logprobs=actor.logprobs(rollout), advantages=advantages, returns=advantages)


# ------------------------------------------------------------------ families


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_scores_trains_and_samples_as_its_model_says(family, checkpoints):
    folder, rollout = checkpoints(family), ragged_rollout(longest=14, temperature=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no fallback to whole logits or to one row at a time
        actor = Actor.from_pretrained(folder, lr=1e-3, device="cpu")
    assert actor.module.layout == "shared"
    plain = make(family)
    plain.set_attn_implementation(actor.model.config._attn_implementation)
    logprobs, entropy = plain_statistics(plain, rollout)
    torch.testing.assert_close(actor.logprobs(rollout), logprobs.detach(), rtol=0, atol=1e-5)
    assert float(logprobs.detach().abs().max()) > 2, "flat distributions would hide mistakes"

    before = {name: value.detach().clone() for name, value in actor.module.named_parameters()}
    metrics = actor.update(batch_of(rollout, actor), PolicyLoss())
    assert metrics["actor/entropy"] == pytest.approx(float(entropy.detach().sum() / rollout.response_mask.sum()), abs=1e-5)
    assert ("actor/router_loss" in metrics) is (family == "qwen3_moe")
    still = {name for name, value in actor.module.named_parameters() if torch.equal(value, before[name])}
    assert not still, "every weight learns"

    sampled = TransformersEngine(actor, progress=False).generate(["1+2=", "abc def"], SamplingParams(n=3, max_new_tokens=14, seed=0))
    torch.testing.assert_close(sampled.logprobs, actor.logprobs(sampled), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_loads_a_checkpoint_by_itself_and_takes_an_actors_weights(family, checkpoints):
    actor = Actor.from_pretrained(checkpoints(family), lr=1e-2, device="cpu")
    engine = TransformersEngine.from_pretrained(checkpoints(family), device="cpu", progress=False)
    sampling = SamplingParams(n=2, max_new_tokens=10, seed=0)
    torch.testing.assert_close((rollout := engine.generate("1+2=", sampling)).logprobs, actor.logprobs(rollout), rtol=0, atol=1e-5)
    actor.update(Experience(rollout=ragged_rollout()), SupervisedLoss())
    rollout = engine.generate("1+2=", sampling, weights=actor)
    torch.testing.assert_close(rollout.logprobs, actor.logprobs(rollout), rtol=0, atol=1e-5)
    assert engine.weight_version == 1


@pytest.mark.parametrize("kind", [Actor, Critic])
def test_a_misspelt_keyword_is_named_before_anything_is_loaded(kind):
    with pytest.raises(ConfigError, match=r"keyword of \w+\.from_pretrained must be one of .*'learning_rate'; did you mean 'lr'\?"):
        kind.from_pretrained("nowhere", learning_rate=1e-5)
    with pytest.raises(ConfigError, match="did you mean 'micro_batch_tokens'"):
        kind.from_pretrained("nowhere", micro_batch_token=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_of_a_checkpoint_trains(family, checkpoints):
    critic, rollout = Critic.from_pretrained(checkpoints(family), lr=1e-2, device="cpu"), ragged_rollout()
    batch = Experience(rollout=rollout, returns=torch.ones(rollout.response_ids.shape))
    losses = [critic.update(batch, ValueLoss())["critic/value_loss"] for _ in range(3)]
    assert losses[-1] < losses[0] == pytest.approx(0.5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "phi"])
def test_attention_and_recomputation_change_nothing(family, attention, checkpoints):
    results = []
    for options in ({}, {"attn_implementation": attention, "gradient_checkpointing": True}):
        actor = Actor.from_pretrained(checkpoints(family), lr=1e-3, device="cpu", **options)
        actor.forward_backward(batch_of(ragged_rollout(), actor), PolicyLoss())
        results.append(gradients(actor.module))
    assert actor.model.config._attn_implementation == attention
    assert actor.model.is_gradient_checkpointing
    scale = max(float(value.abs().max()) for value in results[0].values())
    for name, value in results[0].items():
        assert float((results[1][name] - value).abs().max()) < 1e-4 * scale, name


def test_models_that_cap_their_attention_are_loaded_with_one_that_does(checkpoints):
    ids = torch.arange(3, 23)[None]
    model, asked = (load_causal_lm(checkpoints("gemma2"), attn_implementation=name) for name in (None, "sdpa"))
    assert (model.config._attn_implementation, asked.config._attn_implementation) == ("eager", "sdpa")
    reference = make("gemma2")
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)
        for layer in asked.model.layers:
            layer.self_attn.attn_logit_softcapping = 0.1  # changes nothing: sdpa does not cap
        assert torch.equal(asked(input_ids=ids).logits, make("gemma2")(input_ids=ids).logits)


def test_bfloat16_is_loaded_as_such(checkpoints):
    actor = Actor.from_pretrained(checkpoints("qwen3"), dtype="bfloat16", device="cpu")
    assert {parameter.dtype for parameter in actor.model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in actor._optimized} == {torch.float32}
    engine = TransformersEngine.from_pretrained(checkpoints("qwen3"), dtype="bfloat16", device="cpu")
    assert engine.model.dtype == torch.bfloat16


# ------------------------------------------------------------------ mixtures of experts


def moe(**overrides):
    return make("qwen3_moe", **overrides)


def gradient_of(actor, batch, loss):
    metrics = actor.forward_backward(batch, loss)
    result = gradients(actor.module)
    actor.zero_grad()
    return result, metrics


class NoLoss:
    """Nothing of the policy: what is left is the router loss."""

    def __call__(self, output, batch, weights):
        from rlhf import LossOutput

        return LossOutput((output.logprobs * 0).sum(), {})


def test_the_router_loss_is_that_of_transformers():
    model, ids = moe(), torch.randint(3, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    expected = model(input_ids=ids, attention_mask=mask).aux_loss
    logits = model.model(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits
    got = load_balancing_loss(logits, mask.flatten(), 2)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    unmasked = load_balancing_loss(logits, torch.ones_like(mask).flatten(), 2)
    assert abs(float(got.detach() - unmasked.detach())) > 1e-4, "padding would count"


def test_the_router_loss_by_hand():
    # both tokens choose expert 0 of two: f = (1, 0); P = mean of (.75, .25) and (.9, .1) = (.825, .175); 2 · .825
    logits = torch.tensor([[3.0, 1.0], [9.0, 1.0]]).log()
    assert float(load_balancing_loss([logits], torch.tensor([1, 1]), 1)) == pytest.approx(1.65)
    # the first is read three times: P₀ = (3 · .75 + .9) / 4
    assert float(load_balancing_loss([logits], torch.tensor([3, 1]), 1)) == pytest.approx(2 * 3.15 / 4)
    even = torch.tensor([[0.0, -1e-9], [-1e-9, 0.0]])
    assert float(load_balancing_loss([even, even], torch.tensor([1, 1]), 1)) == pytest.approx(1.0)


@pytest.mark.parametrize("layout", ["shared", "padded"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_router_loss_of_separate_rows_reaches_the_gradient_whatever_the_layout(layout, checkpointing):
    rollout, coef = ragged_rollout(), 0.5
    actor = Actor(moe(), micro_batch_tokens=10_000, router_loss_coef=coef, gradient_checkpointing=checkpointing)
    actor.module.layout = layout
    got, metrics = gradient_of(actor, batch_of(rollout, actor), NoLoss())

    model = moe()  # every row alone, all of it but the last token, which predicts nothing
    rows = [torch.cat([rollout.prompt_ids[i], rollout.response_ids[i, : rollout.lengths[i] - 1]]) for i in range(len(rollout))]
    logits = [model.model(input_ids=row[None], output_router_logits=True).router_logits for row in rows]
    layers = [torch.cat(parts) for parts in zip(*logits, strict=True)]
    expected = load_balancing_loss(layers, torch.ones(sum(map(len, rows)), dtype=torch.int64), 2)
    (coef * expected).backward()
    assert metrics["actor/router_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert metrics["actor/loss"] == pytest.approx(coef * float(expected.detach()), rel=1e-5)
    wanted = gradients(model)
    scale = float(wanted["model.layers.1.mlp.gate.weight"].abs().max())
    assert scale > 1e-4
    for name, value in wanted.items():
        torch.testing.assert_close(got[f"model.{name}"], value, rtol=0, atol=1e-4 * scale)


def test_the_router_loss_of_micro_batches_counts_by_their_tokens():
    rollout, actor = ragged_rollout(prompts=3, n=2), Actor(moe(), router_loss_coef=1.0)
    batch = batch_of(rollout, actor)
    whole = gradient_of(actor, batch, NoLoss())[1]["actor/loss"]
    actor.micro_batch_tokens = 1
    parts = [gradient_of(actor, batch.select([i]), NoLoss())[1]["actor/loss"] for i in range(len(rollout))]
    tokens = torch.tensor([len(rollout.prompt_ids[i]) + int(rollout.lengths[i]) - 1 for i in range(len(rollout))])
    split = gradient_of(actor, batch, NoLoss())[1]["actor/loss"]
    assert split == pytest.approx(float((tokens / tokens.sum()) @ torch.tensor(parts)), rel=1e-5)
    assert split == pytest.approx(whole, rel=0.3), "near the exact one, not equal to it"


def test_the_config_decides_unless_told_otherwise():
    assert router_loss_coef(moe()) == Actor(moe()).router_loss_coef == 0.01
    off = moe(output_router_logits=False)
    assert router_loss_coef(off) == 0.0
    assert experts_per_token(off) == 2
    actor = Actor(off)
    assert "actor/router_loss" not in gradient_of(actor, batch_of(ragged_rollout(), actor), NoLoss())[1]
    assert Actor(off, router_loss_coef=0.2).router_loss_coef == 0.2
    assert Actor(tiny_model("qwen2")).router_loss_coef == 0.0


@pytest.mark.parametrize(
    "coef, message", [(0.1, "needs a mixture of experts; Qwen2ForCausalLM has no routers"), (-1.0, "at least 0; got -1.0")]
)
def test_a_router_loss_where_there_is_none_is_refused(coef, message):
    with pytest.raises(ConfigError, match=message):
        Actor(tiny_model("qwen2"), router_loss_coef=coef)


def test_balancing_balances():
    actor, rollout = Actor(moe(), lr=1e-2, router_loss_coef=1.0), ragged_rollout(prompts=4, n=2, longest=14)
    losses = [actor.update(batch_of(rollout, actor), NoLoss())["actor/router_loss"] for _ in range(12)]
    assert losses[0] > 2.05
    assert losses[-1] < losses[0] - 0.5 * (losses[0] - 2.0)  # 2 experts a token: 2 is even


def test_jitter_of_routers_is_off():
    import transformers

    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.5, head_dim=8)
    actor, rollout = Actor(without_dropout(transformers.MixtralForCausalLM(config))), ragged_rollout()
    assert torch.equal(actor.logprobs(rollout), actor.logprobs(rollout))


# ------------------------------------------------------------------ GGUF


def write_gguf(path, model):
    """A tied Llama as llama.cpp stores it: matrices in blocks of 8 bits, the halves of each head's rows interleaved."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    stored = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            target = f"blk.{layer}.{names[rest]}.weight"
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}.get(rest)
            if heads:
                value = value.reshape(heads, 2, value.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
        else:
            target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        if value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(value, kind)
            writer.add_tensor(target, packed, raw_dtype=kind)
        else:
            writer.add_tensor(target, value)
        stored[target] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    pytest.importorskip("gguf", reason="GGUF needs the package gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    write_gguf(path, tiny_model("llama"))
    return path


def test_a_gguf_file_is_unpacked_into_weights_that_train(gguf_file, tmp_path):
    rollout, tokenizer = ragged_rollout(), char_tokenizer()
    actor = Actor.from_pretrained(gguf_file, tokenizer=tokenizer, lr=1e-3, device="cpu")
    original = dict(tiny_model("llama").named_parameters())
    assert dict(actor.model.named_parameters()).keys() == original.keys(), "a tied head stays tied"
    for name, value in actor.model.named_parameters():
        assert value.dtype == torch.float32
        value = value.detach()
        assert float((value - original[name].detach()).abs().max()) < 0.01 * max(1.0, float(original[name].detach().abs().max())), (
            name
        )  # 8 bits
    actor.update(Experience(rollout=rollout), SupervisedLoss())
    sampled = TransformersEngine(actor, progress=False).generate("1+2=", SamplingParams(n=2, max_new_tokens=8, seed=0))
    torch.testing.assert_close(sampled.logprobs, actor.logprobs(sampled), rtol=0, atol=1e-5)
    actor.save_pretrained(tmp_path)
    assert torch.equal(Actor.from_pretrained(tmp_path, device="cpu").logprobs(rollout), actor.logprobs(rollout))


def test_a_gguf_file_may_be_named_beside_its_folder_and_serves_critic_and_engine(gguf_file):
    by_path = load_causal_lm(gguf_file)
    by_name = load_causal_lm(gguf_file.parent, gguf_file=gguf_file.name, dtype="bfloat16")
    for one, other in zip(by_path.parameters(), by_name.parameters(), strict=True):
        assert other.dtype == torch.bfloat16
        assert float((one - other).detach().abs().max()) <= 0.01 * float(one.detach().abs().max())
    critic = Critic.from_pretrained(gguf_file, device="cpu", lora=LoRA(rank=2))
    assert not critic.values(ragged_rollout()).values.any()
    engine = TransformersEngine.from_pretrained(gguf_file, tokenizer=char_tokenizer(), device="cpu")
    assert len(engine.generate("12", SamplingParams(max_new_tokens=3))) == 1


def test_an_adapter_finds_its_gguf_base_again(gguf_file, tmp_path):
    actor, rollout = (
        Actor.from_pretrained(gguf_file, tokenizer=char_tokenizer(), lora=LoRA(rank=2), lr=1e-2, device="cpu"),
        ragged_rollout(),
    )
    actor.update(Experience(rollout=rollout), SupervisedLoss())
    actor.save_pretrained(tmp_path / "adapter")
    assert torch.equal(Actor.from_pretrained(tmp_path / "adapter", device="cpu").logprobs(rollout), actor.logprobs(rollout))
    actor.save_pretrained(tmp_path / "merged", merged=True)
    torch.testing.assert_close(
        Actor.from_pretrained(tmp_path / "merged", device="cpu").logprobs(rollout), actor.logprobs(rollout), rtol=0, atol=2e-5
    )


def test_gguf_without_its_package_and_with_quantization_is_refused(gguf_file, monkeypatch):
    with pytest.raises(ConfigError, match="unpacked and cannot be quantised on the way"):
        load_causal_lm(gguf_file, quantization=object())
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else plain(name, *rest))
    with pytest.raises(MissingDependencyError, match=r"tiny.Q8_0.gguf needs the package 'gguf'.*rlhf\[gguf\]"):
        load_causal_lm(gguf_file)


# ------------------------------------------------------------------ SmolLM2


@pytest.fixture(scope="session")
def smollm2():
    return Actor.from_pretrained(smollm2_path(), dtype="bfloat16", lora=LoRA(rank=4), lr=1e-4, device="cpu")


@pytest.mark.slow
def test_smollm2_answers_a_question(smollm2):
    engine = TransformersEngine(smollm2, progress=False)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    rollout = engine.generate(chat, SamplingParams(max_new_tokens=12, temperature=0.0))
    assert "Paris" in rollout.texts[0]
    assert sum(parameter.numel() for parameter in smollm2.model.get_base_model().get_input_embeddings().parameters()) == 49152 * 576
    assert smollm2.model.get_base_model().lm_head.weight is smollm2.model.get_base_model().model.embed_tokens.weight


@pytest.mark.slow
def test_smollm2_trains_an_adapter_against_its_own_start(smollm2):
    engine = TransformersEngine(smollm2, progress=False)
    reference = smollm2.reference()
    rollout = engine.generate("The sky is", SamplingParams(n=2, max_new_tokens=8, seed=0))
    before = smollm2.logprobs(rollout)
    assert torch.equal(reference.logprobs(rollout), before)
    assert float((before - rollout.logprobs)[rollout.response_mask].abs().mean()) < 0.05  # two bfloat16 passes of different shapes
    metrics = smollm2.update(Experience(rollout=rollout), SupervisedLoss())
    assert math.isfinite(metrics["actor/grad_norm"])
    assert torch.equal(reference.logprobs(rollout), before)
    assert not torch.equal(smollm2.logprobs(rollout), before)
