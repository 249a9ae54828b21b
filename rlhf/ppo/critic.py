"""The critic: a model that says what reward is still to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.adapters import LoRA, is_adapted, load_model, merged_model
from rlhf.errors import ModelError
from rlhf.learner import Learner, Loss, ValueOutput, check_options
from rlhf.models import ScalarHead, at_least_float32, backbone_of, load_scalar_head, save_model, text_config
from rlhf.ppo.objectives import ValueLoss
from rlhf.rollout.batch import Rollout
from rlhf.scoring import PackedBatch, ValueModule, packed_batches


class Values(NamedTuple):
    """What a critic says of a rollout.

    Attributes:
        values: [B, T], V of the state before each sampled token; 0 elsewhere.
        last: [B], V of the state after the last token, which bootstraps truncated responses.
    """

    values: Tensor
    last: Tensor


class Critic(Learner):
    """A language model's backbone with a scalar head, trained to predict returns.

    Args:
        model: a backbone or a causal language model of transformers (its head is dropped); the weights are shared, not copied.
        head: maps hidden states to values; a new one that predicts 0 if None.
        options: of `Learner`.
    """

    prefix = "critic"
    module: ValueModule
    last_token = True

    def __init__(self, model: Any, tokenizer: Any = None, *, head: ScalarHead | None = None, **options: Any) -> None:
        if not hasattr(model, "get_output_embeddings"):
            raise ModelError(f"expected a language model or backbone of transformers; got {type(model).__name__}")
        backbone = model if is_adapted(model) else backbone_of(model)
        super().__init__(ValueModule(backbone, head), **options)
        self.model = backbone
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tokenizer: Any = None,
        lora: LoRA | Any = None,
        dtype: str | torch.dtype = "float32",
        attn_implementation: str | None = None,
        device: str | torch.device | None = None,
        gguf_file: str | None = None,
        quantization: Any = None,
        **options: Any,
    ) -> Critic:
        """Load a critic from a folder, hub name or GGUF file of a language model, with the scalar head stored there or a new one.

        See `Actor.from_pretrained` for the arguments; a critic reads ids, so a tokenizer is only saved beside it.
        """
        check_options(cls, options)
        model = load_model(
            path,
            lora=lora,
            trained=True,
            dtype=dtype,
            attn_implementation=attn_implementation,
            device=device,
            gguf_file=gguf_file,
            quantization=quantization,
        )
        head = load_scalar_head(path, text_config(model).hidden_size).to(model.device, at_least_float32(model.dtype))
        return cls(model, tokenizer, head=head, **options)

    def values(self, rollout: Rollout) -> Values:
        """Values before each sampled token [B, T] and after the last one [B], on the CPU, without gradients."""
        return self._within_memory(lambda: self._values(rollout))

    def _values(self, rollout: Rollout) -> Values:
        values = torch.zeros(rollout.response_ids.shape, dtype=self.module.head.linear.weight.dtype)
        last = torch.zeros(len(rollout), dtype=values.dtype)
        for packed in packed_batches(rollout, self.module, self.micro_batch_tokens, last_token=True):
            with torch.no_grad():
                before, after = self._call(packed)
            values[packed.rows.cpu(), packed.columns.cpu()] = before.cpu()
            last[packed.last_rows.cpu()] = after.cpu()
        return Values(values, last)

    def update(self, batch: Any, loss: Loss | None = None, *, epochs: int = 1, mini_batch_size: int | None = None) -> dict[str, float]:
        """`Learner.update` with `ValueLoss()` as the default loss."""
        return super().update(batch, ValueLoss() if loss is None else loss, epochs=epochs, mini_batch_size=mini_batch_size)

    def save_pretrained(self, folder: str | Path, *, merged: bool = False) -> None:
        """Write backbone (the adapter alone under LoRA, unless `merged`), scalar head and tokenizer, for `Critic.from_pretrained`."""
        save_model(folder, merged_model(self.model) if merged else self.model, self.tokenizer, self.module.head)

    def _call(self, packed: PackedBatch, readers: Tensor | None = None) -> tuple[Tensor, ...]:
        routed = () if readers is None else (readers,)
        return self._prepared(packed.input_ids, packed.position_ids, packed.mask, packed.predicting, packed.last, *routed)

    def _output(self, packed: PackedBatch, shape: tuple[int, int]) -> tuple[ValueOutput, Tensor | None]:
        values, _, *router_loss = self._call(packed, self._readers(packed))
        output = ValueOutput(values.new_zeros(shape).index_put((packed.rows, packed.columns), values))
        return output, router_loss[0] if router_loss else None
