"""One optimiser step, done right: micro-batches under a token budget, global weights, clipping, and what to do when it fails.

Legend: B rows, T longest response, b rows of a micro-batch.
"""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlhf.errors import ConfigError, RLHFWarning, unknown_option
from rlhf.models import base_model, experts_per_token, hidden_matrices, router_loss_coef
from rlhf.optim import MasterWeights, adamw, is_short
from rlhf.parallel import gather_objects, sum_gradients, sum_over_processes
from rlhf.rollout.batch import Rollout
from rlhf.rollout.groups import groups_of_all
from rlhf.scoring import Pack, PackedBackbone, PackedBatch, check_readable, collate, plan_micro_batches

OptimizerFactory = Callable[..., torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
DEFAULT_LR = 1e-5
Output = TypeVar("Output")


class PolicyOutput(NamedTuple):
    """What a policy loss sees: log-probabilities of the sampled tokens and entropies, both [b, T], 0 where nothing was sampled."""

    logprobs: Tensor
    entropy: Tensor


class ValueOutput(NamedTuple):
    """What a value loss sees: V of the state before each token, [b, T], 0 where nothing was sampled."""

    values: Tensor


class TrainingBatch(Protocol):
    """What the learner needs of a batch; `rlhf.Experience` is one."""

    rollout: Rollout
    loss_weights: Tensor

    def __len__(self) -> int: ...

    def select(self, indices: Any) -> Any: ...

    def to(self, device: torch.device) -> Any: ...


class Loss(Protocol):
    """Any callable `loss(output, batch, weights) -> LossOutput(loss, metrics)`, where loss is the sum of weighted token losses.

    Optional attributes: `needs`, a set with "entropy" if the loss is differentiated through the entropy; `weights(mask, *, tokens,
    sequences) -> [b, T]`, the weight of each token given the counts of the whole mini-batch (1 / tokens without it). Metrics are
    means over the tokens with a weight, but for names ending in `_max`.
    """

    def __call__(self, output: Any, batch: Any, weights: Tensor, /) -> Any: ...


class Learner(ABC):
    """A module with its optimiser: `forward_backward`, `optim_step`, and `update`, which is both over shuffled mini-batches.

    Args:
        module: what is trained; `module(...)` is called with the tensors of a `PackedBatch`.
        lr: learning rate of the default optimiser; `DEFAULT_LR` if None.
        optimizer: factory `parameters -> torch.optim.Optimizer`, or one of `rlhf.optim`; AdamW (betas .9/.999, eps 1e-8, no weight decay)
            if None. A factory with a true attribute `splits_matrices` is called with two lists, hidden matrices and the rest.
        scheduler: factory `optimizer -> LRScheduler`, stepped once per optimiser step; a constant rate if None.
        max_grad_norm: gradients are scaled down to this norm.
        micro_batch_tokens: most tokens of one forward pass, padding included; a longer single sequence still goes through. None
            takes 16,384 on a GPU and 1,024 on a CPU, where larger passes outgrow the caches and are no faster.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        master_weights: keep float32 copies of bfloat16 weights for the optimiser; without them small steps are rounded away.
        seed: of the shuffling in `update`.
        parallel: an `accelerate.Accelerator` from `rlhf.parallel.make_accelerator`.
        router_loss_coef: weight of the load-balancing loss of a mixture of experts, which is added to every loss; None takes what the
            model's config asks for (`router_aux_loss_coef` if `output_router_logits`), and 0 for models without experts.

    Attributes:
        weight_version: optimiser steps that changed the weights so far.
        skipped_steps: steps left out because a gradient was not finite.
    """

    prefix: str
    last_token = False

    def __init__(
        self,
        module: PackedBackbone,
        *,
        lr: float | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int | None = None,
        gradient_checkpointing: bool = False,
        master_weights: bool = True,
        seed: int = 0,
        parallel: Any = None,
        router_loss_coef: float | None = None,
    ) -> None:
        if optimizer is not None and lr is not None:
            raise ConfigError("lr and optimizer were both given; the factory sets its own rate: leave lr out")
        if lr is not None and not (isinstance(lr, Real) and math.isfinite(lr) and lr >= 0):
            raise ConfigError(f"lr must be a finite number of at least 0; got {lr!r}")
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0; got {max_grad_norm} (float('inf') leaves gradients as they are)")
        if micro_batch_tokens is not None:
            _check_count("micro_batch_tokens", micro_batch_tokens)
        self.module = module
        self.router_loss_coef = _router_loss_coef(module.model, router_loss_coef)
        self.max_grad_norm = max_grad_norm
        self.micro_batch_tokens = micro_batch_tokens or default_micro_batch_tokens(module.device)
        self.weight_version = 0
        self.skipped_steps = 0
        self._shuffle = torch.Generator().manual_seed(seed)
        if gradient_checkpointing:
            module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module.train()
        self._prepared = module if parallel is None else parallel.prepare(module)
        if hasattr(self._prepared, "broadcast_buffers"):
            self._prepared.broadcast_buffers = False  # DDP would wait in each forward pass for processes that have none to make
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self._trained:
            raise ConfigError("no parameter requires a gradient: there is nothing to train")
        self._masters = MasterWeights(self._trained) if master_weights and any(map(is_short, self._trained)) else None
        self._optimized = self._masters.parameters if self._masters else self._trained
        self.optimizer = self._make_optimizer(optimizer or adamw(DEFAULT_LR if lr is None else lr))
        if scheduler is not None and not callable(scheduler):
            raise ConfigError(
                f"scheduler must be a factory, optimizer -> LRScheduler, such as rlhf.linear_decay(1000); got {type(scheduler).__name__}"
            )
        self.scheduler = scheduler(self.optimizer) if scheduler else None

    @property
    def device(self) -> torch.device:
        return self.module.device

    def _make_optimizer(self, factory: OptimizerFactory) -> torch.optim.Optimizer:
        if not callable(factory):
            raise ConfigError(
                f"optimizer must be a factory, parameters -> torch.optim.Optimizer, such as rlhf.adamw(1e-5); got {type(factory).__name__}"
            )
        made = factory(*self._parameters_for(factory))
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer must make a torch.optim.Optimizer of the parameters; got {type(made).__name__}. Factories of rlhf take their "
                "rate first: rlhf.adamw(1e-5)"
            )
        return made

    def _parameters_for(self, factory: OptimizerFactory) -> list[list[nn.Parameter]]:
        if not getattr(factory, "splits_matrices", False):
            return [self._optimized]
        hidden = {id(parameter) for parameter in hidden_matrices(self.module)}
        pairs = list(zip(self._trained, self._optimized, strict=True))
        return [[own for weight, own in pairs if (id(weight) in hidden) is wanted] for wanted in (True, False)]

    def __repr__(self) -> str:
        trained = sum(parameter.numel() for parameter in self._trained)
        total = sum(parameter.numel() for parameter in self.module.parameters())
        dtype = str(self.module.dtype).removeprefix("torch.")
        return (
            f"{type(self).__name__}({type(base_model(self.module.model)).__name__}, trains {trained:,} of {total:,} parameters, {dtype} on "
            f"{self.device}, version {self.weight_version})"
        )

    @abstractmethod
    def _output(self, packed: PackedBatch, shape: tuple[int, int]) -> tuple[Any, Tensor | None]:
        """Run the prepared module on `packed`: its results in [b, T], and the router loss where one is trained with (`_readers`)."""

    def _readers(self, packed: PackedBatch) -> Tensor | None:
        return packed.readers if self.router_loss_coef > 0 else None

    # ---------------------------------------------------------------- one step

    def forward_backward(self, batch: TrainingBatch, loss: Loss) -> dict[str, float]:
        """Add the gradient of `loss` over `batch` to the parameters, in as many micro-batches as the token budget asks for.

        The weights of all micro-batches come from the counts of the whole batch, so any split gives the same gradient. When a
        micro-batch runs out of memory the budget is halved and the whole batch is done again.

        The load-balancing loss of a mixture of experts is a product of two means over tokens. Each micro-batch (and process) computes it
        of its own tokens and counts by their share of all tokens read, so a split changes it a little; in one micro-batch it is exact.

        Returns:
            the loss and its metrics under "<prefix>/…".

        Raises:
            ConfigError: loss weights are negative or NaN, or stand on tokens that the policy did not sample; the loss returns something
                else than a LossOutput with a gradient.
        """
        _check_loss(loss)
        mask = batch.loss_weights > 0
        if not bool((batch.loss_weights >= 0).all()):
            raise ConfigError("loss_weights must be at least 0; got negative numbers or NaN. A token to be left out has weight 0")
        if bool((mask & ~batch.rollout.response_mask.to(mask.device)).any()):
            raise ConfigError(
                "loss_weights must be 0 where response_mask is False (padding, tool output); multiply them by rollout.response_mask"
            )
        rows = mask.any(1)
        tokens, sequences, read = sum_over_processes(torch.stack([mask.sum(), rows.sum(), self._tokens_read(batch.rollout, rows)])).unbind()
        if hasattr(loss, "weights"):
            weights = loss.weights(mask, tokens=tokens, sequences=sequences)
        else:
            weights = mask / tokens.clamp(min=1)
        weights = weights * batch.loss_weights
        trained = rows.nonzero().squeeze(1)
        totals = self._added_gradient(batch.select(trained), loss, weights[trained], read) if len(trained) else _Totals()
        return {f"{self.prefix}/{name}": value for name, value in totals.over_processes().items()}

    def _tokens_read(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """How many tokens these rows (bool [B]) put through the model, as if each stood alone."""
        prompts = torch.tensor([len(ids) for ids in rollout.prompt_ids], dtype=torch.int64)
        read = prompts + rollout.lengths.cpu() - (0 if self.last_token else 1)
        return read.to(rows.device)[rows].sum()

    def _added_gradient(self, batch: TrainingBatch, loss: Loss, weights: Tensor, read: Tensor) -> _Totals:
        """Add the gradient of this process's rows; after an error the gradients are those of before."""
        earlier = [parameter.grad for parameter in self._optimized]
        self.zero_grad()
        done = False
        try:
            totals = self._within_memory(lambda: self._accumulate(batch, loss, weights, read), undo=self.zero_grad)
            done = True
        finally:
            if not done:  # a part of a gradient must not find its way into the next step
                self.zero_grad()
            for parameter, before in zip(self._optimized, earlier, strict=True):
                if before is not None:
                    parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        return totals

    def _accumulate(self, batch: TrainingBatch, loss: Loss, weights: Tensor, read: Tensor) -> _Totals:
        totals = _Totals()
        check_readable(batch.rollout, self.module.model)
        for packs, rows in self._micro_batches(batch.rollout):
            part, part_weights = batch.select(rows), weights[rows].to(self.device)
            packed = collate(part.rollout, packs, layout=self.module.layout, last_token=self.last_token).to(self.device)
            with self._own_gradients():
                output, router_loss = self._output(packed, (len(rows), weights.shape[1]))
            if "entropy" not in getattr(loss, "needs", ()) and isinstance(output, PolicyOutput):
                output = output._replace(entropy=output.entropy.detach())
            value, metrics = _checked_output(loss, loss(output, part.to(self.device), part_weights))
            if router_loss is not None:
                value = value + self.router_loss_coef * router_loss * (packed.readers.sum() / read.to(self.device))
                metrics = {**metrics, "router_loss": router_loss.detach()}
            with self._own_gradients():
                value.backward()
            if self._masters:
                self._masters.collect()
            totals.add(value.detach(), metrics, count=(part_weights > 0).sum())
        return totals

    def _own_gradients(self) -> AbstractContextManager[None]:
        """Keep DDP from averaging: gradients are summed over processes once, in `optim_step`, whatever the number of micro-batches."""
        no_sync: Any = getattr(self._prepared, "no_sync", nullcontext)
        return no_sync()

    def optim_step(self) -> dict[str, float]:
        """Clip the gathered gradients, step the optimiser and the scheduler, and forget the gradients.

        A gradient that is not finite skips the step: weights, optimiser and scheduler stay as they were, and `skipped_steps` counts
        it. Without any gradient nothing happens.

        Returns:
            "<prefix>/grad_norm" before clipping, "<prefix>/lr" and "<prefix>/skipped_steps" (0 or 1).
        """
        sum_gradients(self._optimized)
        gradients = [parameter.grad for parameter in self._optimized if parameter.grad is not None]
        rate = float(self.optimizer.param_groups[0]["lr"])
        metrics = {f"{self.prefix}/grad_norm": 0.0, f"{self.prefix}/lr": rate, f"{self.prefix}/skipped_steps": 0.0}
        if not gradients:
            return metrics
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]).norm()
        metrics[f"{self.prefix}/grad_norm"] = float(norm)
        if torch.isfinite(norm):
            if norm > self.max_grad_norm:
                torch._foreach_mul_(gradients, float(self.max_grad_norm / norm))
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
            if self._masters:
                self._masters.publish()
            self.weight_version += 1
        else:
            self.skipped_steps += 1
            metrics[f"{self.prefix}/skipped_steps"] = 1.0
        self.zero_grad()
        return metrics

    def zero_grad(self) -> None:
        """Forget gathered gradients."""
        for parameter in [*self._trained, *self._optimized]:
            parameter.grad = None

    # ---------------------------------------------------------------- a whole update

    def update(self, batch: TrainingBatch, loss: Loss, *, epochs: int = 1, mini_batch_size: int | None = None) -> dict[str, float]:
        """Train on `batch`: `epochs` passes in shuffled mini-batches, one optimiser step each.

        Args:
            batch: an experience of B rows.
            loss: see `Loss`.
            epochs: passes over the batch.
            mini_batch_size: responses (rows) per optimiser step over all processes; all of them if None. Whole groups are shuffled and
                a group is split only where this size forces it; the last mini-batch of an epoch may be smaller and weighs by its own
                counts.

        Returns:
            metrics under "<prefix>/…": means over the optimiser steps, the largest for `…_max`, sums for `…_steps`.

        Raises:
            ConfigError: no epochs, an empty batch, or a mini-batch larger than the batch.
        """
        _check_count("epochs", epochs)
        _check_loss(loss)
        if not hasattr(batch, "rollout"):
            raise ConfigError(
                f"update takes an Experience; got {type(batch).__name__}. Make one: make_experience(rollout, rewards, actor=actor)"
            )
        if not len(batch):
            raise ConfigError("the batch has no responses; expected at least one to train on. Generate some, or skip this update")
        groups, own = groups_of_all(batch.rollout)
        size = len(groups) if mini_batch_size is None else mini_batch_size
        if not isinstance(size, int) or not 1 <= size <= len(groups):
            raise ConfigError(
                f"mini_batch_size must be between 1 and the {len(groups)} responses of the batch; got {size!r}. It counts responses, not "
                "prompts, over all processes"
            )
        steps: list[dict[str, float]] = []
        for _ in range(epochs):
            for rows in self._mini_batches(groups, size):
                mine = rows[(rows >= own.start) & (rows < own.stop)] - own.start
                steps.append(self.forward_backward(batch.select(mine), loss) | self.optim_step())
        return combine_steps(steps)

    def _mini_batches(self, group: Tensor, size: int) -> Iterator[Tensor]:
        """Row indices of each mini-batch: groups in random order, cut every `size` rows. One mini-batch keeps the order of the rows.

        All processes draw the same order over the rows of all, so that their mini-batches are those of one process.
        """
        if size >= len(group):
            yield torch.arange(len(group))
            return
        _, inverse = torch.unique(group, return_inverse=True)
        order = torch.randperm(int(inverse.max()) + 1, generator=self._shuffle)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        rows = torch.sort(place[inverse], stable=True).indices
        yield from rows.split(size)

    # ---------------------------------------------------------------- scoring and memory

    def _micro_batches(self, rollout: Rollout) -> Iterator[tuple[list[Pack], Tensor]]:
        """Packs of each micro-batch, pointing into the rows (ascending indices into `rollout`) that come with them."""
        plan = plan_micro_batches(
            rollout,
            budget=self.micro_batch_tokens,
            layout=self.module.layout,
            hidden_size=self.module.hidden_size,
            last_token=self.last_token,
        )
        for packs in plan:
            rows = sorted(row for pack in packs for row in pack.rows)
            position = {row: k for k, row in enumerate(rows)}
            yield [Pack(tuple(position[row] for row in pack.rows), pack.length) for pack in packs], torch.tensor(rows)

    def _within_memory(self, work: Callable[[], Output], undo: Callable[[], None] = lambda: None) -> Output:
        """`work()`, again from the start with half the token budget each time it runs out of memory."""
        asked = self.micro_batch_tokens
        while True:
            try:
                result = work()
                break
            except torch.OutOfMemoryError:
                undo()
                if self.micro_batch_tokens == 1:
                    self.micro_batch_tokens = asked  # one row alone is too large: the budget was not at fault
                    raise
            # behind the handler: within it the traceback still holds the tensors of the failed pass
            self.micro_batch_tokens //= 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if self.micro_batch_tokens < asked:
            warnings.warn(
                f"out of memory with micro_batch_tokens={asked}; {self.prefix} goes on with {self.micro_batch_tokens}. Pass this number "
                "from the start, or gradient_checkpointing=True to fit more",
                RLHFWarning,
                stacklevel=3,
            )
        return result


