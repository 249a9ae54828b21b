"""Optimisers and rates for `optimizer=` and `scheduler=` of Actor and Critic: factories, so that they can be chosen before a model is.

A factory is any callable that takes the list of trained parameters (float32 masters where the weights are short). One with a true
attribute `splits_matrices` is called with two lists instead: the hidden matrices, and the rest (embeddings, heads, norms, biases, experts
stacked in one tensor).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlhf.errors import ConfigError, missing_dependency

SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True)
class adamw:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), the learner's default.

    Attributes:
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, of every parameter.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True)
class adamw_8bit:
    """AdamW whose moments take a byte each (Dettmers et al. 2022, arXiv:2110.02861), from bitsandbytes; see `adamw` for the attributes.

    Raises:
        MissingDependencyError: bitsandbytes is not installed.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise missing_dependency("bitsandbytes", "bitsandbytes", "adamw_8bit")

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class muon:
    """Muon for hidden matrices, AdamW for the rest (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982).

    The orthogonalised step is scaled to the size of AdamW's (0.2 √max(rows, columns)), so that rates carry over.

    Attributes:
        lr: of the hidden matrices.
        adamw_lr: of embeddings, heads, norms, biases and everything else that is not a hidden matrix; `lr` if None.
        momentum: of Muon, Nesterov's.
        weight_decay: decoupled, of every parameter.
        betas, eps: of AdamW.
    """

    lr: float
    adamw_lr: float | None = None
    momentum: float = 0.95
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    splits_matrices: ClassVar[bool] = True

    def __call__(self, matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> torch.optim.Optimizer:
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(
                torch.optim.Muon(
                    matrices, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )
        if rest:
            rate = self.lr if self.adamw_lr is None else self.adamw_lr
            parts.append(adamw(rate, self.betas, self.eps, self.weight_decay)(rest))
        return JoinedOptimizer(parts)


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimisers, each over parameters of its own, as one: schedulers and checkpoints see all groups and one state.

    Args:
        parts: at least one optimiser; no parameter belongs to two of them.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        if not parts:
            raise ConfigError("expected at least one optimiser with parameters; got none")
        self._parts = parts
        self._sizes = [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on the groups and the state held here; loading a state replaces both."""
        start = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            part.param_groups = self.param_groups[start : start + size]
            part.state = self.state
            start += size

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def linear_decay(steps: int, *, warmup: int = 0, final: float = 0.0) -> SchedulerFactory:
    """A rate that rises from 0 over `warmup` optimiser steps and falls in a straight line to `final` times its peak at `steps`.

    The first step already moves: of w warm-up steps, step i (from 0) has the rate (i + 1) / (w + 1).
    """
    return _decay(steps, warmup, final, lambda progress: 1 - progress)


def cosine_decay(steps: int, *, warmup: int = 0, final: float = 0.0) -> SchedulerFactory:
    """`linear_decay` along half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983)."""
    return _decay(steps, warmup, final, lambda progress: 0.5 * (1 + math.cos(math.pi * progress)))


def _decay(steps: int, warmup: int, final: float, shape: Callable[[float], float]) -> SchedulerFactory:
    if not isinstance(steps, int):
        raise ConfigError(f"steps must be a whole number of optimiser steps; got {type(steps).__name__}")
    if not 0 <= warmup < steps:
        raise ConfigError(f"warmup must be at least 0 and below steps; got warmup={warmup}, steps={steps}. Both count optimiser steps")
    if not 0 <= final <= 1:
        raise ConfigError(f"final is a share of the peak rate, between 0 and 1; got {final}")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / (steps - warmup))
        return final + (1 - final) * shape(progress)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class MasterWeights:
    """float32 copies of the trained weights: gradients of any precision are summed in them, steps are rounded once.

    Attributes:
        parameters: what the optimiser steps: a copy for each weight of lower precision, the weight itself else.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self._weights = weights
        self.parameters = [nn.Parameter(weight.detach().float()) if is_short(weight) else weight for weight in weights]

    def collect(self) -> None:
        """Move the gradients of the weights to their copies, adding to what is there."""
        for weight, master in zip(self._weights, self.parameters, strict=True):
            if weight is not master and weight.grad is not None:
                master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
                weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies into the weights, after a step."""
        for weight, master in zip(self._weights, self.parameters, strict=True):
            if weight is not master:
                weight.copy_(master)


def is_short(parameter: Tensor) -> bool:
    """Whether small steps would be rounded away in this dtype."""
    return parameter.dtype in (torch.bfloat16, torch.float16)
