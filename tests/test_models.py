"""Models come in and go out whole: tokenizers as saved, heads as the model applies them, no dropout, no foreign code."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn

from rlhf import Actor, ConfigError, Critic, ModelError, load_causal_lm, load_tokenizer
from rlhf.models import ScalarHead, as_dtype, backbone_of, end_token_ids, find_head, load_scalar_head, max_positions, without_dropout
from tests.batches import plain_statistics, ragged_rollout
from tests.models import EOS, FAMILIES, char_tokenizer, tiny_model

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def scaled_model(name, **fields):
    """A family that scales its logits, at weights that are large enough to show it."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        **SMALL, vocab_size=64, initializer_range=0.3, pad_token_id=0, eos_token_id=1, bos_token_id=2, **fields
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


# ------------------------------------------------------------------ heads


@pytest.mark.parametrize(
    "model, scale, soft_cap",
    [
        (lambda: tiny_model("gemma2"), 1.0, 5.0),
        (lambda: tiny_model("qwen2"), 1.0, None),
        (lambda: scaled_model("Cohere", logit_scale=0.25), 0.25, None),
        (lambda: scaled_model("Cohere", logit_scale=1.0), 1.0, None),
        (lambda: scaled_model("Granite", logits_scaling=4.0), 0.25, None),
    ],
    ids=["gemma2", "qwen2", "cohere", "cohere unscaled", "granite"],
)
def test_scales_and_soft_caps_around_the_head_are_found_and_give_the_models_logits(model, scale, soft_cap):
    model = model()
    head = find_head(model)
    assert (head.scale, head.soft_cap) == (scale, soft_cap)
    ids = torch.arange(3, 13)[None]
    hidden = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(head.logits(hidden), model(input_ids=ids, use_cache=False).logits, rtol=0, atol=1e-5)
    assert float(head.logits(hidden).detach().abs().max()) > 1, "flat logits would hide a scale"


@pytest.mark.parametrize("name, fields", [("Cohere", {"logit_scale": 0.25}), ("Granite", {"logits_scaling": 4.0})])
def test_scaled_families_are_scored_as_the_model_says(name, fields):
    model, rollout = scaled_model(name, **fields), ragged_rollout(seed=2)
    expected, _ = plain_statistics(model, rollout)
    torch.testing.assert_close(Actor(model).logprobs(rollout), expected.detach(), rtol=0, atol=1e-5)


def test_a_wrong_scale_in_the_config_is_found_by_comparing():
    model = scaled_model("Cohere", logit_scale=0.25)
    model.config.logit_scale = 1.0  # the model goes by its own attribute, set at construction
    model.logit_scale = 0.25
    with pytest.warns(UserWarning, match="not a scaled or soft-capped product"):
        assert find_head(model) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_found_in_every_precision_without_a_warning(family, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_head(tiny_model(family).to(dtype)) is not None


# ------------------------------------------------------------------ tokenizers


def save_beside(folder, family, tokenizer):
    tiny_model(family).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2", "gemma2"])
def test_a_word_level_tokenizer_beside_a_model_comes_back_as_it_was_saved(family, tmp_path):
    """transformers 5 may swap it for the class of the model beside it, which encodes everything to nothing."""
    tokenizer = char_tokenizer()
    expected = tokenizer("3 + 4 = seven", add_special_tokens=False).input_ids
    assert len(expected) == 13
    loaded = load_tokenizer(save_beside(tmp_path, family, tokenizer))
    assert loaded("3 + 4 = seven", add_special_tokens=False).input_ids == expected
    assert loaded.decode(expected, clean_up_tokenization_spaces=False) == "3 + 4 = seven"
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "sort": 1, "ascending": 2}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def test_a_tokenizer_of_words_comes_back_too(tmp_path):
    assert load_tokenizer(save_beside(tmp_path, "qwen2", word_tokenizer()))("sort ascending").input_ids == [1, 2]


def test_a_tokenizer_that_encodes_to_nothing_is_refused(tmp_path):
    folder = save_beside(tmp_path, "qwen2", word_tokenizer())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"  # this is the trap, if it is asked for by name
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="encodes text to no ids; the class in tokenizer_config"):
        load_tokenizer(folder)


def test_a_folder_without_tokenizer_or_model_says_so(tmp_path):
    with pytest.raises(ModelError, match="no tokenizer can be loaded from"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ModelError, match="no causal language model can be loaded from"):
        load_causal_lm(tmp_path / "nothing")


# ------------------------------------------------------------------ loading and saving


