"""The policy that is trained and the policy it is held against."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from rlhf.adapters import LoRA, adapter_is_zero, adapter_off, is_adapted, load_model, merged_model, own_turn, trained_state
from rlhf.errors import ConfigError, ModelError
from rlhf.learner import Learner, Loss, PolicyOutput, check_options, default_micro_batch_tokens
from rlhf.models import at_least_float32, base_model, load_tokenizer, save_model
from rlhf.ppo.objectives import PolicyLoss
from rlhf.rollout.batch import Rollout
from rlhf.scoring import PackedBatch, ScoringModule, packed_batches


class Actor(Learner):
    """A causal language model that is trained as a policy.

    Args:
        model: of transformers, on the device it is to stay on; its weights are shared, not copied.
        tokenizer: the one whose ids it was trained on.
        fp32_head: compute the head's product in float32 whatever the dtype of the weights.
        options: of `Learner`: lr, optimizer, scheduler, max_grad_norm, micro_batch_tokens, gradient_checkpointing, master_weights,
            seed, parallel.
    """

    prefix = "actor"
    module: ScoringModule

    def __init__(self, model: Any, tokenizer: Any = None, *, fp32_head: bool = False, **options: Any) -> None:
        if not hasattr(model, "get_output_embeddings"):
            raise ModelError(f"expected a causal language model of transformers; got {type(model).__name__}")
        super().__init__(ScoringModule(model, fp32_head=fp32_head), **options)
        self.model = model
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
    ) -> Actor:
        """Load a policy from a folder, hub name or GGUF file.

        Args:
            path: folder, hub name, .gguf file, or a folder with an adapter that `save_pretrained` wrote: it goes on being trained.
            tokenizer: the one stored beside the model if None.
            lora: train an adapter (`rlhf.LoRA` or a `peft.LoraConfig`) instead of the weights.
            dtype: of the weights: "float32", or "bfloat16" with float32 master copies in the optimiser.
            attn_implementation: passed to transformers.
            device: the GPU if there is one, else the CPU.
            gguf_file: name of the GGUF file in the folder or repository `path`.
            quantization: a quantization config of transformers, for an adapter on quantised weights (QLoRA).
            options: see `Actor`.
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
        return cls(model, load_tokenizer(path, gguf_file=gguf_file) if tokenizer is None else tokenizer, **options)

    def logprobs(self, rollout: Rollout) -> Tensor:
        """[B, T] log-probabilities of the sampled tokens at each row's temperature (0 scores as 1), without gradients; 0 off the mask."""
        return self._within_memory(lambda: _logprobs(self._prepared, self.module, rollout, self.micro_batch_tokens))

    def update(self, batch: Any, loss: Loss | None = None, *, epochs: int = 1, mini_batch_size: int | None = None) -> dict[str, float]:
        """`Learner.update` with `PolicyLoss()` as the default loss."""
        return super().update(batch, PolicyLoss() if loss is None else loss, epochs=epochs, mini_batch_size=mini_batch_size)

    def forward_backward(self, batch: Any, loss: Loss) -> dict[str, float]:
        """`Learner.forward_backward`; rows that were sampled greedily (temperature 0) are refused: they carry no policy gradient."""
        greedy = (batch.rollout.temperature == 0) & (batch.loss_weights > 0).any(1)
        if greedy.any():
            raise ConfigError(
                f"{int(greedy.sum())} of {len(greedy)} rows were sampled at temperature 0; expected temperature > 0 in an update. Greedy "
                "responses are for evaluation: sample the training rollout with SamplingParams(temperature=1.0)"
            )
        return super().forward_backward(batch, loss)

    def reference(self) -> Reference | AdapterReference:
        """The policy as it is at this call, frozen; later updates do not reach it.

        A copy of the weights; under LoRA the base is shared, and the adapter is switched off (while it is still zero) or a copy.
        """
        if is_adapted(self.model):
            return AdapterReference(self.module, micro_batch_tokens=self.micro_batch_tokens)
        return Reference(copy.deepcopy(self.model), micro_batch_tokens=self.micro_batch_tokens, fp32_head=self._fp32_head)

    def save_pretrained(self, folder: str | Path, *, merged: bool = False) -> None:
        """Write model and tokenizer to `folder` in transformers' layout.

        Args:
            folder: made if it is not there.
            merged: under LoRA, write the whole model with the adapter added to its weights, instead of the adapter alone.

        Raises:
            ModelError: merging into quantised weights or into tied ones; see `rlhf.adapters.merged_model`.
        """
        save_model(folder, merged_model(self.model) if merged else self.model, self.tokenizer)

    def push_to_hub(self, name: str, **options: Any) -> None:
        """Upload model and tokenizer; keywords go to transformers' `push_to_hub`."""
        self.model.push_to_hub(name, **options)
        if self.tokenizer is not None:
            self.tokenizer.push_to_hub(name, **options)

    @property
    def _fp32_head(self) -> bool:
        return self.module.head is not None and self.module.head.float32

    def _output(self, packed: PackedBatch, shape: tuple[int, int]) -> tuple[PolicyOutput, Tensor | None]:
        where = (packed.rows, packed.columns)
        readers = self._readers(packed)
        logprobs, entropy, *router_loss = self._prepared(*_arguments(packed), *([] if readers is None else [readers]))
        output = PolicyOutput(*(value.new_zeros(shape).index_put(where, value) for value in (logprobs, entropy)))
        return output, router_loss[0] if router_loss else None