# Names used elsewhere, for the error that suggests ours.
_ALIASES = {
    "learning_rate": "lr",
    "grad_clip": "max_grad_norm",
    "peft_config": "lora",
    "torch_dtype": "dtype",
    "weight_decay": "optimizer",
    "betas": "optimizer",
    "accelerator": "parallel",
    "quantization_config": "quantization",
}


def check_options(kind: type[Learner], options: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a keyword that `kind` does not know, before a large model is loaded to find out."""
    makers = [vars(owner)["__init__"] for owner in kind.__mro__ if "__init__" in vars(owner)] + [kind.from_pretrained]  # type: ignore[attr-defined]
    parameters = [parameter for maker in makers for parameter in inspect.signature(maker).parameters.values()]
    known = dict.fromkeys(parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY)
    for name in options:
        if name not in known:
            raise unknown_option(f"a keyword of {kind.__name__}.from_pretrained", name, known, _ALIASES)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number; got {value!r}")
    if value < 1:
        raise ConfigError(f"{name} must be at least 1; got {value}")


def _check_loss(loss: object) -> None:
    if isinstance(loss, type) or not callable(loss):
        got = f"the class {loss.__name__}; write {loss.__name__}()" if isinstance(loss, type) else f"{loss!r:.80}"
        raise ConfigError(f"loss must be a callable loss(output, batch, weights) -> LossOutput, such as PolicyLoss(); got {got}")


def _checked_output(loss: Any, result: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """What a user's loss returned, if a gradient can be taken of it."""
    name = getattr(loss, "__name__", type(loss).__name__)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise ConfigError(f"{name} must return LossOutput(loss, metrics), metrics a dict; got {type(result).__name__}")
    value, metrics = result
    if not isinstance(value, Tensor) or value.dim():
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"the loss of {name} must be a 0-dim tensor, the sum (losses * weights).sum(); got {got}")
    if not value.requires_grad:
        raise ConfigError(
            f"the loss of {name} must have a gradient, got none; compute it from the output without detach(), and give the loss an "
            'attribute needs = {"entropy"} if it is made of output.entropy'
        )
    return value, metrics


