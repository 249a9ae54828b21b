"""One set of metrics for several processes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf.parallel import gather_objects

_SUMS = frozenset({"rollout/rows", "rollout/groups", "rollout/episodes", "rollout/response_tokens", "experience/trained_tokens"})


def combine_processes(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step over all processes: sums of counts, extremes of `min` and `max`, the slowest's times, else means by rows.

    What the learner returns is common to all processes already. A NaN (no score anywhere in a process) is left out of means and
    extremes. Standard deviations are means of those of the processes.
    """
    parts = gather_objects(dict(metrics))
    if len(parts) == 1:
        return parts[0]
    combined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        known = [(part[name], part.get("rollout/rows", 1.0)) for part in parts if name in part and not math.isnan(part[name])]
        values = [value for value, _ in known]
        rows = sum(weight for _, weight in known)
        if not values:
            combined[name] = math.nan
        elif name in _SUMS:
            combined[name] = sum(values)
        elif name.endswith(("_max", "/max")) or name.startswith("time/"):
            combined[name] = max(values)
        elif name.endswith(("_min", "/min")):
            combined[name] = min(values)
        else:
            combined[name] = sum(value * weight for value, weight in known) / rows if rows else sum(values) / len(values)
    return combined
