"""The benchmarks of the detectors, on a folder made for it: a healthy log, and one that dies."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def entries(count: int = 120) -> list[dict[str, float]]:
    rng = random.Random(5)
    made: list[dict[str, float]] = []
    for step in range(1, count + 1):
        loss = 1.0 + 2.0 * math.exp(-step / 15) + rng.gauss(0.0, 0.03)
        made.append(
            {"step": step, "loss": loss, "grad_norm": math.exp(rng.gauss(0.0, 0.2)), "learning_rate": 1e-4}
        )
        if step % 10 == 0:
            made.append({"step": step, "eval_loss": 1.1 + 2.0 * math.exp(-step / 15)})
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sick = entries()
    for entry in sick[110:]:
        if "loss" in entry:
            entry.update(loss=0.0, grad_norm=math.nan)
    (tmp_path / "runs").mkdir()
    for name, log in {"healthy-1": entries(), "sick-1": sick}.items():
        (tmp_path / "runs" / f"{name}.json").write_text(json.dumps({"log_history": log}))
    (tmp_path / "index.csv").write_text(
        "id,label,ambiguous,secondary,start_step,end_step\nhealthy-1,healthy,0,,,\nsick-1,nan,0,,101,120\n"
    )
    return tmp_path


def output(script: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TUNEWATCH_CORPUS"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True, text=True, timeout=120, check=True, env=environment,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("script", ["detection.py", "injected_faults.py"])
def test_without_a_folder_it_says_so(script: str) -> None:
    assert output(script).startswith("no folder of labelled logs given: nothing to measure")


def test_detection(folder: Path) -> None:
    text = output("detection.py", str(folder), "--missed")
    # one sick run, found by its own signal at once (entry 111 is step 101), by the simple rules too
    assert "| nan | 1 | 1 | 1 | 0 / 0 | 1 | 1 |" in text
    assert "healthy flagged: 0 of 1 (0.0 %); recall 1 of 1; precision 1.000" in text


def test_injected_faults(folder: Path) -> None:
    text = output("injected_faults.py", str(folder))
    rows = {
        row.split("|")[1].strip(): row.split("|")[2:] for row in text.splitlines() if row.startswith("| ")
    }
    # three places in the one healthy log, each fault far outside of its noise of 3 %; a constant rate can not restart
    for fault in ("loss NaN", "one log x3", "five logs x2", "divergence, 10 logs", "norm x1000, once"):
        assert [cell.strip() for cell in rows[fault][:2]] == ["3", "1.00"], fault
    assert rows["loss never falls"][:2] == [" 1 ", " 1.00 "]
    assert rows["rate restarts"][0] == " 0 "