class Reference:
    """A frozen policy. Anything with `logprobs(rollout) -> [B, T]` can take its place: a teacher, a server.

    Args:
        model: a causal language model; it is set to eval mode and never trained.
        micro_batch_tokens: most tokens of one forward pass; see `Learner`.
        fp32_head: see `Actor`.
    """

    def __init__(self, model: Any, *, micro_batch_tokens: int | None = None, fp32_head: bool = False) -> None:
        self.module = ScoringModule(model, fp32_head=fp32_head).eval().requires_grad_(False)
        self.micro_batch_tokens = micro_batch_tokens or default_micro_batch_tokens(self.module.device)

    def logprobs(self, rollout: Rollout) -> Tensor:
        """[B, T] log-probabilities of the sampled tokens at each row's temperature (0 scores as 1); 0 off the mask."""
        return _logprobs(self.module, self.module, rollout, self.micro_batch_tokens)

    def __repr__(self) -> str:
        return f"Reference({type(self.module.model).__name__}, a frozen copy)"


class AdapterReference:
    """The policy of a moment, on the base weights that the actor goes on sharing: its adapter switched off, or a frozen copy of it.

    Whatever is trained besides the adapter (`modules_to_save`) is part of the copy. The actor's parameters, their gradients and
    `requires_grad` are never touched; an engine that samples from the same model meanwhile waits for the pass to end.

    Args:
        module: of an actor whose model peft wraps, in the state that is to be kept.
        micro_batch_tokens: most tokens of one forward pass; see `Learner`.
    """

    def __init__(self, module: ScoringModule, *, micro_batch_tokens: int | None = None) -> None:
        self.module = module
        self.micro_batch_tokens = micro_batch_tokens or default_micro_batch_tokens(module.device)
        self._frozen = None if adapter_is_zero(module.model) else trained_state(module)

    def logprobs(self, rollout: Rollout) -> Tensor:
        """[B, T] log-probabilities of the sampled tokens at each row's temperature (0 scores as 1); 0 off the mask."""
        with own_turn(self.module.model), nullcontext() if self._frozen is not None else adapter_off(self.module.model):
            return _logprobs(self._scored, self.module, rollout, self.micro_batch_tokens)

    def __repr__(self) -> str:
        kept = "adapter off" if self._frozen is None else "a frozen copy of the adapter"
        return f"AdapterReference({type(base_model(self.module.model)).__name__}, base shared with the actor, {kept})"

    def _scored(self, *arguments: Any) -> tuple[Tensor, ...]:
        return self.module(*arguments) if self._frozen is None else functional_call(self.module, self._frozen, arguments)


def _arguments(packed: PackedBatch) -> tuple[Tensor | None, ...]:
    return packed.input_ids, packed.position_ids, packed.mask, packed.predicting, packed.targets, packed.temperature


def _logprobs(module: Any, backbone: ScoringModule, rollout: Rollout, budget: int) -> Tensor:
    """[B, T] on the CPU, without gradients; `module` is `backbone` as prepared for its processes."""
    result = torch.zeros(rollout.response_ids.shape, dtype=at_least_float32(backbone.dtype))
    for packed in packed_batches(rollout, backbone, budget):
        with torch.no_grad():
            logprobs, _ = module(*_arguments(packed))
        result[packed.rows.cpu(), packed.columns.cpu()] = logprobs.to(result)
    return result
