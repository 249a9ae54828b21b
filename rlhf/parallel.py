"""Processes: what the other rooms need of several of them, and nothing when there is one.

Every function is the identity in a single process, so that the same script runs in a notebook and under `accelerate launch`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf.errors import ConfigError


def num_processes() -> int:
    """How many processes train together."""
    return torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1


def is_main_process() -> bool:
    """True in the process that writes files, bars and metrics."""
    return num_processes() == 1 or torch.distributed.get_rank() == 0


def sum_over_processes(value: Tensor) -> Tensor:
    """The sum of `value` (same shape everywhere) over all processes."""
    if num_processes() > 1:
        value = value.clone()
        torch.distributed.all_reduce(value)
    return value


def make_accelerator(**kwargs: Any) -> Any:
    """An `accelerate.Accelerator` for a Learner's `parallel=`; keywords go to accelerate.

    Raises:
        ConfigError: more than one process was launched: the learners of this version train in one.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(**kwargs)
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"this version trains in one process; {accelerator.num_processes} were launched. Start the script with python, or with "
            "accelerate launch --num_processes 1"
        )
    return accelerator
