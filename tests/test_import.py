"""`tunewatch import`: which samples a past run becomes, at which times, and what is refused."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest
from harness import wait_for
from prometheus_client.openmetrics.parser import text_fd_to_metric_families
from prometheus_client.samples import Sample

from tunewatch.backfill import ImportRefused, Outcome, Span, Target, import_runs
from tunewatch.backfill.timeline import elapsed_seconds
from tunewatch.cli import main
from tunewatch.metrics import METRIC_NAMES
from tunewatch.replay.tensorboard import masked_crc

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
HISTORY = [
    {"loss": 4.0, "grad_norm": 1.5, "learning_rate": 1e-4, "epoch": 0.1, "step": 10},
    {"loss": 3.0, "grad_norm": 1.25, "learning_rate": 1e-4, "epoch": 0.2, "step": 20},
    {"eval_loss": math.nan, "eval_runtime": 2.5, "epoch": 0.2, "step": 20},
    {"loss": 2.0, "grad_norm": math.inf, "learning_rate": 1e-4, "epoch": 0.3, "step": 30},
]
"""Four entries: spread over forty minutes they are ten minutes apart."""


class Samples:
    """What a text says: the value of a series at a time, as Prometheus would show it there."""

    def __init__(self, text: str) -> None:
        self.by_series: dict[tuple[str, frozenset[tuple[str, str]]], list[Sample]] = {}
        for family in text_fd_to_metric_families(io.StringIO(text)):
            assert family.type == "gauge" and family.documentation
            for sample in family.samples:
                self.by_series.setdefault((sample.name, frozenset(sample.labels.items())), []).append(sample)

    def series(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """Time and value of each sample of the one series with these labels."""
        wanted = labels.items()
        (found,) = [
            series for (its, labels), series in self.by_series.items() if its == name and wanted <= labels
        ]
        return [(float(sample.timestamp), sample.value) for sample in found]

    def at(self, moment: float, name: str, **labels: str) -> float | None:
        """The last value of the five minutes before."""
        seen = [value for at, value in self.series(name, **labels) if moment - 300 < at <= moment]
        return seen[-1] if seen else None

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for its, labels in self.by_series if its == name]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.by_series}


def written(path: Path, history: list[dict[str, Any]], **state: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"log_history": history, **state}))
    return path


def lines(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def imported(*paths: Path, **options: Any) -> tuple[Samples, list[Outcome]]:
    out = io.BytesIO()
    outcomes = list(import_runs(map(str, paths), Target(out=lambda: nullcontext(out)), **options))
    return Samples(out.getvalue().decode()), outcomes


def over(minutes: float) -> Span:
    return Span(start=NEW_YEAR, end=NEW_YEAR + 60 * minutes)


def test_a_history_without_times_is_spread_evenly_and_marked(tmp_path: Path) -> None:
    path = written(tmp_path / "my-run" / "checkpoint-30" / "trainer_state.json", HISTORY, max_steps=60)
    samples, (outcome,) = imported(path, span=over(40))
    assert outcome.done and outcome.oldest == NEW_YEAR
    (info,) = samples.labels("tunewatch_import_info")
    assert (info["source"], info["time"]) == ("trainer_state", "spread")
    (run,) = samples.labels("tunewatch_run_info")
    assert run["name"] == "my-run" and run["run_id"] == info["run_id"]
    loss = dict(samples.series("tunewatch_loss", run_id=info["run_id"]))
    # A sample a minute, from the first loss to the last: a line, not four points.
    assert sorted(loss) == [NEW_YEAR + 60 * minute for minute in range(10, 41)]
    assert [loss[NEW_YEAR + 60 * minute] for minute in (10, 19, 20, 39, 40)] == [4.0, 4.0, 3.0, 3.0, 2.0]
    assert samples.at(NEW_YEAR + 60 * 30, "tunewatch_step") == 20
    assert samples.at(NEW_YEAR + 60 * 40, "tunewatch_step") == 30
    assert samples.at(NEW_YEAR + 60 * 40, "tunewatch_max_steps") == 60
    assert samples.at(NEW_YEAR + 60 * 40, "tunewatch_progress_ratio") == 0.5
    assert samples.at(NEW_YEAR + 60 * 40, "tunewatch_epoch") == 0.3


def test_what_is_not_finite_stays_so(tmp_path: Path) -> None:
    samples, _ = imported(written(tmp_path / "a.json", HISTORY), span=over(40))
    assert math.isnan(samples.at(NEW_YEAR + 60 * 30, "tunewatch_eval_loss", dataset="eval") or 0.0)
    assert samples.at(NEW_YEAR + 60 * 29, "tunewatch_eval_loss", dataset="eval") is None
    assert samples.at(NEW_YEAR + 60 * 40, "tunewatch_grad_norm") == math.inf


def test_what_is_no_training_log_has_its_sample_at_once(tmp_path: Path) -> None:
    history = [*HISTORY[:2], {"eval_loss": 2.5, "step": 20}, HISTORY[3]]
    samples, _ = imported(written(tmp_path / "a.json", history), span=over(40 / 60))
    assert [at - NEW_YEAR for at, _ in samples.series("tunewatch_eval_loss")] == [30, 40]
    assert [at - NEW_YEAR for at, _ in samples.series("tunewatch_loss")] == [10, 20, 40]


def test_the_names_and_labels_are_those_of_a_live_run(tmp_path: Path) -> None:
    history = [*HISTORY, {"train_runtime": 9.5, "train_loss": 3.0, "step": 30}]
    samples, _ = imported(written(tmp_path / "a.json", history), span=over(40))
    assert samples.names - METRIC_NAMES == {"tunewatch_import_info"}
    assert {labels["state"] for labels in samples.labels("tunewatch_run_state")} >= {"training", "completed"}
    # Nobody knows when it began and ended, and nothing counts any more.
    assert not {name for name in samples.names if name.endswith(("_total", "_timestamp_seconds"))}
    assert "tunewatch_elapsed_seconds" not in samples.names


def test_signals_are_those_of_the_detectors_while_they_hold(tmp_path: Path) -> None:
    history = [{"loss": 2.0 - step / 100, "step": step} for step in range(1, 31)]
    history.append({"loss": math.nan, "step": 31})
    samples, _ = imported(written(tmp_path / "a.json", history), span=over(31))
    assert samples.at(NEW_YEAR + 60 * 30, "tunewatch_health", signal="nonfinite") == 0
    assert samples.at(NEW_YEAR + 60 * 31, "tunewatch_health", signal="nonfinite") == 1
    assert samples.at(NEW_YEAR + 60 * 31, "tunewatch_health_level") == 2
    judged = {labels["signal"] for labels in samples.labels("tunewatch_health")}
    # A history knows nothing of time, disks and what the probe alone sees: unknown is absent, not 0.
    assert "diverging" in judged and not judged & {"stalled", "will_not_fit", "slow", "resume_lost"}


def test_the_end_is_told_where_the_history_tells_it(tmp_path: Path) -> None:
    summary = {"train_runtime": 9.5, "train_loss": 3.0, "step": 30}
    ended, _ = imported(written(tmp_path / "a.json", [*HISTORY, summary]), span=over(50))
    assert ended.at(NEW_YEAR + 60 * 49, "tunewatch_run_state", state="training") == 1
    assert ended.at(NEW_YEAR + 60 * 50, "tunewatch_run_state", state="training") == 0
    assert ended.at(NEW_YEAR + 60 * 50, "tunewatch_run_state", state="completed") == 1
    assert ended.at(NEW_YEAR + 60 * 50, "tunewatch_train_loss_mean") == 3.0
    (end,) = ended.labels("tunewatch_run_end_info")
    assert (end["state"], end["reason"], end["when"]) == ("completed", "", "late")
    unknown, _ = imported(written(tmp_path / "b.json", HISTORY), span=over(40))
    assert unknown.labels("tunewatch_run_end_info") == []


def test_without_times_and_without_a_word_of_the_user(tmp_path: Path) -> None:
    """Ten seconds a log, or as long as the summary says, up to when the file was written."""
    path = written(tmp_path / "a.json", HISTORY)
    os.utime(path, (NEW_YEAR, NEW_YEAR))
    samples, _ = imported(path)
    assert [at for at, _ in samples.series("tunewatch_import_info")] == [NEW_YEAR - 30, NEW_YEAR]
    path = written(tmp_path / "b.json", [*HISTORY, {"train_runtime": 300.0, "step": 30}])
    os.utime(path, (NEW_YEAR, NEW_YEAR))
    samples, _ = imported(path)
    assert samples.series("tunewatch_loss")[0] == (NEW_YEAR - 240, 4.0)


def test_runs_of_one_file_lie_one_after_the_other(tmp_path: Path) -> None:
    text = "{'loss': 3.0, 'epoch': 0.5}\n{'loss': 2.0, 'epoch': 1.0}\n{'train_runtime': 9.5, 'epoch': 1.0}\n"
    path = tmp_path / "console.txt"
    path.write_text(text * 2)
    samples, outcomes = imported(path, span=over(20), name="two")
    assert [outcome.run for outcome in outcomes] == [1, 2]
    names = {labels["name"]: labels["run_id"] for labels in samples.labels("tunewatch_run_info")}
    assert sorted(names) == ["two 1", "two 2"]
    first = [at for at, _ in samples.series("tunewatch_loss", run_id=names["two 1"])]
    second = [at for at, _ in samples.series("tunewatch_loss", run_id=names["two 2"])]
    assert max(first) == NEW_YEAR + 600 < min(second) and max(second) == NEW_YEAR + 1200


def event_file(path: Path, scalars: list[tuple[float, int, str, float]]) -> Path:
    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    with path.open("wb") as file:
        for at, step, tag, value in scalars:
            scalar = field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
            data = b"\x09" + struct.pack("<d", at) + b"\x10" + bytes([step]) + field(5, field(1, scalar))
            length = struct.pack("<Q", len(data))
            file.write(length + struct.pack("<I", masked_crc(length)) + data + bytes(4))
    return path


def test_times_of_event_files_are_those_they_were_written_at(tmp_path: Path) -> None:
    path = event_file(
        tmp_path / "events.out.tfevents.1",
        [(NEW_YEAR + 0.5, 10, "train/loss", 4.0), (NEW_YEAR + 30, 20, "train/loss", 3.0)],
    )
    samples, _ = imported(path)
    assert samples.series("tunewatch_loss") == [(NEW_YEAR + 0.5, 4.0), (NEW_YEAR + 30, 3.0)]
    (info,) = samples.labels("tunewatch_import_info")
    assert (info["source"], info["time"]) == ("tensorboard", "recorded")
    assert info["run_id"].startswith("20260101-000000-")
    assert samples.at(NEW_YEAR + 30, "tunewatch_elapsed_seconds") == 29.5


def test_a_time_that_can_not_be_is_none(tmp_path: Path) -> None:
    path = event_file(tmp_path / "events.out.tfevents.1", [(5.0, 10, "train/loss", 4.0)])
    samples, _ = imported(path, span=over(10))
    assert samples.labels("tunewatch_import_info")[0]["time"] == "spread"


def test_elapsed_time_is_counted_back_from_the_file(tmp_path: Path) -> None:
    """A resumed training begins again at 0: 30 + 20 seconds in all."""
    entries = [
        {
            "current_steps": step,
            "total_steps": 50,
            "loss": 5.0 - step / 10,
            "lr": 1e-4,
            "elapsed_time": f"0:00:{at:02}",
        }
        for step, at in ((10, 15), (20, 30), (30, 10), (40, 20))
    ]
    path = lines(tmp_path / "trainer_log.jsonl", entries)
    os.utime(path, (NEW_YEAR, NEW_YEAR))
    samples, _ = imported(path)
    assert samples.series("tunewatch_loss") == [
        (NEW_YEAR - 35, 4.0), (NEW_YEAR - 20, 3.0), (NEW_YEAR - 10, 2.0), (NEW_YEAR, 1.0),
    ]  # fmt: skip
    assert samples.labels("tunewatch_import_info")[0]["time"] == "elapsed"
    assert samples.at(NEW_YEAR, "tunewatch_learning_rate") == 1e-4
    assert samples.at(NEW_YEAR, "tunewatch_max_steps") == 50
    assert samples.labels("tunewatch_metric") == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:00:07", 7.0), ("12:34:56", 45_296.0), ("1 day, 0:00:01", 86_401.0), ("2 days, 1:00:00", 176_400.0),
        ("1h 2m 3s", 3723.0), ("45s", 45.0), ("1d 1s", 86_401.0), (12.5, 12.5), ("soon", None), ("", None),
    ],
)  # fmt: skip
def test_elapsed_time_in_all_spellings(text: Any, seconds: float | None) -> None:
    assert elapsed_seconds(text) == seconds


def run_folder(home: Path, events: list[tuple[float, str, dict[str, Any]]], **ending: Any) -> Path:
    folder = home / "runs" / "20260101-000000-abcd"
    folder.mkdir(parents=True)
    facts = {"run_id": folder.name, "name": "watched once", "info": {"base_model": "tiny", "seed": 7}}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "verdict.json").write_text(json.dumps({"ending": ending or None}))
    lines(
        folder / "events.jsonl",
        [
            {"t": NEW_YEAR + at, "m": at, "event": event, "rank": 0, "session": "a", **more}
            for at, event, more in events
        ],
    )
    return folder


def test_a_run_of_our_own_keeps_its_id_its_times_and_its_end(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path,
        [
            (0.0, "session", {"pid": 1, "process_start": 1}),
            (5.0, "train_begin", {"step": 0, "max_steps": 4, "trainable_parameters": 10, "total_parameters": 100}),
            (10.0, "log", {"step": 1, "epoch": 0.25, "values": {"loss": 2.5}, "tokens": {"all": 400}}),
            (20.0, "log", {"step": 2, "epoch": 0.5, "values": {}, "nonfinite": {"loss": "nan"}}),
            (25.0, "exception", {"during": "train", "type": "OutOfMemoryError", "reason": "oom_gpu"}),
        ],
        state="failed", reason="oom_gpu", when="early",
    )  # fmt: skip
    samples, _ = imported(folder)
    assert samples.series("tunewatch_loss")[0] == (NEW_YEAR + 10, 2.5)
    assert math.isnan(samples.at(NEW_YEAR + 20, "tunewatch_loss") or 0.0)
    (run,) = samples.labels("tunewatch_run_info")
    assert (run["run_id"], run["name"], run["base_model"], run["seed"]) == (
        folder.name,
        "watched once",
        "tiny",
        "7",
    )
    assert samples.at(NEW_YEAR + 4, "tunewatch_run_state", state="preparing") == 1
    assert samples.at(NEW_YEAR + 10, "tunewatch_run_state", state="training") == 1
    assert samples.at(NEW_YEAR + 25, "tunewatch_run_state", state="failed") == 1
    assert samples.labels("tunewatch_run_end_info")[0]["reason"] == "oom_gpu"
    assert samples.at(NEW_YEAR + 25, "tunewatch_run_end_timestamp_seconds") == NEW_YEAR + 25
    assert samples.at(NEW_YEAR + 10, "tunewatch_tokens_seen", kind="all") == 400
    assert samples.at(NEW_YEAR + 10, "tunewatch_parameters", kind="total") == 100
    assert samples.at(NEW_YEAR + 20, "tunewatch_health", signal="nothing_trainable") == 0


def test_a_run_that_lay_still_between_two_sessions_has_a_gap_there(tmp_path: Path) -> None:
    log = ("log", {"step": 1, "values": {"loss": 2.5}})
    begun = ("session", {"pid": 1, "process_start": 1})
    samples, _ = imported(run_folder(tmp_path, [(0, *begun), (60, *log), (2000, *begun), (2060, *log)]))
    assert [at - NEW_YEAR for at, _ in samples.series("tunewatch_loss")] == [60, 2060]


def test_a_long_silence_without_a_word_is_a_gap(tmp_path: Path) -> None:
    """Up to an hour is drawn, and ten times the longest one before."""
    at = [0, 3000, 30_000, 600_000]
    scalars = [(NEW_YEAR + moment, number, "train/loss", 1.0) for number, moment in enumerate(at)]
    samples, _ = imported(event_file(tmp_path / "events.out.tfevents.1", scalars), interval=240.0)
    seen = [moment - NEW_YEAR for moment, _ in samples.series("tunewatch_loss")]
    assert max(b - a for a, b in pairwise(seen) if b <= 30_000) == 240
    assert seen[-2:] == [30_000, 600_000]


def test_the_same_logs_have_the_same_id_wherever_they_lie(tmp_path: Path) -> None:
    one, _ = imported(written(tmp_path / "a" / "same.json", HISTORY), span=over(40))
    two, _ = imported(written(tmp_path / "b" / "same.json", HISTORY, max_steps=9), span=over(20))
    other, _ = imported(written(tmp_path / "c" / "same.json", HISTORY[:2]), span=over(40))
    ids = [samples.labels("tunewatch_import_info")[0]["run_id"] for samples in (one, two, other)]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0].startswith("00000000-same-")


def test_id_and_name_can_be_chosen(tmp_path: Path) -> None:
    name = 'a "quoted"\\name'
    samples, _ = imported(written(tmp_path / "a.json", HISTORY), span=over(40), run_id="my-id", name=name)
    (run,) = samples.labels("tunewatch_run_info")
    assert (run["run_id"], run["name"]) == ("my-id", name)


def test_one_id_for_several_runs_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    paths = [str(written(tmp_path / name, HISTORY)) for name in ("a", "b")]
    out = io.BytesIO()
    with pytest.raises(ImportRefused, match="it is the id of one run, and there are 2"):
        list(import_runs(paths, Target(out=lambda: nullcontext(out)), run_id="x"))
    with pytest.raises(ImportRefused, match="letters, digits"):
        list(import_runs(paths[:1], Target(out=lambda: nullcontext(out)), run_id="a/b"))
    assert out.getvalue() == b""


def test_what_can_not_be_read_says_why_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"")
    os.mkfifo(tmp_path / "2")
    (tmp_path / "3").write_text(json.dumps({"log_history": []}))
    written(tmp_path / "4", HISTORY)
    samples, outcomes = imported(tmp_path, span=over(40))
    assert [(outcome.done, outcome.text) for outcome in outcomes[:3]] == [
        (False, "an empty file"), (False, "a pipe, no regular file"), (False, "no log of a training in it"),
    ]  # fmt: skip
    assert outcomes[3].done and len(samples.labels("tunewatch_run_info")) == 1


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tunewatch", "import", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_command_writes_the_text_and_reports_beside_it(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", HISTORY)
    span = ("--start", "2026-01-01T00:00:00Z", "--end", "2026-01-01T00:40:00Z")
    done = command(path, tmp_path / "none", "--openmetrics", "-", *span)
    assert done.returncode == 1
    assert Samples(done.stdout).at(NEW_YEAR + 600, "tunewatch_loss") == 4.0
    first, second = done.stderr.splitlines()
    assert (
        first.startswith(f"{path}: run 00000000-a-") and "4 logs" in first and "times spread evenly" in first
    )
    assert second == f"{tmp_path / 'none'}: not imported: no such file, folder or run"
    assert command(tmp_path / "none", "--openmetrics", tmp_path / "x").returncode == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "say where to, with either --into DIR"),
        (("--into", "no-such", "--openmetrics", "-"), "say where to, with either --into DIR"),
        (("--into", "no-such"), "--into no-such: no such folder"),
        (("--openmetrics", "-", "--interval", "5m"), "--interval 5m: it must be below 5m"),
        (("--openmetrics", "-", "--start", "soon"), "'soon' is no point in time"),
        (("--openmetrics", "-", "--start", "200", "--end", "100"), "--start 200 is not before --end 100"),
        (
            ("--openmetrics", "-", "--seconds-per-log", "0"),
            "--seconds-per-log 0.0: expected a number above 0",
        ),
        (("--openmetrics", "no-such/file"), "--openmetrics no-such/file: it can not be written"),
    ],
)
def test_a_wrong_option_says_what_is_allowed(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(tmp_path / "a.json", HISTORY)
    monkeypatch.setattr(sys, "argv", ["tunewatch", "import", str(path), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert ended.value.code == 64 and said in output.err and output.out == ""


class Prometheus:
    """A server on a data folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "prometheus.yml").write_text("global: {}\n")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={self._folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stderr=(self._folder / "prometheus.log").open("wb"),
        )
        wait_for(self._ready, what="Prometheus is ready")
        return self

    def __exit__(self, *error: object) -> None:
        self._server.terminate()
        self._server.wait(30)

    def _ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).status == 200
        except OSError:
            return False

    def ask(self, query: str, moment: float) -> list[tuple[dict[str, str], float]]:
        """Labels and values that an instant query finds."""
        question = urllib.parse.urlencode({"query": query, "time": moment})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{question}", timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return [(item["metric"], float(item["value"][1])) for item in found]


