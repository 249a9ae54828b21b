"""You can see it: the metric glossary, metrics on disk, evaluation on named sets."""

from rlhf.monitor.evaluation import EvalSet, pass_at_k
from rlhf.monitor.glossary import GLOSSARY, describe, glossary_markdown
from rlhf.monitor.metrics_file import MetricsFile
from rlhf.monitor.processes import combine_processes

__all__ = ["GLOSSARY", "EvalSet", "MetricsFile", "combine_processes", "describe", "glossary_markdown", "pass_at_k"]
