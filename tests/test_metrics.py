"""What /metrics says at each point of a story, as whole expositions, and what must hold for any content.

`TUNEWATCH_UPDATE_GOLDEN=1 pytest tests/test_metrics.py` writes tests/golden anew: read the diff.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from story import START, Story

from tunewatch import __version__
from tunewatch.metrics import METRIC_NAMES, METRICS, RunCollector, label_value
from tunewatch.supervisor.snapshot import RankSnapshot, Snapshot

GOLDEN = Path(__file__).parent / "golden"


def before_step_1(story):
    story.open_session()
    story.beat("prepare", prepare_seconds=0.0)
    story.event(
        "provenance",
        info={
            "base_model": "tiny-llama", "dataset": "poems", "method": "lora", "lora_r": 16, "lora_alpha": 32,
            "learning_rate": 1e-3, "batch_size": 8, "max_length": 512, "precision": "bf16", "seed": 42,
        },
        environment={"python": "3.11.2", "torch": "2.6.0", "transformers": "5.0.0", "trl": "1.0.0"},
    )  # fmt: skip
    story.clock.passed += 30
    story.event("device", gpus=["GPU-1234"])
    story.train_begin()
    story.event("phase", phase="data", detail="first batch", ratio=None)
    story.beat("data", max_steps=100.0, prepare_seconds=30.0)


def training(story):
    before_step_1(story)
    story.steps(1, 10)
    story.log(10, loss=3.5, grad_norm=1.25, learning_rate=1e-3, num_tokens=1500.0, entropy=4.0)
    story.steps(11, 20)
    story.log(20, loss=3.25, grad_norm=1.0, learning_rate=9e-4, num_tokens=3000.0, entropy=3.5)
    story.log(20, eval_loss=3.0, eval_runtime=4.0)
    story.event("evaluate", step=20, seconds=4.0, batches=8)
    story.checkpoint(20)
    story.steps(21, 25)
    story.beat(memory_allocated_bytes=1e9, memory_reserved_bytes=2e9, memory_peak_bytes=1.5e9)


def nan(story):
    training(story)
    story.event("nonfinite", step=26, loss=True, grad_norm=True)
    story.event("nonfinite", step=27, loss=True, grad_norm=True)
    story.steps(26, 27)
    story.beat(
        nonfinite_loss_steps=2.0,
        nonfinite_grad_norm_steps=2.0,
        first_nonfinite_step=26.0,
        nonfinite_streak=2.0,
    )
    story.log(27, {"grad_norm": "nan"}, loss=0.0, learning_rate=8e-4, num_tokens=4000.0)
    story.log(27, {"eval_loss": "nan"})


def resumed(story):
    """Killed at step 27 (logged up to 25, of 2 s each), resumed from checkpoint-20 by a new process."""
    training(story)
    story.log(25, loss=3.0, grad_norm=1.0, learning_rate=8.5e-4, num_tokens=3750.0)
    story.tick()
    story.close()
    (story.folder.path / "pulse.0").unlink()
    story.clock.passed += 60
    story.watch(new_session=True)
    story.open_session("s2")
    story.beat("prepare")
    story.clock.passed += 10
    story.train_begin(
        step=20, restored={"optimizer": True, "scheduler": False, "rng": True, "data_order": True}
    )
    story.beat("data", step=20.0, max_steps=100.0, prepare_seconds=10.0)
    story.steps(21, 30)
    story.log(30, loss=2.75, grad_norm=0.75, learning_rate=8e-4, num_tokens=1500.0)


def ended(story):
    training(story)
    story.steps(26, 100)
    story.log(100, loss=2.0, grad_norm=0.5, learning_rate=0.0, num_tokens=15000.0)
    story.checkpoint(100)
    story.log(100, train_loss=2.75, train_runtime=204.0, total_flos=1e9)
    story.event("train_end", step=100, max_steps=100, requested_stop=False)
    story.event("train_return")
    story.beat("package")
    story.clock.passed += 5
    story.event("exit", code=None)


STORIES = {story.__name__: story for story in (before_step_1, training, nan, resumed, ended)}


@pytest.fixture
def story(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch)
    yield story
    story.close()


def told(name, story):
    STORIES[name](story)
    story.tick()
    if name == "ended":
        story.finish()
    return story.exposition().replace(f'version="{__version__}"', 'version="VERSION"')


@pytest.mark.parametrize("name", STORIES)
def test_the_whole_exposition(name, story):
    text = told(name, story)
    golden = GOLDEN / f"{name}.prom"
    if os.environ.get("TUNEWATCH_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text.splitlines() == golden.read_text(encoding="utf-8").splitlines()


def samples(name):
    """Values of a golden by name and labels, without run_id."""
    text = (GOLDEN / f"{name}.prom").read_text(encoding="utf-8")
    return {
        sample.name.removeprefix("tunewatch_")
        + "".join(
            f",{key}={value}" for key, value in sorted(sample.labels.items()) if key != "run_id"
        ): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def test_the_goldens_say_what_was_told():
    """The numbers that matter, worked out from the stories above and not from the code."""
    before = samples("before_step_1")
    assert before["run_state,state=training"] == 1.0
    assert before["run_gpu_info,rank=0,uuid=GPU-1234"] == 1.0
    assert before["progress_deadline_timestamp_seconds"] == START + 30 + 1800, (
        "half an hour for the first step"
    )
    for unknown in (
        "loss",
        "eta_seconds",
        "eval_loss,dataset=eval",
        "tokens_seen,kind=non_padding",
        "run_end_timestamp_seconds",
    ):
        assert unknown not in before

    during = samples("training")
    assert during["step"] == 25
    assert during["progress_ratio"] == 0.25
    assert during["epoch"] == 0.5
    assert during["eta_seconds"] == pytest.approx(75 * 2.0)
    assert during["session_elapsed_seconds"] == during["elapsed_seconds"] == 30 + 25 * 2
    assert during["tokens_total,kind=all"] == 25 * 160
    assert during["tokens_total,kind=non_padding"] == during["tokens_seen,kind=non_padding"] == 3000
    assert during["samples_total"] == during["samples_seen"] == 25 * 8
    assert during["step_duration_seconds_bucket,le=2.5"] == during["step_duration_seconds_count"] == 25
    assert during["step_duration_seconds_bucket,le=1.0"] == 0
    assert during["step_duration_seconds_sum"] == 50
    assert during["loss"] == 3.25
    assert during["metric,name=entropy"] == 3.5
    assert during["checkpoint_last_step"] == during["checkpoint_best_step"] == 20
    assert during["checkpoint_last_timestamp_seconds"] == START + 30 + 40
    assert during["progress_deadline_timestamp_seconds"] == START + 80 + 300
    assert during["process_memory_bytes,device=gpu,kind=peak,rank=0"] == 1.5e9
    assert during["health_level"] == 0

    broken = samples("nan")
    assert math.isnan(broken["grad_norm"])
    assert math.isnan(broken["eval_loss,dataset=eval"])
    assert broken["best_eval_loss"] == 3.0
    assert broken["nonfinite_steps_total,what=loss"] == broken["nonfinite_streak"] == 2
    assert broken["nonfinite_steps_total,what=eval_loss"] == 1
    assert broken["first_nonfinite_step"] == 26
    assert broken["health,signal=nonfinite"] == broken["health,signal=eval_nonfinite"] == 1
    assert broken["health,signal=stalled"] == 0
    assert broken["health_level"] == 2

    again = samples("resumed")
    assert again["step"] == 30
    assert again["tokens_seen,kind=non_padding"] == 3000 + 1500, (
        "the run goes on from what it knew at step 20"
    )
    assert again["samples_seen"] == 30 * 8
    assert again["steps_total"] == 10
    assert again["tokens_total,kind=non_padding"] == 1500
    assert again["resumes_total"] == 1
    assert again["wasted_seconds_total"] == pytest.approx(5 * 2.0), "five logged steps of two seconds"
    assert again["checkpoints_saved_total"] == 0
    assert again["checkpoints_present"] == 1
    assert again["resume_lost,part=scheduler"] == again["health,signal=resume_lost"] == 1
    assert again["resume_lost,part=optimizer"] == 0
    assert again["elapsed_seconds"] == 80 + 60 + 10 + 20
    assert again["session_elapsed_seconds"] == 10 + 20

    over = samples("ended")
    assert over["run_state,state=completed"] == 1.0
    assert over["run_end_info,reason=,state=completed,when=late"] == 1.0
    assert over["train_loss_mean"] == 2.75
    assert over["run_end_timestamp_seconds"] == START + 30 + 200 + 5
    assert over["progress_ratio"] == 1.0
    for gone in ("eta_seconds", "run_gpu_info,rank=0,uuid=GPU-1234", "progress_deadline_timestamp_seconds"):
        assert gone not in over


@pytest.mark.parametrize("name", STORIES)
def test_promtool_finds_nothing(name):
    text = (GOLDEN / f"{name}.prom").read_bytes()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


# Names are a contract: rules, dashboards and other people's queries depend on them.
PROMISED = """
build_info time_seconds run_info run_environment_info run_state
run_state_timestamp_seconds run_start_timestamp_seconds session_start_timestamp_seconds run_end_timestamp_seconds
run_end_info step max_steps epoch progress_ratio tokens_seen samples_seen
steps_total tokens_total samples_total optimizer_steps_skipped_total batch_size_restarts_total resumes_total
loss learning_rate grad_norm train_loss_mean eval_loss best_eval_loss best_step evals_since_best
metric metrics_dropped_total elapsed_seconds session_elapsed_seconds eta_seconds step_duration_seconds
phase_seconds_total wasted_seconds_total
last_step_timestamp_seconds last_activity_timestamp_seconds progress_deadline_timestamp_seconds
nonfinite_steps_total nonfinite_streak nan_filter_active first_nonfinite_step health health_level
checkpoints_saved_total checkpoints_present checkpoint_last_step checkpoint_last_timestamp_seconds
checkpoint_size_bytes checkpoint_duration_seconds checkpoint_interval_steps checkpoint_best_step output_free_bytes
resume_lost hub_push_failures_total hub_push_last_success_timestamp_seconds samples_generated samples_reviewed
walltime_deadline_timestamp_seconds run_gpu_info process_memory_bytes attached
queue_length queue_position queue_blocked
phase_info phase_progress_ratio steps_redone_total batch_size interval_steps parameters rank_step
rank_phase_seconds_total checkpoints_broken checkpoint_resumable_step checkpoints_that_fit work_at_risk_steps
work_at_risk_seconds eval_overlap_rows probe_seconds_total probe_errors_total clock_jumps_total
suggested_act nonfinite_last_timestamp_seconds hub_push_last_failure_timestamp_seconds
probe_error_last_timestamp_seconds
"""
NOT_BUILT_YET = {
    "queue_length", "queue_position", "queue_blocked",
}  # fmt: skip


def test_the_names_are_those_that_were_promised():
    assert {f"tunewatch_{name}" for name in PROMISED.split() if name not in NOT_BUILT_YET} == METRIC_NAMES


def test_every_metric_has_its_text():
    assert all(definition.help.endswith(".") for definition in METRICS)
    assert max(Counter(definition.name for definition in METRICS).values()) == 1


# -- rare events by when they last were ---------------------------------------------------------------------


def when(story, name):
    """Values of a gauge of the supervisor by its last label, relative to the story's beginning."""
    story.tick()
    found = {}
    for family in parse_text(story.exposition()):
        for sample in family.samples:
            if sample.name == f"tunewatch_{name}":
                found[sample.labels.get("what", "")] = sample.value - START
    return found