def run_variable(seconds: int) -> str:
    """The query by which the dashboards find runs, over a shown time of so many seconds."""
    for path in sorted(Path(__file__).parents[1].glob("grafana/dashboards/*.json")):
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if "tunewatch_run_info" in str(variable.get("query")):
                query = variable["query"]
                text = query if isinstance(query, str) else query["query"]
                return str(
                    text.removeprefix("query_result(").removesuffix(")").replace("$__range", f"{seconds}s")
                )
    raise AssertionError("no dashboard asks for runs")


def test_prometheus_shows_an_imported_run_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = written(tmp_path / "old-run.json", HISTORY)
    options = (
        "--into",
        tmp_path / "data",
        "--start",
        "2026-01-01T01:40:00Z",
        "--end",
        "2026-01-01T02:20:00Z",
    )
    done = command(path, *options)
    assert done.returncode == 0, done.stderr
    blocks = sorted(item.name for item in (tmp_path / "data").iterdir())
    assert len(blocks) == 2  # Prometheus' blocks end at even hours
    again = command(path, *options)
    assert again.returncode == 0 and "is there already: nothing done" in again.stdout
    assert sorted(item.name for item in (tmp_path / "data").iterdir()) == blocks
    with Prometheus(tmp_path) as prometheus:
        at = NEW_YEAR + 6000
        ((run, _),) = prometheus.ask("tunewatch_run_info", at + 600)
        assert prometheus.ask("tunewatch_loss", at + 599) == []
        for minute, loss in ((10, 4.0), (15, 4.0), (20, 3.0), (39, 3.0), (40, 2.0), (44, 2.0)):
            ((labels, value),) = prometheus.ask("tunewatch_loss", at + 60 * minute)
            assert (labels, value) == ({"__name__": "tunewatch_loss", "run_id": run["run_id"]}, loss)
        assert prometheus.ask("tunewatch_loss", at + 60 * 45 + 1) == []  # five minutes after the last
        ((_, value),) = prometheus.ask("tunewatch_eval_loss", at + 60 * 35)
        assert math.isnan(value)
        ((_, value),) = prometheus.ask('tunewatch_health{signal="eval_nonfinite"}', at + 60 * 35)
        assert value == 1
        ((found, _),) = prometheus.ask(run_variable(3 * 3600), at + 2 * 3600)
        assert (found["run_id"], found["text"]) == (run["run_id"], f"{run['run_id']} · old-run")


