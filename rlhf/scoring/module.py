"""The modules that a forward pass of training goes through: backbone and head in one, so that wrappers see the whole computation.

A head called outside the prepared module's forward leaves the ranks of DDP with different gradients and fails under FSDP2;
therefore `ScoringModule.forward` returns log-probabilities and entropies, not hidden states.

Legend: N packs, L tokens, M counted response tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf.errors import ModelError, RLHFWarning, RolloutError
from rlhf.models import (
    LogitHead,
    ScalarHead,
    at_least_float32,
    attention_masks,
    backbone_of,
    base_model,
    evaluating,
    experts_per_token,
    find_head,
    max_positions,
    text_config,
)
from rlhf.rollout.batch import Rollout
from rlhf.scoring.layout import PackedBatch, collate, plan_micro_batches
from rlhf.scoring.router import load_balancing_loss

# logits of one chunk: 64 MiB in float32. Chunks of fewer than 128 tokens starve the matrix product.
CHUNK_ELEMENTS = 2**24
MIN_CHUNK_TOKENS = 128


class _TokenStatistics(torch.autograd.Function):
    """log-probability of the target and entropy from logits [C, V], keeping one [C, V] tensor and no other for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        scaled = logits / temperature[:, None]
        scaled.sub_(scaled.amax(-1, keepdim=True))
        weights = scaled.exp()
        total = weights.sum(-1)
        log_total = total.log()
        logprobs = scaled.gather(-1, targets[:, None]).squeeze(-1) - log_total
        # sum() adds pairwise; a dot product of V terms would lose three digits
        entropy = log_total - weights.mul_(scaled).sum(-1) / total
        ctx.save_for_backward(scaled, log_total, entropy, targets, temperature)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        scaled, log_total, entropy, targets, temperature = ctx.saved_tensors
        logprob_grad, entropy_grad = grads
        if logprob_grad is None and entropy_grad is None:
            return None, None, None
        centred = scaled - log_total[:, None]
        probabilities = centred.exp()
        factor = torch.zeros_like(log_total) if logprob_grad is None else logprob_grad
        if entropy_grad is None:
            gradient = probabilities.mul_(-factor[:, None])
        else:  # dH/dz = -p (log p + H)
            centred.add_(entropy[:, None]).mul_(entropy_grad[:, None]).add_(factor[:, None])
            gradient = probabilities.mul_(centred).neg_()
        gradient.scatter_add_(-1, targets[:, None], factor[:, None])
        return gradient.div_(temperature[:, None]), None, None