@pytest.mark.parametrize("family", FAMILIES)
def test_an_actor_comes_back_as_it_was_saved(family, tmp_path):
    actor, rollout = Actor(tiny_model(family), char_tokenizer()), ragged_rollout()
    actor.save_pretrained(tmp_path)
    loaded = Actor.from_pretrained(tmp_path, device="cpu")
    assert torch.equal(loaded.logprobs(rollout), actor.logprobs(rollout))
    assert loaded.tokenizer("12").input_ids == actor.tokenizer("12").input_ids
    files = {path.suffix for path in tmp_path.iterdir()}
    assert files <= {".safetensors", ".json", ".jinja"}, "no pickle"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_comes_back_with_its_scalar_head(family, dtype, tmp_path):
    head = ScalarHead(32)
    nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    nn.init.constant_(head.linear.bias, 0.5)
    critic, rollout = Critic(tiny_model(family), head=head), ragged_rollout()
    critic.save_pretrained(tmp_path)
    loaded = Critic.from_pretrained(tmp_path, device="cpu", dtype=dtype)
    values, last = critic.values(rollout)
    assert float(values.abs().max()) > 0.1
    got = loaded.values(rollout)
    assert got.values.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    tolerance = {"float32": 0.0, "float64": 1e-4}[dtype]  # the float32 model's own rounding, from the same weights
    torch.testing.assert_close(got.values.float(), values, rtol=0, atol=tolerance)
    torch.testing.assert_close(got.last.float(), last, rtol=0, atol=tolerance)


def test_a_new_critic_says_zero(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    values, last = Critic.from_pretrained(tmp_path, device="cpu").values(ragged_rollout())
    assert not values.any()
    assert not last.any()
    assert not load_scalar_head(tmp_path, 32).linear.weight.any()


def test_a_critic_in_float64_computes_its_values_there():
    assert Critic(tiny_model("qwen2").double()).values(ragged_rollout()).values.dtype == torch.float64
    assert Critic(tiny_model("qwen2").bfloat16()).values(ragged_rollout()).values.dtype == torch.float32


def test_code_beside_the_weights_is_never_run(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="trust_remote_code is not supported"):
        load_causal_lm(tmp_path, trust_remote_code=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    load_causal_lm(tmp_path)


def test_float16_is_refused_by_name_and_by_type():
    for dtype in ("float16", torch.float16, "half"):
        with pytest.raises(ConfigError, match=r"dtype must be one of float32, bfloat16, float64; got .*use bfloat16"):
            as_dtype(dtype)
    assert as_dtype("bfloat16") is as_dtype(torch.bfloat16) is torch.bfloat16


# ------------------------------------------------------------------ dropout


DROPOUT = {
    "qwen2": {"attention_dropout": 0.5},
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", DROPOUT)
def test_dropout_is_off_in_training_too_with_checkpointing(family, checkpointing, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | DROPOUT[family]
    (tmp_path / "config.json").write_text(json.dumps(config))
    actor = Actor.from_pretrained(tmp_path, tokenizer=char_tokenizer(), device="cpu", gradient_checkpointing=checkpointing)
    assert actor.model.training, "checkpointing is switched off in eval mode"
    assert actor.model.is_gradient_checkpointing is checkpointing
    rollout = ragged_rollout()
    first = actor.logprobs(rollout)
    assert torch.equal(first, actor.logprobs(rollout))
    actor.model.eval()
    assert torch.equal(first, actor.logprobs(rollout))


def test_the_check_for_dropout_can_fail():
    model = tiny_model("gpt2").train()
    ids = torch.arange(3, 20)[None]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    without_dropout(model)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert all(value == 0 for name, value in vars(model.config).items() if "pdrop" in name)


# ------------------------------------------------------------------ facts about models


def test_every_end_token_is_known_once():
    model = tiny_model("qwen2", eos=[7, 9])
    model.generation_config.eos_token_id = [9, 7]
    assert set(end_token_ids(model, char_tokenizer())) == {7, 9, EOS}
    assert end_token_ids(tiny_model("qwen2"), None) == (EOS,)


def test_positions_end_where_the_config_says():
    assert max_positions(tiny_model("gpt2")) == max_positions(tiny_model("qwen2")) == 256


def test_what_is_no_language_model_is_refused():
    with pytest.raises(ModelError, match="expected a causal language model of transformers; got Linear"):
        Actor(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no output embeddings"):
        Actor(tiny_model("qwen2").model)


def test_a_scalar_head_starts_unbiased_and_computes_in_its_own_precision():
    head = ScalarHead(4)
    assert head(torch.randn(2, 3, 4).bfloat16()).tolist() == [[0.0] * 3] * 2
    nn.init.ones_(head.linear.weight)
    assert head(torch.ones(1, 4).bfloat16()).dtype == torch.float32