def test_a_run_that_ended_just_now_is_left_to_later(tmp_path: Path) -> None:
    """Prometheus holds the last hours in memory, and takes no block of that time."""
    now = time.time()
    path = event_file(tmp_path / "events.out.tfevents.1", [(now - 60, 10, "train/loss", 4.0)])
    (tmp_path / "data").mkdir()
    done = command(path, "--into", tmp_path / "data")
    assert done.returncode == 3
    assert "not imported: it ended less than 3 h ago" in done.stdout
    assert list((tmp_path / "data").iterdir()) == []


def test_what_a_default_prometheus_would_delete_at_once_is_said(tmp_path: Path) -> None:
    path = event_file(tmp_path / "events.out.tfevents.1", [(NEW_YEAR, 10, "train/loss", 4.0)])
    (tmp_path / "data").mkdir()
    done = command(path, "--into", tmp_path / "data")
    assert done.returncode == 0
    assert "deletes these blocks at once (its default is 15d" in done.stdout


MEMORY = """
import os, resource, sys
from tunewatch.backfill import Span, Target, import_runs
for path in sys.argv[1:]:
    (outcome,) = import_runs([path], Target(out=lambda: open(os.devnull, "wb")), span=Span(seconds_per_log=5))
    assert outcome.done, outcome
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Ten times the logs (10,000 over half a day) need at most 8 MiB more; KiB are compared."""
    paths = [
        written(tmp_path / str(logs), [{"loss": 2 + math.sin(step), "step": step} for step in range(logs)])
        for logs in (1000, 10_000)
    ]
    command = [sys.executable, "-c", MEMORY, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    small, large = map(int, done.stdout.split())
    assert large - small < 8 << 10
