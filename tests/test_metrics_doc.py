"""docs/metrics.md is what the code exposes, and all that rules, alerts and dashboards use is in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import scrape, wait_for
from prometheus_client.parser import text_string_to_metric_families
from story import Story

from tunewatch.metricsdoc import (
    GPU_THEMES,
    RECORDED,
    RUN_THEMES,
    Row,
    document,
    gpu_rows,
    label_values,
    run_rows,
)
from tunewatch.probe.pulse import Pulse
from tunewatch_gpu.exposition import Page
from tunewatch_gpu.fields import FIELDS
from tunewatch_gpu.ledger import Ledger
from tunewatch_gpu.readings import NOT_SUPPORTED
from tunewatch_gpu.snapshot import Gpu, Identity, Snapshot

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
RULES = sorted((ROOT / "prometheus" / "rules").glob("*.yml"))
DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))

Series = dict[str, set[tuple[str, ...]]]
"""Metric names, a histogram by its base name, with the sets of label names each was seen with."""


def series(text: str) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            found.setdefault(name, set()).add(tuple(sorted(sample.labels.keys() - {"le"})))
    return found


def documented(rows: list[Row]) -> Series:
    return {row.name: {tuple(sorted(row.labels))} for row in rows}


def merge(*parts: Series) -> Series:
    names = {name for part in parts for name in part}
    return {name: set().union(*(part.get(name, set()) for part in parts)) for name in names}


def promtool(*arguments: str | Path, text: str = "") -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


# The page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == document() + "\n", (
        "write it anew: python -m tunewatch.metricsdoc > docs/metrics.md"
    )


def test_the_command_writes_the_page() -> None:
    command = [sys.executable, "-m", "tunewatch.metricsdoc"]
    written = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert written == document() + "\n"


def test_each_metric_has_one_row_in_a_table() -> None:
    names = re.findall(r"^\| `([\w:]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(names) == sorted(row.name for row in (*run_rows(), *gpu_rows(), *RECORDED))
    assert len(names) == len(set(names)) > 80


@pytest.mark.parametrize(
    ("rows", "themes"), [(run_rows(), RUN_THEMES), (gpu_rows(), GPU_THEMES)], ids=["run", "gpu"]
)
def test_themes_follow_the_order_of_the_metrics(rows: list[Row], themes: dict[str, str]) -> None:
    """Else a theme would be empty, and the metrics before the first one in no table."""
    starts = [[row.name for row in rows].index(name) for name in themes]

    assert starts[0] == 0 and starts == sorted(set(starts))


def test_examples_are_promql(tmp_path: Path) -> None:
    examples = re.findall(r"```promql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    rules = [{"record": f"example:{number}", "expr": text} for number, text in enumerate(examples)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "examples", "rules": rules}]}))

    assert len(examples) == 2
    promtool("check", "rules", tmp_path / "rules.yml")


def test_label_names() -> None:
    reserved = {"job", "instance", "le", "quantile", "alertname", "severity"}
    for row in (*run_rows(), *gpu_rows(), *RECORDED):
        assert len(row.labels) == len(set(row.labels))
        assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", label) for label in row.labels), row
        assert not reserved & set(row.labels), row
    without_run = {row.name for row in run_rows() if "run_id" not in row.labels}
    assert without_run == {"tunewatch_build_info", "tunewatch_time_seconds"}


def test_values_of_labels_are_those_of_labels_that_exist() -> None:
    labels = {row.name: row.labels for row in (*run_rows(), *gpu_rows())}
    for title, values in label_values().items():
        label, metric = re.findall(r"`(\w+)`", title)
        assert label in labels[metric]
        assert len(values) == len(set(values)) > 1


# The code


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    story = Story(tmp_path, monkeypatch)
    yield story
    story.close()


def resumed_and_broken(story: Story) -> None:
    """A run that has shown all that a live run can show."""
    story.open_session()
    story.event(
        "provenance",
        info={"base_model": "tiny", "dataset": "poems", "eval_overlap_rows": 0},
        environment={"python": "3.11.2", "torch": "2.6.0"},
    )
    story.event("device", gpus=["GPU-1234"])
    story.train_begin()
    story.log(20, loss=3.0, num_tokens=1000.0)
    story.train_begin(
        step=20,
        restored={"optimizer": True, "scheduler": False, "rng": True, "data_order": True},
        trainable_parameters=100,
        total_parameters=1000,
    )
    story.beat("data", step=20.0, max_steps=100.0)
    Pulse(str(story.folder.path / "pulse.1"), rank=1).update(step=20.0)
    story.event("phase", phase="data", detail="skipping data", ratio=0.5, activity="skip_data")
    story.steps(21, 30)
    story.log(30, loss=3.0, grad_norm=1.0, learning_rate=1e-3, num_tokens=1500.0, entropy=4.0)
    story.log(30, eval_loss=3.0, eval_runtime=4.0)
    story.event("evaluate", step=30, seconds=4.0, batches=8)
    story.checkpoint(30, ranks=2)
    story.tick()  # what grows from here on is seen to grow
    story.event("hub_push", ok=False, type="HTTPError", reason="hub", step=30)
    story.event("nonfinite", step=31, loss=True, grad_norm=True)
    story.steps(31, 31)
    story.beat(
        nonfinite_loss_steps=1.0, nonfinite_grad_norm_steps=1.0, first_nonfinite_step=31.0, nonfinite_streak=1.0,
        memory_allocated_bytes=1e9, memory_reserved_bytes=2e9, memory_peak_bytes=1.5e9, hook_errors=1.0,
    )  # fmt: skip
    story.event("samples", generated=4)


def packaged_and_ended(story: Story) -> None:
    story.log(100, train_loss=2.75, train_runtime=204.0, total_flos=1e9)
    story.event("package", ok=True, push="done")
    story.event("train_end", step=100, max_steps=100, requested_stop=False)
    story.event("train_return")
    story.event("exit", code=None)


def test_a_supervisor_exposes_what_the_page_says(story: Story) -> None:
    address = story.supervisor.endpoint.address
    resumed_and_broken(story)
    story.tick()
    live = scrape(address)
    packaged_and_ended(story)
    story.tick()
    story.finish()
    ended = scrape(address)

    assert merge(series(live), series(ended)) == documented(run_rows())
    promtool("check", "metrics", text=live)
    promtool("check", "metrics", text=ended)


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[str]:
    """The address of a sidecar with two simulated GPUs."""
    log = tmp_path / "sidecar.log"
    command = [
        sys.executable, "-m", "tunewatch_gpu.cli", "--web.listen-address=127.0.0.1:0", "--backend=simulated",
    ]  # fmt: skip
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream)
    try:
        found = wait_for(
            lambda: re.search(r"listening on http://([\d.:]+)/metrics", log.read_text()), what="a sidecar"
        )
        wait_for(lambda: "tunewatch_gpu_up{" in scrape(found[1]), what="a collection")
        yield found[1]
    finally:
        process.terminate()
        process.wait(20)


def page_of_everything() -> str:
    """The page of a sidecar whose card tells all there is, beside one without a counter of energy, and a failure."""
    card = Identity("GPU-a", 0, "A", "580", "00000000:01:00.0")
    other = Identity("GPU-b", 1, "B", "580", "00000000:02:00.0")
    everything = {key: field.high if field.high <= 1 else field.low for key, field in FIELDS.items()}
    gpus = [
        Gpu(card, everything, run_memory={"watched": 2e9, "": 1e9}),
        Gpu(other, {"power": 100.0}, {"energy": NOT_SUPPORTED, "fan": NOT_SUPPORTED}),
    ]
    ledger = Ledger(stale_after=15.0)
    ledger.record_failure("driver_not_loaded", 0.1)
    ledger.record_xid("nvml", "GPU-a", 79, 1e9)
    ledger.record_success(Snapshot("nvml", 2, gpus), at=10.0, time=1e9, duration=0.1)
    return Page.of(ledger, "1.0", restarts=1).text(monotonic=lambda: 11.0).decode()


def test_a_sidecar_exposes_what_the_page_says(simulated: str) -> None:
    real, full = scrape(simulated), page_of_everything()

    assert series(full) == documented(gpu_rows())
    known = documented(gpu_rows())
    assert all(series(real)[name] == known[name] for name in series(real))
    # What no simulated card has unless a scenario says so: a fan, processes, errors, a reading that was rejected,
    # a collection that failed.
    assert known.keys() - series(real).keys() <= {
        "tunewatch_gpu_fan_ratio", "tunewatch_gpu_readings_rejected_total", "tunewatch_gpu_collector_failures_total",
        "tunewatch_gpu_run_memory_bytes", "tunewatch_gpu_xid_errors_total", "tunewatch_gpu_xid_last_timestamp_seconds",
    }  # fmt: skip
    promtool("check", "metrics", text=real)
    promtool("check", "metrics", text=full)


# What uses it


def strings(node: Any) -> Iterator[str]:
    match node:
        case str():
            yield node
        case dict():
            for value in node.values():
                yield from strings(value)
        case list():
            for value in node:
                yield from strings(value)


def recorded_by(path: Path) -> set[str]:
    rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    return {rule["record"] for rule in rules if "record" in rule}


def test_the_recorded_series_are_those_of_the_rules() -> None:
    assert set().union(*map(recorded_by, RULES)) == {row.name for row in RECORDED}


@pytest.mark.parametrize("path", [*RULES, *DASHBOARDS], ids=lambda path: path.stem)
def test_only_documented_metrics_are_used(path: Path) -> None:
    load = json.loads if path.suffix == ".json" else yaml.safe_load
    text = "\n".join(strings(load(path.read_text(encoding="utf-8"))))
    names = {row.name for row in (*run_rows(), *gpu_rows(), *RECORDED)}
    histogram = {f"tunewatch_step_duration_seconds_{part}" for part in ("bucket", "sum", "count")}

    used = set(re.findall(r"\b(?:\w+:)*tunewatch_\w+(?::\w+)*", text))
    assert len(used) > 3
    assert used - names - histogram == set()
