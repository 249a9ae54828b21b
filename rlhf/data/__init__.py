"""What goes in: prompts with their rows, and a loader over them that can be stopped and resumed."""

from rlhf.data.gsm8k import gsm8k_to_parquet, load_gsm8k
from rlhf.data.loader import AdaptiveSampler, PromptLoader, PromptSampler
from rlhf.data.prompts import Prompt, PromptDataset, PromptReport, encode_prompt
from rlhf.data.sources import read_jsonl, read_parquet, write_parquet

__all__ = [
    "AdaptiveSampler",
    "Prompt",
    "PromptDataset",
    "PromptLoader",
    "PromptReport",
    "PromptSampler",
    "encode_prompt",
    "gsm8k_to_parquet",
    "load_gsm8k",
    "read_jsonl",
    "read_parquet",
    "write_parquet",
]
