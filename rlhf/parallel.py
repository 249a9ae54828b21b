"""Processes: what the other rooms need of several of them, and nothing when there is one.

Every process holds its own prompts, rollout and rewards; weights, gradients, statistics and metrics are common. Every function is the
identity in a single process, so that the same script runs in a notebook and under `accelerate launch`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf.errors import ConfigError

Item = TypeVar("Item")

# gradients travel in pieces of this many bytes: few messages, little extra memory
BUCKET_BYTES = 2**26


def num_processes() -> int:
    """How many processes train together."""
    return torch.distributed.get_world_size() if _launched() else 1


def process_index() -> int:
    """Which of them this is, from 0."""
    return torch.distributed.get_rank() if _launched() else 0


def is_main_process() -> bool:
    """True in the one process that writes files, bars and metrics."""
    return process_index() == 0


def _launched() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def own_share(items: Sequence[Item]) -> list[Item]:
    """This process's part of a list that all of them hold: every item goes to exactly one process, sizes differ by one at most."""
    return list(items[process_index() :: num_processes()])


def own_seed(seed: int) -> int:
    """A seed of this process's own: with one seed for all, every process would sample the same responses."""
    return seed + process_index() * 100_003


def gather_objects(value: Item) -> list[Item]:
    """`value` of every process (small, picklable), in the order of the processes."""
    if num_processes() == 1:
        return [value]
    gathered: list[Any] = [None] * num_processes()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def sum_over_processes(value: Tensor) -> Tensor:
    """The sum of `value` (same shape and dtype everywhere) over all processes, on its device."""
    if num_processes() == 1:
        return value
    total = value.detach().clone().to(_communication_device())
    torch.distributed.all_reduce(total)
    return total.to(value.device)


def gather_rows(value: Tensor) -> tuple[Tensor, slice]:
    """The rows of all processes one after the other, and which of them are this process's.

    Args:
        value: [N_p, ...], N_p may differ between processes, the other dimensions may not.

    Returns:
        rows [ΣN_p, ...], on the device of `value`, and the slice that holds its own.
    """
    if num_processes() == 1:
        return value, slice(0, len(value))
    device = _communication_device()
    counts = gather_objects(len(value))
    padded = torch.zeros(max(counts), *value.shape[1:], dtype=value.dtype, device=device)
    padded[: len(value)] = value.detach().to(device)
    gathered = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(gathered, padded)
    rows = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).to(value.device)
    start = sum(counts[: process_index()])
    return rows, slice(start, start + len(value))


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace the gradient of each parameter by its sum over all processes; a process without one counts as 0.

    Called once per optimiser step, so that processes may run different numbers of micro-batches, or none.
    """
    if num_processes() == 1:
        return
    anywhere = sum_over_processes(torch.tensor([float(parameter.grad is not None) for parameter in parameters]))
    bucket: list[Tensor] = []
    size = 0
    for parameter, holders in zip(parameters, anywhere.tolist(), strict=True):
        if not holders:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bytes_ = parameter.grad.numel() * parameter.grad.element_size()
        if bucket and (size + bytes_ > BUCKET_BYTES or bucket[0].dtype != parameter.grad.dtype):
            _sum_bucket(bucket)
            bucket, size = [], 0
        bucket.append(parameter.grad)
        size += bytes_
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _communication_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.distributed.get_backend() == "nccl" else torch.device("cpu")


def make_accelerator(**options: Any) -> Any:
    """An `accelerate.Accelerator` for the `parallel=` of Actor and Critic: data parallel over the processes that were launched.

    On a machine without GPUs start two with `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2`, or with
    `torchrun --nproc_per_node 2`; `--cpu --num_processes 2` starts one.

    Args:
        options: of `accelerate.Accelerator`. Micro-batches are the learner's: gradient accumulation and mixed precision are refused.

    Raises:
        ConfigError: an option that the learner takes care of, or fewer processes than the launcher announced.
    """
    from accelerate import Accelerator

    for name, advice in (
        ("gradient_accumulation_steps", "micro_batch_tokens of Actor and Critic"),
        ("mixed_precision", "dtype='bfloat16' of from_pretrained"),
    ):
        if options.get(name) not in (None, 1, "no"):
            raise ConfigError(f"{name}={options[name]!r} is not accelerate's to do here; use {advice}")
    accelerator = Accelerator(**{"cpu": not torch.cuda.is_available(), **options})
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced != accelerator.num_processes:
        raise ConfigError(
            f"the launcher announced {announced} processes and accelerate sees {accelerator.num_processes}; on CPUs use "
            "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu, or torchrun"
        )
    return accelerator
