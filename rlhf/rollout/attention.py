"""Attention of one new token a row, without copying keys and values for every query head that shares them.

transformers' sdpa repeats the keys and values of each head group under an explicit mask, a copy of the whole cache in every layer and
step. The query heads of a group can as well stand as query positions of their one key-value head.

Legend: n rows, H query heads, K key-value heads, D head dimension, L cached tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhf.models import text_config

NAME = "rlhf_grouped_sdpa"


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa for query [n, H, 1, D], key and value [n, K, L, D] and a mask [n, 1, 1, L]; all else goes to sdpa itself.

    Returns:
        [n, 1, H, D], and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, tokens, size = query.shape
    shared = key.shape[1]
    plain = tokens != 1 or heads == shared or attention_mask is None or attention_mask.shape[1:3] != (1, 1)
    if plain or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.reshape(rows, shared, heads // shared, size)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, dropout_p=options.get("dropout", 0.0), scale=options.get("scaling")
    )
    return mixed.reshape(rows, 1, heads, value.shape[-1]), None


@contextmanager
def grouped(model: Any) -> Iterator[None]:
    """Inside the block a model that runs transformers' sdpa with shared key-value heads runs `grouped_attention` instead.

    So does one that runs flash attention, which takes no masks: rows of a batch end at different places in the cache.
    """
    config = text_config(model)
    shared, former = getattr(config, "num_key_value_heads", None), config._attn_implementation
    repeats = former == "sdpa" and shared and shared != config.num_attention_heads
    if not (repeats or "flash" in (former or "")):
        yield
        return
    _register()
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = former


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # a name without a mask function silently gets no mask