def test_errors_of_the_monitoring_by_when_they_were_seen_to_grow(story):
    training(story)
    story.tick()
    assert when(story, "probe_error_last_timestamp_seconds") == {}
    story.clock.passed = 100.0
    story.beat(hook_errors=2.0)
    assert when(story, "probe_error_last_timestamp_seconds") == {"hook": 100.0}
    story.clock.passed = 104.0
    with story.folder.events.open("a") as file:
        file.write("no event\n")
    assert when(story, "probe_error_last_timestamp_seconds") == {"hook": 100.0, "malformed": 104.0}
    story.clock.passed = 108.0
    story.beat(append_errors=1.0, hook_errors=3.0)
    expected = {"hook": 108.0, "append": 108.0, "malformed": 104.0}
    assert when(story, "probe_error_last_timestamp_seconds") == expected

    story.close()
    story.watch()  # a supervisor that takes over does not know when
    assert when(story, "probe_error_last_timestamp_seconds") == {}
    story.clock.passed = 112.0
    story.beat(append_errors=2.0)
    assert when(story, "probe_error_last_timestamp_seconds") == {"append": 112.0}


def test_steps_that_are_not_finite_by_when_they_were_seen(story):
    training(story)
    assert when(story, "nonfinite_last_timestamp_seconds") == {}
    story.clock.passed = 100.0
    story.beat(nonfinite_loss_steps=1.0)
    assert when(story, "nonfinite_last_timestamp_seconds") == {"loss": 100.0}
    story.clock.passed = 104.0
    story.log(27, {"eval_loss": "nan"})
    assert when(story, "nonfinite_last_timestamp_seconds") == {"loss": 100.0, "eval_loss": 104.0}
    story.clock.passed = 108.0
    story.beat(nonfinite_grad_norm_steps=1.0)
    last = {"loss": 100.0, "eval_loss": 104.0, "grad_norm": 108.0}
    assert when(story, "nonfinite_last_timestamp_seconds") == last
    assert when(story, "nonfinite_last_timestamp_seconds") == last, "it does not move on with the clock"


