"""LoRA over peft: adapters come in and go out, are merged into copies, and are exchanged for a frozen state without touching the base.

Nothing else touches peft.
"""

from __future__ import annotations

import copy
import json
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.errors import ConfigError, ModelError
from rlhf.models import base_model, load_causal_lm, without_dropout

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters on the linear layers of a model (Hu et al. 2021, arXiv:2106.09685), trained instead of its weights.

    Attributes:
        rank: of the update.
        alpha: the update is scaled by alpha / rank; 2 × rank if None.
        target_modules: names of the layers, or "all-linear" (the head excepted).

    Raises:
        ConfigError: rank or alpha is out of range.
    """

    rank: int = 32
    alpha: float | None = None
    target_modules: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ConfigError(f"rank must be a whole number of at least 1; got {self.rank!r}")
        if self.alpha is not None and not self.alpha > 0:
            raise ConfigError(f"alpha must be above 0, or None for 2 × rank; got {self.alpha}")


def add_lora(model: nn.Module, lora: LoRA | Any) -> nn.Module:
    """Wrap `model` in a `peft.PeftModel` whose adapter alone is trained; `lora` is a `LoRA` or any `peft.LoraConfig`.

    On a GPU the adapter has the dtype of its layers (the learner keeps float32 masters). On a CPU it is float32: products with an inner
    dimension of `rank` are slow in bfloat16 there, see docs/decisions/adapters.md.

    Raises:
        ConfigError: `lora` is something else or does not fit `model`, or `model` has an adapter already.
    """
    import peft

    if is_adapted(model):
        raise ConfigError("the model already has an adapter, which goes on being trained; leave lora out")
    if isinstance(lora, LoRA):
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        alpha: Any = 2 * lora.rank if lora.alpha is None else lora.alpha
        transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's linear layers
        lora = peft.LoraConfig(
            r=lora.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=transposed, task_type="CAUSAL_LM"
        )
    elif not isinstance(lora, peft.LoraConfig):
        raise ConfigError(f"lora must be rlhf.LoRA(rank=...) or a peft.LoraConfig; got {type(lora).__name__}")
    try:
        adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=_on_cpu(model))
    except ValueError as error:  # target_modules that the model does not have, above all
        raise ConfigError(f"the adapter does not fit {type(model).__name__}: {error}") from error
    return without_dropout(adapted)


def _on_cpu(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == "cpu"


def is_adapted(model: Any) -> bool:
    """Whether peft wraps `model`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def load_model(
    path: str | Path,
    *,
    lora: LoRA | Any = None,
    dtype: str | torch.dtype = "float32",
    attn_implementation: str | None = None,
    device: str | torch.device | None = None,
    gguf_file: str | None = None,
    quantization: Any = None,
    trained: bool = False,
) -> Any:
    """A causal language model on its device, with an adapter where `path` holds one or `lora` asks for one.

    Args:
        path: folder, hub name, .gguf file, or the folder of a saved adapter, which goes on being trained on the model it names.
        lora: a new adapter.
        dtype, attn_implementation, gguf_file, quantization: see `load_causal_lm`.
        device: the GPU if there is one, else the CPU.
        trained: the model is loaded to be trained: without an adapter it cannot be quantised.

    Raises:
        ConfigError: `lora` for a model that already has an adapter, or quantised weights to be trained themselves.
        ModelError: nothing can be loaded, or an adapter does not say which model it belongs to.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation, "gguf_file": gguf_file}
    if quantization is not None:  # quantised weights are laid out while they are loaded and cannot be moved
        options |= {"quantization": quantization, "device_map": {"": device}}
    stored = Path(path) / ADAPTER_CONFIG
    if trained and quantization is not None and lora is None and not stored.is_file():
        raise ConfigError("quantised weights cannot be trained; add lora= to train an adapter on them, or leave quantization out")
    if not stored.is_file():
        model = load_causal_lm(path, **options)
        model = model if quantization is not None else model.to(device)
        return model if lora is None else add_lora(model, lora)

    import peft

    if lora is not None:
        raise ConfigError(f"{str(path)!r} holds an adapter, which goes on being trained; leave lora out, or save it with merged=True first")
    base = json.loads(stored.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"the adapter in {str(path)!r} does not say which model it belongs to (base_model_name_or_path in {ADAPTER_CONFIG}); load that "
            "model, wrap it with peft.PeftModel.from_pretrained(model, folder, is_trainable=True) and pass the object"
        )
    try:
        model = load_causal_lm(base, **options)
    except ModelError as error:
        raise ModelError(f"the adapter in {str(path)!r} belongs to {base!r}: {error}") from error
    model = model if quantization is not None else model.to(device)
    adapted = peft.PeftModel.from_pretrained(model, str(path), is_trainable=True, autocast_adapter_dtype=_on_cpu(model))
    return without_dropout(adapted)


# ---------------------------------------------------------------- merging


def merged_model(model: Any) -> Any:
    """A transformers model with the adapter added to its weights: a copy, the weights of `model` stay bit for bit as they are.

    Adding an adapter in place and subtracting it again would let the base drift (1e-3 after 100 rounds in bfloat16).

    Raises:
        ModelError: the base is quantised (adding to 4-bit weights rounds the adapter away), or a tied weight has an adapter.
    """
    if not is_adapted(model):
        return model
    _check_mergeable(model)
    return copy.deepcopy(model).merge_and_unload()


def merged_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters that `model` would have without peft, by the names of the transformers model, adapters added.

    Layers without an adapter are the model's own tensors, the others are new. A tied weight appears once.

    Raises:
        ModelError: see `merged_model`.
    """
    if not is_adapted(model):
        return dict(model.named_parameters())
    _check_mergeable(model)
    with torch.no_grad():
        found = dict(_merged(base_model(model), ""))
    first: dict[int, str] = {}
    return {name: value for name, value in found.items() if first.setdefault(id(value), name) == name}


