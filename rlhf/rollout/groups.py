"""Which rows answer one prompt, over all processes."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.errors import RolloutError
from rlhf.parallel import gather_objects, gather_rows, process_index
from rlhf.rollout.batch import Rollout

GLOBAL_GROUP = "global_group"


def has_global_groups(rollout: Rollout) -> bool:
    """Whether the rows say in `extras["global_group"]` (int64 [B]) which rows of other processes answer the same prompt.

    Without it the groups of a process are its own, as they are when each process samples its own prompts.

    Raises:
        RolloutError: it is there in some processes only.
    """
    marked = set(gather_objects(GLOBAL_GROUP in rollout.extras))
    if len(marked) > 1:
        raise RolloutError(f"extras[{GLOBAL_GROUP!r}] must be set in all processes or in none; set it in the rollouts of all")
    return marked.pop()


def groups_of_all(rollout: Rollout) -> tuple[Tensor, slice]:
    """The groups of the rows of all processes, int64 [ΣB], rows in the order of the processes, and the slice of this one's rows.

    The ids of a process become distinct from those of all others unless `extras["global_group"]` says otherwise.
    """
    if has_global_groups(rollout):
        return gather_rows(torch.as_tensor(rollout.extras[GLOBAL_GROUP], dtype=torch.int64))
    distinct, own = torch.unique(rollout.group, return_inverse=True)
    counts = gather_objects(len(distinct))
    return gather_rows(own + sum(counts[: process_index()]))