def token_statistics(
    head: LogitHead, hidden: Tensor, targets: Tensor, temperature: Tensor, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, without ever holding logits [M, V].

    Args:
        head: maps hidden states to logits.
        hidden: [M, H].
        targets: int64 [M].
        temperature: [M], > 0; logits are divided by it.
        chunk: tokens whose logits exist at a time; chosen from V if None.

    Returns:
        logprobs, entropy: both [M] (float32, float64 in a float64 model), both differentiable.
    """
    temperature = temperature.to(at_least_float32(hidden.dtype))
    if chunk is None:
        weight: Any = getattr(head.module, "weight", None)
        vocabulary = 2**15 if weight is None else weight.shape[0]
        chunk = max(MIN_CHUNK_TOKENS, CHUNK_ELEMENTS // int(vocabulary))

    def statistics(hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return _TokenStatistics.apply(head.logits(hidden), targets, temperature)

    if len(hidden) <= chunk:
        return statistics(hidden, targets, temperature)
    parts = []
    for start in range(0, len(hidden), chunk):
        piece = (hidden[start : start + chunk], targets[start : start + chunk], temperature[start : start + chunk])
        if torch.is_grad_enabled():
            parts.append(checkpoint(statistics, *piece, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(statistics(*piece))
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


class PackedBackbone(nn.Module):
    """A transformers backbone that takes a `PackedBatch`, under whichever form of mask its family understands."""

    layout: str

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.hidden_size = int(text_config(model).hidden_size)
        attention = getattr(base_model(model).config, "_attn_implementation", None) or "eager"
        self.layout = "packed" if "flash" in attention else "shared" if attention in ("sdpa", "eager") else "padded"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        """[N, L, H], the last hidden states. `mask` is bool [N, L, L] or None for plain causal attention."""
        return self._run(backbone_of(self.model), input_ids, position_ids, mask, None)[0].last_hidden_state

    def _run(
        self, model: Any, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None, readers: Tensor | None
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """The output of backbone or model, and the load-balancing loss of its routers in a tuple if `readers` are given."""
        options = {} if readers is None else {"output_router_logits": True}
        output = model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=self._mask(mask, position_ids), use_cache=False, **options
        )
        if readers is None:
            return output, ()
        return output, (load_balancing_loss(output.router_logits, readers.flatten(), experts_per_token(self.model) or 1),)

    def _mask(self, mask: Tensor | None, position_ids: Tensor) -> Tensor | dict[str, Tensor] | None:
        return None if mask is None else attention_masks(self.model, mask, position_ids[:, :, None] - position_ids[:, None, :])

    def settle_layout(self) -> None:
        """Try the layout on two short rows against separate unpadded passes; fall back to one line a row where they differ."""
        if self.layout != "shared":
            return
        probe = _probe_rollout(self.model)
        with torch.no_grad(), evaluating(self):
            expected = [
                backbone_of(self.model)(
                    input_ids=torch.cat([probe.prompt_ids[i], probe.response_ids[i, :2]])[None].to(self.device), use_cache=False
                ).last_hidden_state[0, len(probe.prompt_ids[i]) - 1 :]
                for i in range(2)
            ]
            want = torch.cat(expected).float()
            tolerance = (1e-3 if want.abs().max() < 1e3 and expected[0].dtype != torch.bfloat16 else 5e-2) * max(
                1.0, float(want.abs().max())
            )
            try:
                got = self._probe(probe)
            except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError):
                got = torch.full_like(want, torch.inf)  # the family takes no such mask: said below
            if (got - want).abs().max() <= tolerance:
                return
        self.layout = "padded"
        warnings.warn(
            f"{type(base_model(self.model)).__name__} does not take masks that let responses share a prompt; rows are computed one by one",
            RLHFWarning,
            stacklevel=3,
        )

    def _probe(self, probe: Rollout) -> Tensor:
        plan = plan_micro_batches(probe, budget=64, hidden_size=self.hidden_size, last_token=True)
        batch = collate(probe, plan[0], last_token=True).to(self.device)
        hidden = self.hidden_states(batch.input_ids, batch.position_ids, batch.mask).flatten(0, 1)
        order = [torch.cat([batch.predicting[batch.rows == i], batch.last[batch.last_rows == i]]) for i in range(2)]
        return hidden[torch.cat(order)].float()


def packed_batches(rollout: Rollout, backbone: PackedBackbone, budget: int, *, last_token: bool = False) -> Iterator[PackedBatch]:
    """The micro-batches of a rollout on the backbone's device, for passes without gradients; see `plan_micro_batches`."""
    check_readable(rollout, backbone.model)
    plan = plan_micro_batches(rollout, budget=budget, layout=backbone.layout, hidden_size=backbone.hidden_size, last_token=last_token)
    for packs in plan:
        yield collate(rollout, packs, layout=backbone.layout, last_token=last_token).to(backbone.device)


def check_readable(rollout: Rollout, model: Any) -> None:
    """Raise a RolloutError for token ids or positions that the model has no embeddings for; on a GPU they would end the process.

    Rotary positions have no table to run out of, so any length is scored with them.
    """
    if not len(rollout):
        return
    vocabulary = base_model(model).get_input_embeddings().weight.shape[0]
    response = rollout.response_ids.masked_fill(~rollout.padding_mask, 0)
    for name, ids in (("prompt_ids", torch.cat(rollout.prompt_ids)), ("response_ids", response)):
        if ids.numel() and int(ids.max()) >= vocabulary:
            raise RolloutError(f"{name} must be below the model's {vocabulary} embeddings, got {int(ids.max())}; of another tokenizer?")
    config = text_config(model)
    positions = None if hasattr(config, "rope_parameters") or hasattr(config, "rope_theta") else max_positions(model)
    longest = max(len(ids) + length for ids, length in zip(rollout.prompt_ids, rollout.lengths.tolist(), strict=True))
    if positions is not None and longest > positions:
        raise RolloutError(
            f"prompt and response must fit the model's {positions} positions, got {longest} tokens; leave such rows out with select"
        )


def _probe_rollout(model: Any) -> Rollout:
    token = [i % text_config(model).vocab_size for i in range(1, 8)]
    return Rollout.build([token[:3]] * 2, [token[3:5], token[5:7]], group=[0, 0])


class ScoringModule(PackedBackbone):
    """A policy as training sees it: packed tokens in, log-probabilities and entropies of the response tokens out.

    Args:
        model: a causal language model of transformers, bare or wrapped by peft.
        fp32_head: compute the head's product in float32 whatever the dtype of the weights.
    """

    head: LogitHead | None

    def __init__(self, model: Any, *, fp32_head: bool = False) -> None:
        super().__init__(model)
        self.head = find_head(model, float32=fp32_head)
        self.settle_layout()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        predicting: Tensor,
        targets: Tensor,
        temperature: Tensor,
        readers: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies, both [M]; see `PackedBatch` for the arguments.

        With `readers` (mixtures of experts only) a third value follows: the load-balancing loss, 0-dim.
        """
        if self.head is None:
            output, router_loss = self._run(base_model(self.model), input_ids, position_ids, mask, readers)
            logits = output.logits.flatten(0, 1).index_select(0, predicting)
            logits = logits.to(at_least_float32(logits.dtype))
            return (*_TokenStatistics.apply(logits, targets, temperature.to(logits.dtype)), *router_loss)
        output, router_loss = self._run(backbone_of(self.model), input_ids, position_ids, mask, readers)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, predicting)
        return (*token_statistics(self.head, hidden, targets, temperature), *router_loss)


class ValueModule(PackedBackbone):
    """A critic as training sees it: packed tokens in, the value before each response token and after the last one out.

    Args:
        model: a backbone, or a causal language model whose head is left unused.
        head: maps hidden states to values; a new one that starts at 0 if None.
    """

    head: ScalarHead

    def __init__(self, model: Any, head: ScalarHead | None = None) -> None:
        super().__init__(model)
        if not hasattr(base_model(model), "get_output_embeddings"):
            raise ModelError(f"a critic needs a transformers model; got {type(model).__name__}")
        self.head = head if head is not None else ScalarHead(self.hidden_size, device=self.device, dtype=at_least_float32(self.dtype))
        self.settle_layout()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        predicting: Tensor,
        last: Tensor,
        readers: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """values [M] before each counted token and last [R] after the last token of each row; with `readers` as in `ScoringModule`."""
        output, router_loss = self._run(backbone_of(self.model), input_ids, position_ids, mask, readers)
        values = self.head(output.last_hidden_state.flatten(0, 1).index_select(0, torch.cat([predicting, last])))
        return (values[: len(predicting)], values[len(predicting) :], *router_loss)
