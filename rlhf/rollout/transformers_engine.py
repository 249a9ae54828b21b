"""The embedded engine: a transformers model decodes in this process, with the weights that are being trained."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from rlhf.adapters import load_model, parameters_for
from rlhf.errors import ConfigError, EngineError, ModelError, RLHFWarning, RolloutError
from rlhf.models import base_model, end_token_ids, find_head, load_tokenizer, max_positions, text_config
from rlhf.parallel import own_seed
from rlhf.rollout.batch import Rollout
from rlhf.rollout.decoding import Call, Decoder
from rlhf.rollout.engine import Prompts, RolloutEngine, encode_prompts
from rlhf.rollout.sampling import SamplingParams, check_sampling

PROGRESS_SECONDS = 0.25  # between looks at how far a call is
LEAVE_SECONDS = 30.0


class TransformersEngine(RolloutEngine):
    """Samples from an Actor, or from a model and tokenizer, without a second copy of the weights.

    Each prompt is run once and its keys and values are handed to all its responses; finished rows leave the batch at once, waiting
    ones join it, those of concurrent calls too. Log-probabilities are log_softmax(logits / temperature) over the whole vocabulary.

    Args:
        source: an Actor (anything with `model` and `tokenizer`), or a causal language model of transformers.
        tokenizer: for a model; an Actor brings its own.
        max_rows: most responses that decode together.
        max_batch_tokens: most tokens of keys and values held at a time; further rows wait.
        max_prefill_tokens: most prompt tokens in one forward pass.
        seed: of the calls whose SamplingParams name none: the same engine seed and calls give the same samples. Each process makes
            seeds of its own from it, and from those of SamplingParams.
        progress: show a bar for calls that take longer than two seconds.

    Raises:
        ModelError: the model has no attention cache that rows could share (state-space layers).
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Any = None,
        *,
        max_rows: int = 256,
        max_batch_tokens: int = 2**18,
        max_prefill_tokens: int = 8192,
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_batch_tokens", max_batch_tokens), ("max_prefill_tokens", max_prefill_tokens)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1; got {value}")
        self._actor = source if hasattr(source, "model") and hasattr(source, "weight_version") else None
        self.model = _model_of(source)
        if not hasattr(self.model, "get_output_embeddings"):
            raise ModelError(f"expected an Actor or a causal language model of transformers; got {type(source).__name__}")
        kinds = set(getattr(text_config(self.model), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds or getattr(base_model(self.model), "_is_stateful", False):
            found = sorted(kinds) or "a recurrent state"
            raise ModelError(f"TransformersEngine needs attention in every layer; this model has {found}. Use SGLangEngine for it")
        self.tokenizer = tokenizer if tokenizer is not None else getattr(source, "tokenizer", None)
        self.max_batch_tokens = max_batch_tokens
        self.progress = progress
        self._seeds = torch.Generator().manual_seed(own_seed(seed))
        self._version = 0
        self._taken_from: weakref.ref[Any] | None = None  # the model that the present weights are a copy of
        self._closed = False
        head = self._actor.module.head if self._actor is not None else find_head(self.model)
        self._decoder = Decoder(
            self.model,
            head,
            self._decode_text,
            max_rows=max_rows,
            max_batch_tokens=max_batch_tokens,
            max_prefill_tokens=max_prefill_tokens,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tokenizer: Any = None,
        dtype: str | torch.dtype = "float32",
        attn_implementation: str | None = None,
        device: str | torch.device | None = None,
        gguf_file: str | None = None,
        quantization: Any = None,
        **options: Any,
    ) -> TransformersEngine:
        """An engine with weights of its own, from a folder (of a model or an adapter), hub name or GGUF file.

        See `Actor.from_pretrained` for the arguments; `options` are those of the engine. With an Actor in the same process,
        `TransformersEngine(actor)` does without the second copy.
        """
        model = load_model(
            path, dtype=dtype, attn_implementation=attn_implementation, device=device, gguf_file=gguf_file, quantization=quantization
        )
        return cls(model.eval(), load_tokenizer(path, gguf_file=gguf_file) if tokenizer is None else tokenizer, **options)

    @property
    def weight_version(self) -> int:  # type: ignore[override]
        """The Actor's, where the weights are shared; else that of the last `update_weights`, 0 before it."""
        return int(self._actor.weight_version) if self._actor is not None else self._version

    def generate(self, prompts: Prompts, sampling: SamplingParams, *, weights: Any = None) -> Rollout:
        """See `RolloutEngine.generate`. Legal in threads and inside a running event loop; concurrent calls decode as one batch."""
        call, rows, version = self._submit(prompts, sampling, weights)
        with tqdm(total=len(call.responses), desc="generate", unit="response", delay=2.0, leave=False, disable=not self.progress) as bar:
            try:
                while not call.future.done():
                    wait([call.future], timeout=PROGRESS_SECONDS)
                    bar.update(call.finished - bar.n)
            except BaseException:
                call.future.cancel()
                wait([call.future], timeout=LEAVE_SECONDS)  # until its rows are gone and the model is as it was
                raise
        return self._rollout(call, rows, version)

    async def agenerate(self, prompts: Prompts, sampling: SamplingParams, *, weights: Any = None) -> Rollout:
        """`generate` for a coroutine: many of them share the running batch, and cancelling one frees its rows."""
        call, rows, version = self._submit(prompts, sampling, weights)
        await asyncio.wrap_future(call.future)
        return self._rollout(call, rows, version)

    def sync(self, source: Any) -> bool:
        """Update the weights if they are not those of `source` at its version; True if it did.

        Equal versions of different models are different weights: two Actors that were never trained both say 0.
        """
        model = _model_of(source)
        taken = model is self.model or (self._taken_from is not None and self._taken_from() is model)
        if taken and getattr(source, "weight_version", None) == self.weight_version:
            return False
        self.update_weights(source)
        return True

    def update_weights(self, source: Any) -> None:
        """Copy the weights of `source` (an Actor or a model with the same parameters) into the engine's model.

        An engine whose model has no adapter takes those of a LoRA actor merged; the actor's own weights stay as they are.

        Raises:
            ModelError: names or shapes of the parameters differ, or the adapter cannot be merged.
            EngineError: responses are being generated, or the engine samples from another Actor.
        """
        model = _model_of(source)
        version = int(getattr(source, "weight_version", self._version + 1))
        if model is self.model:
            self._version = version
            return
        if self._actor is not None:
            raise EngineError("the engine shares its weights with the Actor it was made of; make a TransformersEngine for each Actor")
        with self._decoder.idle(), torch.no_grad():
            own, theirs = dict(self.model.named_parameters()), parameters_for(self.model, model)
            different = sorted(name for name in own.keys() | theirs.keys() if name not in own or name not in theirs)
            different += sorted(name for name in own.keys() & theirs.keys() if own[name].shape != theirs[name].shape)
            if different:
                raise ModelError(
                    f"the weights do not fit this engine's model; {len(different)} names or shapes differ, first {different[0]!r}"
                )
            for name, parameter in own.items():
                parameter.copy_(theirs[name])
            self._version, self._taken_from = version, weakref.ref(model)

    def close(self) -> None:
        """Refuse further calls; the model stays with whoever made it."""
        self._closed = True

    # ---------------------------------------------------------------- pieces of a call

    def _submit(self, prompts: Prompts, sampling: SamplingParams, weights: Any) -> tuple[Call, list[dict[str, Any]], int]:
        """The call, under way; the dataset row of each prompt; the version of the weights that answer it."""
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
        check_sampling(sampling)
        encoded = encode_prompts(prompts, self.tokenizer)
        ids = [entry[0] for entry in encoded]
        seed = own_seed(sampling.seed) if sampling.seed is not None else int(torch.randint(2**62, (1,), generator=self._seeds))
        stop_ids = frozenset((*end_token_ids(self.model, self.tokenizer), *sampling.stop_token_ids))
        if sampling.stop and self.tokenizer is None:
            raise RolloutError("stop strings need a tokenizer, and this engine has none; pass one to the engine or use stop_token_ids")
        call = Call(ids, sampling, self._limits(ids, sampling), seed, stop_ids)
        if weights is not None:
            self.sync(weights)
        version = self.weight_version
        self._decoder.submit(call)
        return call, [entry[1] for entry in encoded], version

    def _limits(self, ids: list[torch.Tensor], sampling: SamplingParams) -> list[int]:
        """Most new tokens of each prompt: what was asked for, cut where the model's positions end."""
        positions = max_positions(self.model)
        vocabulary = base_model(self.model).get_input_embeddings().weight.shape[0]
        limits = []
        for i, prompt in enumerate(ids):
            if not 0 <= int(prompt.min()) <= int(prompt.max()) < vocabulary:
                outside = int(prompt.min()) if prompt.min() < 0 else int(prompt.max())
                raise RolloutError(
                    f"prompt {i} holds the token id {outside}, expected ids from 0 to below the model's {vocabulary} embeddings"
                )
            limit = sampling.max_new_tokens
            if positions is not None:
                if len(prompt) >= positions:
                    raise RolloutError(
                        f"prompt {i} has {len(prompt)} tokens and the model's positions end at {positions}; expected room for a response. "
                        "Shorten it (PromptDataset(max_prompt_tokens=...))"
                    )
                limit = min(limit, positions - len(prompt))
            if len(prompt) + limit > self.max_batch_tokens:
                raise EngineError(
                    f"prompt {i}: prompt and max_new_tokens take {len(prompt) + limit} tokens of keys and values, max_batch_tokens is "
                    f"{self.max_batch_tokens}; raise it or lower max_new_tokens"
                )
            limits.append(limit)
        cut = sum(limit < sampling.max_new_tokens for limit in limits)
        if cut:
            warnings.warn(
                f"{cut} of {len(ids)} prompts leave room for fewer than max_new_tokens={sampling.max_new_tokens}: their responses are cut "
                f"where the model's {positions} positions end and count as truncated",
                RLHFWarning,
                stacklevel=4,
            )
        return limits

    def _rollout(self, call: Call, rows: list[dict[str, Any]], version: int) -> Rollout:
        responses = call.future.result()
        if self.weight_version != version:
            raise EngineError(
                f"the weights went from version {version} to {self.weight_version} while these responses were generated, which makes them "
                "samples of neither; finish generating before the next update"
            )
        n = call.sampling.n
        return Rollout.build(
            [prompt for prompt in call.prompts for _ in range(n)],
            [response.ids for response in responses],
            logprobs=[response.logprobs for response in responses],
            temperature=call.sampling.temperature,
            filtered=call.sampling.filtered,
            group=torch.arange(len(call.prompts)).repeat_interleave(n),
            weight_version=version,
            finish_reasons=[response.finish_reason for response in responses],
            rows=[row for row in rows for _ in range(n)],
            tokenizer=self.tokenizer,
        )

    def _decode_text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def __repr__(self) -> str:
        weights = "shared with the actor" if self._actor is not None else "its own"
        return f"TransformersEngine({type(self.model).__name__}, weights {weights}, version {self.weight_version})"


def _model_of(source: Any) -> Any:
    """The model of an Actor; a model itself as it is (transformers' models have a `model` of their own)."""
    return source.model if hasattr(source, "weight_version") else source
