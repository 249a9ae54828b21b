"""Models come in and go out here: loading, LoRA, heads, saving. Nothing else touches transformers' loading or peft.

Legend: B rows, L tokens of a forward pass, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.errors import ConfigError, MissingDependencyError, ModelError, RLHFWarning, missing_dependency

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype for a name ("float32", "bfloat16", "float64") or a torch dtype; float16 is refused."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r} (float16 would need loss scaling: use bfloat16)")


def gguf_parts(path: str | Path, gguf_file: str | None = None) -> tuple[str, str | None]:
    """Folder (or hub name) and file of a model in GGUF; (path, None) of any other."""
    if gguf_file is None and str(path).endswith(".gguf"):
        path, gguf_file = Path(path).parent, Path(path).name
    if gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise missing_dependency("gguf", "gguf", f"reading {gguf_file}")
    return str(path), gguf_file


def load_tokenizer(path: str | Path, *, gguf_file: str | None = None) -> Any:
    """The tokenizer stored at `path` (a folder, a hub name or a .gguf file), as it was saved.

    transformers 5 replaces a generic tokenizer by the class of the model beside it (a word-level tokenizer next to a qwen2 config
    comes back as `Qwen2Tokenizer` and encodes everything to nothing), so a generic one is loaded by its own class.

    Raises:
        ModelError: nothing there can be loaded, or the tokenizer encodes plain text to no ids at all.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    folder, gguf_file = gguf_parts(path, gguf_file)
    stored = None
    try:
        if gguf_file is not None:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
        else:
            stored = get_tokenizer_config(folder).get("tokenizer_class")
            generic = stored in {"TokenizersBackend", "PreTrainedTokenizerFast"}
            tokenizer = (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no tokenizer can be loaded from {str(path)!r}: {error}; pass tokenizer= or save one beside the model") from error
    words = [token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens]
    if words and not any(tokenizer(text, add_special_tokens=False).input_ids for text in ("a 1", words[0], words[-1])):
        raise ModelError(
            f"the tokenizer of {str(path)!r} ({type(tokenizer).__name__}) encodes text to no ids; the class in tokenizer_config.json "
            f"({stored!r}) does not fit its tokenizer.json. Load it with the right class and pass tokenizer="
        )
    return tokenizer


def load_causal_lm(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    attn_implementation: str | None = None,
    gguf_file: str | None = None,
    quantization: Any = None,
    **kwargs: Any,
) -> Any:
    """A causal language model from a folder, hub name or GGUF file, in `dtype`, without dropout.

    Args:
        path: folder with safetensors, a hub name, or a .gguf file. Code that lies beside the weights is never run.
        dtype: of the weights. Those of a GGUF file are unpacked to it.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...; if None transformers' choice, but for models that cap their
            attention (Gemma 2), which "sdpa" silently leaves out: "eager".
        gguf_file: name of the GGUF file in the folder or repository `path`.
        quantization: a quantization config of transformers (`BitsAndBytesConfig` for QLoRA); such weights take an adapter and cannot be
            trained themselves.
        kwargs: passed on to `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ModelError: nothing can be loaded.
        MissingDependencyError: the package that reads GGUF or runs the quantization is not installed.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    if kwargs.pop("trust_remote_code", False):
        raise ConfigError("trust_remote_code is not supported: load such a model yourself and pass the object")
    options: dict[str, Any] = {"dtype": as_dtype(dtype), **kwargs}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    folder, gguf_file = gguf_parts(path, gguf_file)
    if gguf_file is not None:
        if quantization is not None:
            raise ConfigError("the weights of a GGUF file are unpacked and cannot be quantised on the way; leave quantization out")
        options["gguf_file"] = gguf_file
        if hasattr(transformers, "GgufConfig"):  # without it the weights stay in their blocks, which nothing can train
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    elif quantization is not None:
        options["quantization_config"] = quantization
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except ImportError as error:
        if quantization is None:
            raise
        raise MissingDependencyError(
            f"quantization={type(quantization).__name__} needs a package that is not installed: {error}; for BitsAndBytesConfig run "
            "pip install 'rlhf[bitsandbytes]'"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"no causal language model can be loaded from {str(path)!r}: {error}") from error
    if gguf_file is not None:
        model.name_or_path = model.config.name_or_path = str(Path(folder) / gguf_file)  # where an adapter finds its base again
    capped = getattr(text_config(model), "attn_logit_softcapping", None)
    if attn_implementation is None and capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    return without_dropout(model)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout probability (and the jitter of routers) of `model` to 0 in place: a ratio of two forward passes must not be noise.

    Gradient checkpointing needs train mode, so eval mode is no way to switch dropout off.
    """
    configs = [getattr(model, "config", None), getattr(getattr(model, "config", None), "text_config", None)]
    for owner in [*filter(None, configs), *model.modules()]:
        for name, value in list(vars(owner).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):  # dropout, attn_pdrop, layerdrop, router_jitter_noise
                setattr(owner, name, 0.0)
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)):
            module.p = 0.0
    return model


