"""Metrics on disk: one JSON object a line, flushed at once, so that a killed run keeps what it had."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path


class MetricsFile:
    """Appends metrics to a JSON lines file.

    Args:
        path: created with its folders on the first write; an existing file is continued.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, metrics: Mapping[str, float]) -> None:
        """Append one line; a number that JSON has no word for (NaN, infinity) becomes null."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a kill tore the line before: keep it from swallowing this one
                    file.write(b"\n")
            file.write((json.dumps(finite) + "\n").encode())

    def read(self) -> list[dict[str, float | None]]:
        """All whole lines, oldest first; a line that a kill tore is left out."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}\n")]
