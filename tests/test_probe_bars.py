"""What is seen of the time before the first step: imports, downloads, loading, tokenizing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import datasets
import huggingface_hub.utils
import pytest
from harness import TESTS, wait_for
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from tunewatch.probe import bars as bars_module
from tunewatch.probe.bars import MODULES, Step, dataset_step, hub_step, model_step, watch_loaded
from tunewatch.probe.hook import BARS, watch_bars
from tunewatch.probe.pulse import PHASES, read_pulse
from tunewatch.probe.writer import RunWriter

PREPARE = TESTS / "scripts" / "prepare.py"


class Clock:
    """Stands for the time module in bars.py."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Timers:
    """Stands for threading.Timer: what was started, to be fired by hand."""

    def __init__(self):
        self.started = []

    def __call__(self, seconds, work):
        timer = SimpleNamespace(seconds=seconds, fire=work, daemon=False, start=lambda: None)
        self.started.append(timer)
        return timer


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A process that prepares, with bars that are noted and a clock that is set by hand."""
    watch_loaded()
    clock, timers = Clock(), Timers()
    monkeypatch.setattr(bars_module, "time", clock)
    monkeypatch.setattr(bars_module, "_board", bars_module._Board())
    threads = SimpleNamespace(
        **{name: getattr(threading, name) for name in ("RLock", "current_thread", "main_thread")}
    )
    monkeypatch.setattr(bars_module, "threading", SimpleNamespace(**vars(threads), Timer=timers))
    monkeypatch.delenv("RANK", raising=False)
    writer = RunWriter(str(tmp_path / "run"), way="exec")
    monkeypatch.setattr(sys, "_tunewatch_probe", {"writer": writer, "bars": True}, raising=False)
    writer.phase("prepare", "transformers imported")
    run = SimpleNamespace(writer=writer, clock=clock, timers=timers, folder=tmp_path / "run")
    run.told = lambda: [
        (event["detail"], event["ratio"], event["activity"])
        for event in read_events(run.folder)
        if event["event"] == "phase" and event["detail"] != "transformers imported"
    ]
    yield run
    writer.close()


def read_events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def new_bar(kind=datasets.utils.tqdm, **options):
    return kind(file=io.StringIO(), **options)


# -- words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("Tokenizing train dataset", Step("tokenizing", "tokenize")),
        ("Tokenizing train dataset (num_proc=2)", Step("tokenizing", "tokenize")),
        ("Running tokenizer on dataset", Step("tokenizing", "tokenize")),
        ("Map", Step("processing rows", "tokenize")),
        ("Map (num_proc=8)", Step("processing rows", "tokenize")),
        ("Packing train dataset", Step("packing", "tokenize")),
        ("Filter", Step("filtering", "tokenize")),
        ("Generating train split", Step("reading the dataset", "load")),
        ("Downloading data", Step("downloading", "download")),
        ("Alice's diary, page 3", Step("preparing the dataset", None)),
        ("Mapping CANARY", Step("preparing the dataset", None)),
        ("  ", Step("preparing the dataset", None)),
        ("", Step("preparing the dataset", None)),
    ],
)
def test_a_description_is_known_by_its_words_and_never_quoted(description, expected):
    assert dataset_step(description) == expected


def test_words_of_the_hub_and_of_transformers():
    assert hub_step("model-00001-of-00002.safetensors") == Step("downloading", "download")
    assert hub_step("Fetching 3 files") == Step("downloading", "download")
    assert hub_step("Processing Files (0 / 1)") == hub_step("New Data Upload") == Step("uploading", None)
    assert (
        model_step("Loading weights")
        == model_step("Loading checkpoint shards")
        == Step("loading the model", "load")
    )
    assert model_step("CANARY") == Step("preparing the model", None)


def test_the_hook_and_the_bars_know_the_same_modules():
    assert set(BARS) == set(MODULES)


# -- one bar ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disable", [False, True])
def test_an_updated_bar(run, disable):
    bar = new_bar(desc="Tokenizing", total=200, disable=disable)
    run.clock.now += 1.0
    bar.update(50)
    run.clock.now += 1.0
    bar.update(100)
    bar.update(50)
    bar.close()
    bar.close()
    assert run.told() == [
        ("tokenizing", 0.0, "tokenize"), ("tokenizing", 0.25, "tokenize"), ("tokenizing", 0.75, "tokenize"),
        ("tokenizing", 1.0, "tokenize"),
    ]  # fmt: skip


@pytest.mark.parametrize("disable", [False, True])
def test_a_bar_that_is_iterated_passes_everything_on(run, disable):
    bar = new_bar(iterable=iter("abcd"), desc="Filter", total=4, disable=disable, mininterval=0, miniters=1)
    seen = []
    for item in bar:
        seen.append(item)
        run.clock.now += 1.0
    assert seen == list("abcd")
    assert [ratio for _, ratio, _ in run.told()] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_loop_that_is_left_early(run):
    for number in new_bar(iterable=range(10), desc="Map"):
        run.clock.now += 1.0
        if number == 4:
            break
    run.clock.now += 5.0
    new_bar(desc="Filter", total=2).update(1)
    assert [detail for detail, _, _ in run.told()][
        -1
    ] == "filtering"  # the first bar is not under way any more
    assert ("processing rows", 0.4, "tokenize") in run.told()


def test_what_a_bar_does_is_what_it_did_before(run):
    def looked_at(bar):
        return (
            len(bar),
            2 in bar,
            list(reversed(bar)),
            list(bar),
            bar.n,
            bar.total,
            bar.disable,
            str(bar)[:20],
        )

    kinds = (datasets.utils.tqdm, tqdm)
    noted, plain = (looked_at(new_bar(kind, iterable=[1, 2, 3], desc="Map", total=3)) for kind in kinds)
    assert noted == plain
    with new_bar(desc="x", total=5, initial=2) as bar:
        bar.update(1)
        bar.reset(total=7)
        bar.update()
        assert (bar.n, bar.total) == (1, 7)
    assert type(bar).__name__ == "tqdm"
    with pytest.raises(KeyError, match="nonsense"):  # TqdmKeyError
        new_bar(nonsense=1)


def test_a_subclass_of_the_users_own(run):
    calls = []

    class Mine(datasets.utils.tqdm):
        def __init__(self, *args, **kwargs):
            calls.append("init")
            super().__init__(*args, **kwargs)

        def update(self, n=1):
            calls.append(n)
            return super().update(n)

    new_bar(Mine, desc="Packing", total=2).update(2)
    assert calls == ["init", 2]
    assert run.told()[0] == ("packing", 0.0, "tokenize")


def test_a_bar_without_total_has_no_ratio(run):
    bar = new_bar(desc="Generating train split")
    run.clock.now += 1.0
    bar.update(1000)
    bar.close()
    assert run.told() == [("reading the dataset", None, "load")] * 3


def test_a_total_that_comes_later_and_counts_taken_back(run):
    bar = new_bar(huggingface_hub.utils.tqdm, desc="weights", total=0, unit="B")
    bar.total = 400
    run.clock.now += 1.0
    bar.update(300)
    run.clock.now += 1.0
    bar.update(-200)  # a retry of a part
    assert [ratio for _, ratio, _ in run.told()] == [None, 0.75, 0.25]


def test_bars_of_the_user_and_of_the_training_are_left_alone(run):
    assert "tunewatch_bar" not in vars(new_bar(tqdm, desc="Tokenizing", total=3))
    assert not hasattr(tqdm, "_tunewatch_bars")
    assert run.told() == []


# -- several ----------------------------------------------------------------------------------------------


def test_the_innermost_bar_is_told_then_the_outer_one_again(run):
    outer = new_bar(desc="Generating train split", total=4)
    run.clock.now += 1.0
    inner = new_bar(desc="Downloading data", total=10, unit="B")
    run.clock.now += 1.0
    inner.update(5)
    inner.close()
    run.clock.now += 1.0
    outer.update(2)
    assert run.told() == [
        ("reading the dataset", 0.0, "load"), ("downloading", 0.0, "download"), ("downloading", 0.5, "download"),
        ("downloading", 0.5, "download"), ("reading the dataset", 0.5, "load"),
    ]  # fmt: skip


def test_files_that_are_downloaded_at_once_are_one_download(run):
    """By bytes: 100 of 100 and 150 of 300 are 250 of 400, not one file of two, and not the half of one."""
    one = new_bar(huggingface_hub.utils.tqdm, desc="a.bin", total=100, unit="B")
    two = new_bar(huggingface_hub.utils.tqdm, desc="b.bin", total=300, unit="B")
    one.update(100)
    one.close()
    run.clock.now += 1.0
    two.update(150)
    run.clock.now += 1.0
    two.update(150)
    two.close()
    assert [ratio for _, ratio, _ in run.told()] == [0.0, 0.625, 1.0, 1.0]


@pytest.mark.parametrize("shown", [True, False])
def test_weights_are_loaded(run, monkeypatch, shown):
    monkeypatch.setattr(transformers_logging, "_tqdm_active", shown)
    for _ in transformers_logging.tqdm([1, 2, 3, 4], desc="Loading weights", file=io.StringIO()):
        run.clock.now += 1.0
    assert [ratio for _, ratio, _ in run.told()] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert {(detail, activity) for detail, _, activity in run.told()} == {("loading the model", "load")}


def test_a_hook_of_the_user_on_transformers_bars(run, monkeypatch):
    made = object()
    monkeypatch.setattr(transformers_logging, "_tqdm_hook", lambda factory, args, kwargs: made, raising=False)
    assert transformers_logging.tqdm([1]) is made


# -- how often, and when not ------------------------------------------------------------------------------


def test_at_most_two_events_a_second(run):
    began = run.clock.now
    times = []
    for _ in range(100):
        with new_bar(desc="Map", total=10, disable=True) as bar:
            for _ in range(10):
                run.clock.now += 0.01
                bar.update(1)
                times.extend([run.clock.now] * (len(run.told()) - len(times)))
        times.extend([run.clock.now] * (len(run.told()) - len(times)))
    assert run.clock.now - began == pytest.approx(10.0)
    assert 15 <= len(times) <= 22  # the first and the last second begin here, too


def test_what_hangs_is_shown_as_far_as_it_got(run):
    bar = new_bar(desc="Tokenizing", total=100)
    run.clock.now += 0.3
    bar.update(60)
    assert [ratio for _, ratio, _ in run.told()] == [0.0]
    (timer,) = run.timers.started
    assert timer.seconds == pytest.approx(0.7)
    assert timer.daemon
    active = read_pulse(str(run.folder / "pulse.0"))["activity_monotonic"]
    run.clock.now += 0.7
    timer.fire()
    assert run.told()[-1] == ("tokenizing", 0.6, "tokenize")
    run.writer.deliver()
    assert read_pulse(str(run.folder / "pulse.0"))["activity_monotonic"] - active < 1.0
    assert len(run.timers.started) == 1


def test_a_late_word_about_a_bar_that_is_done_is_not_said(run):
    with new_bar(desc="Tokenizing", total=100) as bar:
        run.clock.now += 0.2
        bar.update(100)
    run.writer.phase("prepare", "trainer ready")
    run.clock.now += 1.0
    run.timers.started[0].fire()
    assert run.told()[-1][0] == "trainer ready"


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "prepare"])
def test_while_a_training_runs_bars_are_only_signs_of_life(run, phase):
    run.writer.phase(phase, "as it is")
    before = run.told()
    run.writer.pulse.update(activity_monotonic=0.0)
    bar = new_bar(desc="Tokenizing", total=10)
    run.clock.now += 5.0
    bar.update(5)
    bar.close()
    run.writer.deliver()
    pulse = read_pulse(str(run.folder / "pulse.0"))
    assert PHASES[int(pulse["phase"])] == phase
    assert pulse["activity_monotonic"] > 0
    assert run.told() == before


def test_the_upload_of_a_thread_is_no_life_of_a_training(run):
    run.writer.phase("compute")
    run.writer.pulse.update(activity_monotonic=0.0)

    def upload():
        new_bar(huggingface_hub.utils.tqdm, desc="New Data Upload", total=10).update(5)

    thread = threading.Thread(target=upload)
    thread.start()
    thread.join()
    run.writer.deliver()
    assert read_pulse(str(run.folder / "pulse.0"))["activity_monotonic"] == 0


def test_other_ranks_only_show_that_they_live(run):
    run.writer.rank = 1
    run.writer.pulse.update(activity_monotonic=0.0)
    new_bar(desc="Tokenizing", total=10).update(5)
    run.writer.deliver()
    assert run.told() == []
    assert read_pulse(str(run.folder / "pulse.0"))["activity_monotonic"] > 0


def test_a_forked_worker_says_nothing(run):
    bar = new_bar(desc="Tokenizing", total=10)
    before = (run.folder / "events.jsonl").read_bytes()
    run.clock.now += 9.0
    pid = os.fork()
    if pid == 0:
        try:
            bar.update(5)
            new_bar(desc="Map", total=2).update(2)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (run.folder / "events.jsonl").read_bytes() == before


def test_a_fault_of_ours_breaks_no_bar(run, monkeypatch):
    monkeypatch.setattr(bars_module._Board, "_look", lambda *a: 1 / 0)
    monkeypatch.setattr(bars_module._Bar, "part", lambda *a: 1 / 0)
    seen = list(new_bar(iterable=range(5), desc="Tokenizing"))
    with new_bar(desc="Map", total=2) as bar:
        bar.update(2)
    assert (seen, bar.n) == ([0, 1, 2, 3, 4], 2)
    assert run.writer.errors > 0


def test_watching_twice_notes_once(run):
    watch_loaded()
    bar = new_bar(desc="Tokenizing", total=4, disable=True)
    run.clock.now += 1.0
    bar.update(1)
    assert [ratio for _, ratio, _ in run.told()] == [0.0, 0.25]
    before = list(sys.meta_path)
    watch_bars()
    assert sys.meta_path == before


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize("shown", [True, False])
def test_the_maps_of_datasets(run, monkeypatch, processes, shown):
    module = sys.modules["datasets.utils.tqdm"]
    monkeypatch.setattr(module, "_hf_datasets_progress_bars_disabled", not shown)
    rows = datasets.Dataset.from_dict({"text": ["CANARY"] * 300})
    rows.map(
        lambda row: {"n": 1}, desc="Tokenizing train dataset", num_proc=processes, load_from_cache_file=False
    )
    run.clock.now += 1.0
    rows.map(lambda row: {"n": 1}, desc="CANARY", load_from_cache_file=False)
    told = run.told()
    assert told[0] == ("tokenizing", 0.0, "tokenize")
    assert ("tokenizing", 1.0, "tokenize") in told
    assert told[-1] == ("preparing the dataset", 1.0, None)
    assert "CANARY" not in (run.folder / "events.jsonl").read_text()


# -- real programs ----------------------------------------------------------------------------------------


def activities(events):
    """What was told, in order, without repeats."""
    told = [(event["detail"], event.get("activity")) for event in events if event["event"] == "phase"]
    return list(dict.fromkeys(told))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--num-proc", "2"), marks=pytest.mark.slow),
        pytest.param(("--bars-off",), marks=pytest.mark.slow),
    ],
    ids=["plain", "num_proc", "bars_off"],
)
def test_an_unchanged_script_below_exec(machine, flags):
    command = machine.start(
        "exec", "--no-linger", "--", sys.executable, str(PREPARE), str(machine.folder / "out"), "--row-seconds",
        "0.0005", *flags,
    )  # fmt: skip
    assert command.wait() == 0, command.output[-3000:]
    events = machine.events()
    order = [
        step for step in activities(events) if step[0] in ("importing trl", "tokenizing", "trainer ready")
    ]
    assert order == [("importing trl", "import"), ("tokenizing", "tokenize"), ("trainer ready", None)]
    begin = next(index for index, event in enumerate(events) if event["event"] == "train_begin")
    places = [index for index, event in enumerate(events) if event.get("activity") == "tokenize"]
    assert places and max(places) < begin
    ratios = [event["ratio"] for event in events if event.get("detail") == "tokenizing"]
    assert ratios == sorted(ratios) and len(set(ratios)) > 2 and 0.9 < ratios[-1] <= 1.0
    assert "CANARY" not in (machine.run_folder() / "events.jsonl").read_text()
    assert len(machine.events("session")) == 1
    assert not (machine.run_folder() / "probe-errors.log").exists()


@pytest.mark.slow
def test_a_tokenizer_that_blocks(machine):
    machine.start(
        "exec", "--no-linger", "--patience", "prepare=20s", "--", sys.executable, str(PREPARE),
        str(machine.folder / "out"), "--hang-at", "2400", "--row-seconds", "0.0002",
    )  # fmt: skip
    wait_for(
        lambda: any(signal["signal"] == "stalled" for signal in machine.verdict()["signals"]), seconds=120,
        what="the verdict stalled",
    )  # fmt: skip
    last = machine.events("phase")[-1]
    assert (last["phase"], last["detail"], last["activity"]) == ("prepare", "tokenizing", "tokenize")
    assert 0.55 < last["ratio"] <= 0.6  # the bar of datasets moves twenty times a second, not to the last row


@pytest.mark.slow
def test_a_callback_in_a_script_sees_the_tokenizing_before_its_trainer_exists(machine):
    done = subprocess.run(
        [sys.executable, str(PREPARE), str(machine.folder / "out"), "--own-callback", "--row-seconds", "0.0005"],
        env={**machine.environment, "TUNEWATCH_RUN_ID": "own"}, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    folder = machine.home / "runs" / "own"
    steps = activities(read_events(folder))
    assert steps.index(("tokenizing", "tokenize")) < steps.index(("trainer ready", None))
    assert [path.name for path in (machine.home / "runs").iterdir()] == ["own"]


def test_an_import_that_hangs_is_seen(machine):
    package = machine.folder / "lib" / "trl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import threading\nthreading.Event().wait()\n")
    machine.start(
        "exec", "--no-linger", "--patience", "prepare=3s", "--", sys.executable, "-c", "import trl",
        PYTHONPATH=str(machine.folder / "lib"),
    )  # fmt: skip
    wait_for(
        lambda: any(signal["signal"] == "stalled" for signal in machine.verdict()["signals"]), what="stalled"
    )
    (phase,) = machine.events("phase")
    assert (phase["phase"], phase["detail"], phase["activity"]) == ("prepare", "importing trl", "import")
    assert time.time() - phase["t"] >= 3