def base_model(model: Any) -> Any:
    """The transformers model inside a peft wrapper, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_config(model: Any) -> Any:
    """The config of the language part of `model`."""
    config = base_model(model).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def experts_per_token(model: Any) -> int | None:
    """How many experts the model's routers choose for a token, None where it has no routers to balance."""
    config = text_config(model)
    return getattr(config, "num_experts_per_tok", None) if hasattr(config, "router_aux_loss_coef") else None


def router_loss_coef(model: Any) -> float:
    """The coefficient of the load-balancing loss that the model's config asks for (`output_router_logits` switches it on); else 0."""
    config = text_config(model)
    asked = experts_per_token(model) is not None and getattr(config, "output_router_logits", False)
    return float(config.router_aux_loss_coef) if asked else 0.0


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The [out, in] weights inside `module` that map hidden states to hidden states: no embeddings, no heads, no vectors."""
    from transformers import PreTrainedModel

    ends: list[nn.Module | None] = []
    for part in module.modules():
        if isinstance(part, (nn.Embedding, ScalarHead)):
            ends.append(part)
        elif isinstance(part, PreTrainedModel):
            ends.append(part.get_output_embeddings())
    apart = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return [parameter for parameter in module.parameters() if parameter.dim() == 2 and id(parameter) not in apart]


def backbone_of(model: Any) -> Any:
    """The module of a causal language model (or bare backbone) that maps ids to hidden states [B, L, H]."""
    base = base_model(model)
    if base.get_output_embeddings() is None:
        return base
    backbone = getattr(base, base.base_model_prefix, None)
    if backbone is None or backbone is base:
        raise ModelError(f"{type(base).__name__} has no backbone under {base.base_model_prefix!r}; expected a decoder with a separate head")
    return backbone


@dataclass(frozen=True)
class LogitHead:
    """What stands between the last hidden state and the logits: scale · head(h), softly capped where the model does so."""

    module: nn.Module
    scale: float = 1.0
    soft_cap: float | None = None
    float32: bool = False

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [..., V] of hidden states [..., H]; the product itself runs in the compute dtype unless `float32`."""
        if self.float32:
            weight, bias = self.module.weight, getattr(self.module, "bias", None)
            logits = nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())  # type: ignore[arg-type]
        else:
            logits = self.module(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits.float() if logits.dtype != torch.float64 else logits


def find_head(model: Any, *, float32: bool = False) -> LogitHead | None:
    """The head of `model`, checked against `model(...).logits`; None, with one warning, where it cannot be reproduced.

    Scales (Cohere, Granite, MiniCPM) and soft caps (Gemma) are read off the config, then tried on a few tokens.
    """
    base = base_model(model)
    module = base.get_output_embeddings()
    if module is None:
        raise ModelError(f"{type(base).__name__} has no output embeddings; a policy must be a causal language model")
    config = text_config(base)
    scales = [1.0]
    for name, invert in (("logit_scale", False), ("logits_scaling", True)):
        value = getattr(config, name, None)
        if value:
            scales.insert(0, 1.0 / value if invert else float(value))
    if getattr(config, "dim_model_base", None):
        scales.insert(0, config.dim_model_base / config.hidden_size)
    soft_cap = getattr(config, "final_logit_softcapping", None)

    device = next(base.parameters()).device
    ids = torch.arange(1, 7, device=device).remainder(config.vocab_size)[None]
    with torch.no_grad(), evaluating(base):
        expected = base(input_ids=ids, use_cache=False).logits
        hidden = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        tolerance = (3e-2 if hidden.dtype == torch.bfloat16 else 1e-4) * max(1.0, float(expected.abs().max()))
        for scale in scales:
            head = LogitHead(module, scale, soft_cap)
            if (head.logits(hidden) - expected).abs().max() <= tolerance:
                if float32 and not isinstance(module, nn.Linear):
                    raise ConfigError(
                        f"fp32_head needs a plain linear head; got {type(module).__name__}. Keep adapters off the head, or leave it out"
                    )
                return LogitHead(module, scale, soft_cap, float32)
    warnings.warn(
        f"the logits of {type(base).__name__} are not a scaled or soft-capped product of its head and last hidden state; "
        "whole [tokens, V] logits are computed instead, which takes more memory",
        RLHFWarning,
        stacklevel=2,
    )
    return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block (a KV cache is refused while checkpointing trains), the former mode after it."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: those of the model's generation config (there may be several) and the tokenizer's own."""
    base = base_model(model)
    ids: list[int] = []
    for owner in (getattr(base, "generation_config", None), getattr(base, "config", None)):
        value = getattr(owner, "eos_token_id", None)
        ids += [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if getattr(tokenizer, "eos_token_id", None) is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(int(i) for i in ids))


def max_positions(model: Any) -> int | None:
    """How many tokens the model's positions reach, None where it states no limit."""
    config = text_config(model)
    value = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(value) if value else None


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where `dtype` is: what values and statistics are computed in."""
    return torch.promote_types(dtype, torch.float32)


class ScalarHead(nn.Module):
    """A linear map from hidden states [..., H] to one number each [...]; starts at 0 so that a new critic is unbiased."""

    def __init__(self, hidden_size: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)


SCALAR_HEAD_FILE = "scalar_head.safetensors"


def save_model(folder: str | Path, model: Any, tokenizer: Any = None, scalar_head: ScalarHead | None = None) -> None:
    """Write model, tokenizer and scalar head to `folder` in transformers' layout (safetensors and JSON, no pickle)."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # with peft's own choice a save looks for the base model's config, on the hub if need be; vocabularies are never resized here
    model.save_pretrained(folder, **({"save_embedding_layers": False} if hasattr(model, "peft_config") else {}))
    if tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    if scalar_head is not None:
        save_file({name: value.contiguous() for name, value in scalar_head.state_dict().items()}, folder / SCALAR_HEAD_FILE)


def load_scalar_head(path: str | Path, hidden_size: int) -> ScalarHead:
    """The scalar head stored in `path` by `save_model`; a new one (all 0) where there is none."""
    from safetensors.torch import load_file

    head = ScalarHead(hidden_size)
    stored = Path(path) / SCALAR_HEAD_FILE
    if stored.is_file():
        head.load_state_dict(load_file(stored))
    return head


def attention_masks(model: Any, allowed: Tensor, distance: Tensor) -> Tensor | dict[str, Tensor]:
    """An explicit mask in the form that the model's family takes: bool or additive, one tensor or one by type of layer.

    Args:
        model: a transformers model, bare or wrapped by peft.
        allowed: bool [N, Q, K], which keys each query may see.
        distance: int64 [N, Q, K], position of the query minus position of the key, for layers with a sliding window.

    Raises:
        ModelError: some layers attend in a way that no such mask expresses (chunks, state-space layers).
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    kinds: list[str] = getattr(config, "layer_types", None) or []
    by_layer = bool(kinds) and _masks_by_layer_type(backbone_of(model).__class__)
    if set(kinds) - {"full_attention", "sliding_attention"} or (len(set(kinds)) > 1 and not by_layer):
        name = type(base_model(model)).__name__
        raise ModelError(f"{name} takes no mask of its own for each of its kinds of layers, {sorted(set(kinds))}")
    full = allowed[:, None]
    sliding = full if window is None else full & (distance < window)[:, None]
    if config._attn_implementation == "eager":
        full, sliding = _additive(full, model), (_additive(sliding, model) if sliding is not full else None)
        sliding = full if sliding is None else sliding
    if by_layer:
        return {kind: sliding if kind == "sliding_attention" else full for kind in dict.fromkeys(kinds)}
    return sliding


def _additive(allowed: Tensor, model: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


@functools.cache
def _masks_by_layer_type(backbone: type) -> bool:
    """Whether a backbone's forward takes a dict of masks; only its source tells (Mistral has layer types and takes one tensor)."""
    try:
        return "causal_mask_mapping := attention_mask" in inspect.getsource(backbone)
    except (OSError, TypeError):
        return False