def test_a_failed_push_by_its_event(story):
    training(story)
    assert when(story, "hub_push_last_failure_timestamp_seconds") == {}
    story.clock.passed = 100.0
    story.event("hub_push", ok=False, type="HTTPError", reason="hub", step=20)
    story.clock.passed = 103.0
    story.event("hub_push", ok=True, step=20)
    assert when(story, "hub_push_last_failure_timestamp_seconds") == {"": 100.0}
    assert when(story, "hub_push_last_success_timestamp_seconds") == {"": 103.0}
    story.close()
    story.watch()
    assert when(story, "hub_push_last_failure_timestamp_seconds") == {"": 100.0}, "events stay"
    story.event("package", ok=True, push="failed")
    assert when(story, "hub_push_last_failure_timestamp_seconds") == {"": 103.0}


# -- any content ------------------------------------------------------------------------------------------


def snapshot(**fields):
    return Snapshot(
        **{
            "run_id": "r1", "state": "training", "info": {}, "environment": {}, "state_since": 1.0, "run_start": 1.0,
            "session_start": 1.0, "now": 2.0, **fields,
        }
    )  # fmt: skip


def both_formats(*snapshots):
    """The families of each format, through the parsers of the reference implementation; nothing may come twice."""
    collector = RunCollector(lambda: snapshots, lambda: 5.0)
    parsed = []
    for generate, parse in ((generate_latest, parse_text), (generate_openmetrics, parse_openmetrics)):
        families = list(parse(generate(collector).decode("utf-8")))
        series = Counter(
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in families
            for sample in family.samples
        )
        assert max(series.values()) == 1, series.most_common(1)
        parsed.append(dict.fromkeys(series))
    return parsed


