"""Metrics on disk: one line a step, nothing lost to a kill, and no word that JSON does not know."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf.monitor import MetricsFile


def test_each_write_is_a_line_of_json_that_another_reader_understands(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "runs" / "metrics.jsonl")
    file.write({"step": 0.0, "reward/mean": 0.25, "critic/explained_variance": float("nan")})
    file.write({"step": 1.0, "reward/mean": float("inf")})
    lines = (tmp_path / "runs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=lambda word: 1 / 0) for line in lines] == [
        {"step": 0.0, "reward/mean": 0.25, "critic/explained_variance": None},
        {"step": 1.0, "reward/mean": None},
    ]


def test_an_existing_file_is_continued_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0.0}\n{"step": 1.0}\n{"ste')
    assert MetricsFile(path).read() == [{"step": 0.0}, {"step": 1.0}]


def test_a_torn_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0.0}\n{"ste')
    MetricsFile(path).write({"step": 1.0})
    assert MetricsFile(path).read() == [{"step": 0.0}, {"step": 1.0}]


def test_a_file_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    assert MetricsFile(tmp_path / "none.jsonl").read() == []