def parameters_for(target: Any, source: Any) -> dict[str, Tensor]:
    """The parameters of the model `source` by the names of `target`: merged where only `source` has an adapter."""
    return dict(source.named_parameters()) if is_adapted(target) or not is_adapted(source) else merged_parameters(source)


def _merged(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        layer: Any = copy.deepcopy(module)
        while hasattr(layer, "base_layer"):  # wrappers of single parameters are nested
            layer.merge()
            layer = layer.base_layer
        module = layer
    elif isinstance(module, ModulesToSaveWrapper):
        module = module.modules_to_save[module.active_adapters[0]]
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in module.named_children():
        yield from _merged(child, f"{prefix}{name}.")


def _check_mergeable(model: Any) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = base_model(model)
    if getattr(base, "is_quantized", False) or getattr(base, "hf_quantizer", None) is not None:
        raise ModelError(
            "an adapter cannot be merged into quantised weights without rounding it away; save the adapter itself and load it on the "
            "model in full precision"
        )
    owners: dict[int, list[nn.Module]] = {}
    for module in base.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            inner = module.get_base_layer()
            if any(len(owners[id(parameter)]) > 1 for parameter in inner.parameters(recurse=False)):
                raise ModelError(f"{name!r} has an adapter and shares its weight with another layer; merged, both would change. Untie them")


# ---------------------------------------------------------------- the policy of a moment


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters that are being trained, by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters() if parameter.requires_grad}


def adapter_is_zero(model: Any) -> bool:
    """Whether an adapter that is all that is trained adds nothing yet, as a new one does: one factor of every product is 0."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    factors = [parameter for name, parameter in trained.items() if ".lora_B." in name or ".lora_embedding_B." in name]
    plain = all(".lora_" in name and ".lora_magnitude_vector." not in name for name in trained)
    return bool(factors) and plain and not any(bool(parameter.any()) for parameter in factors)


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """The base model inside the block. peft's own switch sets `requires_grad` of all adapters; this one changes nothing else."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    former = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, value in zip(layers, former, strict=True):
            layer._disable_adapters = value


class _Turns:
    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.work = threading.RLock()


_TURNS: weakref.WeakKeyDictionary[nn.Module, _Turns] = weakref.WeakKeyDictionary()
_TURNS_LOCK = threading.Lock()


@contextmanager
def own_turn(model: Any) -> Iterator[None]:
    """One thread at a time: who exchanges the adapter of a model for a moment, and who generates with it step by step.

    Who waits is next: a decode loop that takes a turn for every step lets a waiting reference in between two of them.
    """
    with _TURNS_LOCK:
        turns = _TURNS.setdefault(base_model(model), _Turns())
    with turns.gate:
        turns.work.acquire()
    try:
        yield
    finally:
        turns.work.release()
