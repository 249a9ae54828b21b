"""Fixtures of the whole suite: one thread, tiny random models, and the reference data where it is present."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference vectors and data that lies beside the checkout on the developers' machines."""
    folder = Path(os.environ.get("RLHF_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}; set RLHF_SHARED to the folder that holds vectors/ and data/")
    return folder