NAMES = [
    'a "quoted" name', "back\\slash", "new\nline", "🦙 llama", "x" * 300, "", " ", "caf\udce9", "tab\there", "a,b={c}",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_kind(name):
    both_formats(
        snapshot(
            info={"name": name, "base_model": name}, environment={"torch": name}, other_metrics={name: 1.0},
            eval_loss={name: 2.0}, ranks={0: RankSnapshot(gpus=(name,))},
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ("new\nline", "newline"),
        ("x" * 300, "x" * 128),
        ("🦙" * 200, "🦙" * 128),
        ("caf\udce9", "caf?"),
        (8.0, "8"),
        (1e-4, "0.0001"),
        (True, "True"),
        ("\x00\x1f\x7f", ""),
    ],
)
def test_label_values(value, label):
    assert label_value(value) == label


def test_keys_that_become_the_same_label_are_one_series():
    text, _ = both_formats(
        snapshot(
            other_metrics={"a\x07": 1.0, "a": 2.0, "y" * 128: 3.0, "y" * 129: 4.0},
            ranks={0: RankSnapshot(gpus=("GPU-1", "GPU-1"))},
        )
    )
    assert sum(name == "tunewatch_metric" for name, _ in text) == 2


def test_unknown_is_absent():
    text, _ = both_formats(snapshot())
    names = {name for name, _ in text}
    for absent in (
        "step",
        "loss",
        "eta_seconds",
        "health",
        "health_level",
        "eval_loss",
        "run_end_info",
        "run_environment_info",
        "phase_info",
        "phase_progress_ratio",
        "parameters",
        "rank_step",
        "work_at_risk_steps",
        "eval_overlap_rows",
        "samples_reviewed",
    ):
        assert f"tunewatch_{absent}" not in names
    assert "tunewatch_step_duration_seconds_count" not in names


def test_several_runs_at_one_endpoint():
    text, _ = both_formats(snapshot(), snapshot(run_id="r2", step=3))
    assert sum(name == "tunewatch_run_state" for name, _ in text) == 16


ANY = st.floats(allow_nan=True, allow_infinity=True)
MAPS = st.dictionaries(st.text(max_size=4), ANY, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        snapshot, step=st.none() | st.integers(0, 10**9), max_steps=st.none() | st.integers(0, 9), loss=st.none() | ANY,
        eval_loss=MAPS, other_metrics=MAPS, tokens_seen=MAPS, tokens_total=MAPS, phase_seconds=MAPS, steps_total=ANY,
        nonfinite_steps=MAPS, samples_total=st.none() | ANY, wasted_seconds=ANY, info=st.dictionaries(
            st.sampled_from(["name", "dataset"]), st.text(max_size=200)),
    )
)  # fmt: skip
def test_whatever_is_known_the_exposition_is_valid_and_counters_are_sound(some):
    both_formats(some)
    for family in RunCollector(lambda: [some], lambda: 5.0).collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                assert math.isfinite(sample.value) and sample.value >= 0
            assert re.fullmatch(r"tunewatch_[a-z0-9_]+", sample.name)
            assert all(len(value) <= 128 for value in sample.labels.values())