def _router_loss_coef(model: Any, asked: float | None) -> float:
    if asked is None:
        return router_loss_coef(model)
    if not (math.isfinite(asked) and asked >= 0):
        raise ConfigError(f"router_loss_coef must be a finite number of at least 0; got {asked}")
    if asked and experts_per_token(model) is None:
        raise ConfigError(
            f"router_loss_coef={asked} needs a mixture of experts; {type(base_model(model)).__name__} has no routers: leave it out"
        )
    return float(asked)


def default_micro_batch_tokens(device: torch.device) -> int:
    """The token budget of a forward pass where none is given."""
    return 1024 if device.type == "cpu" else 16384


def combine_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """One dictionary for several: means over those that have the name, the largest of `…_max`, the sum of `…_steps`."""
    names = dict.fromkeys(name for step in steps for name in step)
    combined = {}
    for name in names:
        values = [step[name] for step in steps if name in step]
        if name.endswith("_max"):
            combined[name] = max(values)
        else:
            combined[name] = sum(values) if name.endswith("_steps") else sum(values) / len(values)
    return combined


class _Totals:
    """Metrics of micro-batches on their way to one of the mini-batch: sums of losses, token-weighted means, maxima."""

    def __init__(self) -> None:
        self._loss: Tensor | float = 0.0
        self._count: Tensor | int = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, loss: Tensor, metrics: Mapping[str, Tensor], *, count: Tensor) -> None:
        self._loss = self._loss + loss
        self._count = self._count + count
        for name, value in metrics.items():
            value = torch.as_tensor(value).detach()
            if name.endswith("_max"):
                self._sums[name] = torch.maximum(self._sums[name], value) if name in self._sums else value
            else:
                self._sums[name] = self._sums.get(name, 0) + value * count

    def over_processes(self) -> dict[str, float]:
        """Floats, once a mini-batch: the loss and its metrics over the rows of all processes."""
        parts = gather_objects((float(self._loss), int(self._count), {name: float(value) for name, value in self._sums.items()}))
        count = max(1, sum(part[1] for part in parts))
        result = {"loss": sum(part[0] for part in parts)}
        for name in dict.fromkeys(name for part in parts for name in part[2]):
            values = [part[2][name] for part in parts if name in part[2]]
            result[name] = max(values) if name.endswith("_max") else sum(values) / count
        return result
