"""Decode attention that shares keys and values between query heads: the same numbers without the copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf import SamplingParams, TransformersEngine
from rlhf.rollout import attention
from tests.models import FAMILIES, tiny_model


class _Layer(torch.nn.Module):
    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize("tokens", [1, 5])
def test_grouped_attention_equals_transformers_sdpa(tokens: int) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch.manual_seed(0)
    query, key, value = torch.randn(4, 6, tokens, 8), torch.randn(4, 2, 11, 8), torch.randn(4, 2, 11, 8)
    mask = torch.rand(4, 1, tokens, 11) > 0.4
    mask[..., 0] = True
    for given in (mask, torch.where(mask, 0.0, -torch.inf), None):
        expected, _ = sdpa_attention_forward(_Layer(), query, key, value, given, scaling=0.3)
        got, weights = attention.grouped_attention(_Layer(), query, key, value, given, scaling=0.3)
        assert weights is None
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_serves_decode_passes_of_sdpa_models_with_shared_heads_only(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    for implementation in ("sdpa", "eager"):
        model = tiny_model(family, attn_implementation=implementation)
        engine = TransformersEngine(model, progress=False)
        shapes: list[int] = []

        def spy(module: Any, query: torch.Tensor, *args: Any, seen: list[int] = shapes, **options: Any) -> Any:
            seen.append(query.shape[2])
            return attention.grouped_attention(module, query, *args, **options)

        attention._register()
        monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, spy)
        engine.generate([[5, 6, 7]], SamplingParams(n=2, max_new_tokens=4, min_new_tokens=4))
        expected = 3 * model.config.num_hidden_layers if implementation == "sdpa" and family != "gpt2" else 0
        assert shapes == [1] * expected
        assert model.config._attn_implementation == implementation


def test_the_models_own_implementation_is_back_after_a_failure() -> None:
    model = tiny_model("qwen2")
    names = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: names.append(model.config._attn_implementation) or 1 / 0)
    with pytest.raises(ZeroDivisionError), attention.grouped(model):
        model(torch.tensor([[5]]))
    assert names == [attention.NAME]
    assert model.config._attn_implementation == "sdpa"


def test_under_its_name_a_forward_without_a_mask_is_still_causal() -> None:
    """transformers gives a name it has no mask function for no mask at all, silently."""
    model, ids = tiny_model("gemma2"), torch.arange(3, 23)[None]  # longer than the window of 8
    with torch.no_grad():
        expected = model(ids).logits
        with attention.grouped(model):
            got = model(ids).logits
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
