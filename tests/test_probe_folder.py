"""The writing side of a run folder under fire: torn reads, kills, full disks, forks, copies of the module."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from harness import wait_for

from tunewatch.probe import pulse as pulse_module
from tunewatch.probe import writer as writer_module
from tunewatch.probe.pulse import FIELDS, UNKNOWN_AT_START, Pulse, read_pulse
from tunewatch.probe.writer import MAX_LATER, MAX_PENDING, RunWriter, process_globals, process_start
from tunewatch.runfolder import EventReader

SOURCE = Path(pulse_module.__file__).parents[2]
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem")


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=False).returncode:
        pytest.skip("may not mount")
    yield folder
    gc.collect()
    subprocess.run(["umount", "-l", folder], check=True)


def fill(path):
    """Write until the disk is full, to the last byte."""
    with path.open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    return path


def python(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, text=True, **options,
    )  # fmt: skip


def lines(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


# -- pulse -------------------------------------------------------------------------------------------------


def test_unknown_is_nan_and_counters_are_zero(tmp_path):
    pulse = Pulse(str(tmp_path / "pulse.3"), rank=3)
    values = read_pulse(str(tmp_path / "pulse.3"))
    assert list(values) == list(FIELDS)
    for name in UNKNOWN_AT_START:
        assert math.isnan(values[name])
    assert (values["rank"], values["pid"], values["first_step"]) == (3.0, os.getpid(), 1.0)
    assert values["steps_total"] == values["saves"] == values["save_seconds"] == 0.0
    pulse.add("saves")
    assert read_pulse(str(tmp_path / "pulse.3"))["saves"] == 0.0  # seen with the next publish
    pulse.update(step=7)
    assert read_pulse(str(tmp_path / "pulse.3"))["saves"] == 1.0
    assert not list(tmp_path.glob("pulse.3.*"))
    assert (tmp_path / "pulse.3").stat().st_mode & 0o777 == 0o600


def test_no_pulse_yet(tmp_path):
    assert read_pulse(str(tmp_path / "pulse.0")) is None
    (tmp_path / "pulse.0").write_bytes(b"")
    assert read_pulse(str(tmp_path / "pulse.0")) is None
    (tmp_path / "pulse.0").write_bytes(b"x" * 4096)
    assert read_pulse(str(tmp_path / "pulse.0")) is None


HAMMER = """
    import sys
    from tunewatch.probe.pulse import FIELDS, Pulse
    pulse = Pulse(sys.argv[1], rank=0)
    number = 0.0
    while True:
        number += 1.0
        pulse.values[:] = [number] * len(FIELDS)
        pulse.publish()
"""


def test_a_reader_never_sees_a_torn_record_while_a_writer_hammers(tmp_path):
    path = str(tmp_path / "pulse.0")
    writer = python(HAMMER, path)
    try:
        wait_for(lambda: (read_pulse(path) or {"step": math.nan})["step"] > 1, seconds=30)
        seen = []

        def enough():
            for _ in range(200):
                values = set(read_pulse(path).values())
                assert len(values) == 1, "a record of two writes"
                seen.extend(values)
            return len(set(seen)) > 100

        wait_for(enough, seconds=60, what="a hundred different records")
        assert seen == sorted(seen)
    finally:
        writer.kill()
        writer.wait()


def test_a_torn_read_is_made_again(tmp_path, monkeypatch):
    path = str(tmp_path / "pulse.0")
    pulse = Pulse(path, rank=0)
    pulse.update(step=5)
    real, reads = os.pread, []

    def pread(*arguments):
        raw = real(*arguments)
        reads.append(raw)
        if len(reads) == 1:  # the writer comes when half of it has been copied
            pulse.update(step=6, compute_seconds=2.0)
            return raw[:200] + real(*arguments)[200:]
        return raw

    monkeypatch.setattr(pulse_module.os, "pread", pread)
    values = read_pulse(path)
    assert (values["step"], values["compute_seconds"]) == (6.0, 2.0)
    assert len(reads) == 2


def test_a_writer_killed_at_any_moment_leaves_a_record(tmp_path):
    for attempt in range(10):
        path = str(tmp_path / f"pulse.{attempt}")
        writer = python(HAMMER, path)
        try:
            wait_for(lambda path=path: (read_pulse(path) or {"step": 0})["step"] > 1, seconds=30)
        finally:
            writer.kill()
            writer.wait()
        assert read_pulse(path)["step"] > 1


def test_a_record_that_stays_torn_is_taken_as_it_is(tmp_path):
    path = tmp_path / "pulse.0"
    Pulse(str(path), rank=0).update(step=5)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\0\1\2\3")  # no longer its checksum
    assert read_pulse(str(path))["step"] == 5.0


def test_a_publish_is_one_write(tmp_path, monkeypatch):
    """A kill comes before or after it."""
    pulse = Pulse(str(tmp_path / "pulse.0"), rank=0)
    writes, real = [], os.pwrite
    monkeypatch.setattr(pulse_module.os, "pwrite", lambda *a: writes.append(a) or real(*a))
    pulse.update(step=6, epoch=0.5)
    pulse.mark(7.0, 1.7e9, 5e6, 7.0)
    assert [len(data) < 4096 for _, data, _ in writes] == [True, True]


def test_threads_do_not_write_an_old_record_over_a_new_one(tmp_path):
    path = str(tmp_path / "pulse.0")
    pulse = Pulse(path, rank=0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    end = threading.Event()
    others = [
        threading.Thread(target=lambda: [pulse.publish() for _ in iter(end.is_set, True)]) for _ in range(3)
    ]
    try:
        for thread in others:
            thread.start()
        for step in range(500):
            pulse.update(step=step)
            assert read_pulse(path)["step"] == step
    finally:
        end.set()
        sys.setswitchinterval(interval)
        for thread in others:
            thread.join()


def test_a_step_is_marked_before_its_values_are_there(tmp_path):
    path = str(tmp_path / "pulse.0")
    pulse = Pulse(path, rank=0)
    now = pulse.get("activity_monotonic")
    pulse.update(
        step=5, steps_total=2, epoch=0.5, phase=2.0, phase_monotonic=now + 1, activity_monotonic=now + 1
    )
    pulse.mark(6, 1.7e9, now + 3, 3)
    values = read_pulse(path)
    assert (values["step"], values["steps_total"], values["epoch"]) == (6.0, 3.0, 0.5)
    assert (values["step_time"], values["step_monotonic"]) == (1.7e9, now + 3)
    assert (values["activity_time"], values["activity_monotonic"]) == (1.7e9, now + 3)
    assert (values["first_step"], values["phase"], values["phase_monotonic"]) == (0.0, 1.0, now + 3)
    pulse.update(step=0, steps_total=3, phase=0.0, phase_monotonic=now + 4)  # a new attempt begins again
    assert read_pulse(path)["step"] == 0.0


def test_a_pulse_that_somebody_truncated_kills_nobody(tmp_path):
    path = tmp_path / "pulse.0"
    pulse = Pulse(str(path), rank=0)
    os.truncate(path, 0)
    pulse.update(step=9)
    assert read_pulse(str(path))["step"] == 9.0


@ROOT
def test_a_disk_that_is_full_when_the_pulse_is_made(small_disk):
    fill(small_disk / "fill")
    with pytest.raises(OSError, match="No space left"):
        Pulse(str(small_disk / "pulse.0"), rank=0)
    assert [path.name for path in small_disk.iterdir()] == ["fill"]
    writer = RunWriter(str(small_disk))
    writer.phase("compute")
    writer.alive()
    assert writer.pulse is None
    assert writer.errors > 0


def test_a_quota_when_the_pulse_is_made(tmp_path):
    """RLIMIT_FSIZE: the kernel sends SIGXFSZ (Python ignores it) and refuses the write."""
    code = """
        import resource, sys
        from tunewatch.probe.writer import RunWriter
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        writer = RunWriter(sys.argv[1])
        writer.phase("compute")
        writer.event("log", values={})
        print(writer.pulse, writer.errors > 0)
    """
    child = python(code, tmp_path, stdout=subprocess.PIPE)
    assert child.communicate(timeout=60)[0] == "None True\n"
    assert child.returncode == 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@ROOT
@pytest.mark.skipif(shutil.which("mkfs.btrfs") is None, reason="needs btrfs-progs")
def test_a_full_copy_on_write_disk_takes_the_pulse_all_the_same(tmp_path):
    """Through an mmap this was a SIGBUS: btrfs gives each write new blocks, and there are none."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 120 * 2**20)
    subprocess.run(
        ["mkfs.btrfs", "-q", image], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if subprocess.run(["mount", "-o", "loop", image, disk], check=False).returncode:
        pytest.skip("may not mount btrfs")
    try:
        pulse = Pulse(str(disk / "pulse.0"), rank=0)
        for step in range(5):
            fill(disk / "fill")
            os.sync()
            pulse.update(step=step)
            assert read_pulse(str(disk / "pulse.0"))["step"] == step
        pulse.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# -- events ------------------------------------------------------------------------------------------------


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_every_line_is_strict_json(tmp_path):
    writer = RunWriter(str(tmp_path))
    writer.event(
        "log", values={"a": math.nan, "b": [math.inf, {"c": (-math.inf, 1.5)}]}, text="\u2028 \ud800 \n \x00 é",
        odd=object, number=2**80,
    )  # fmt: skip
    writer.event("broken", values={(1, 2): 3})  # a fault of our own: counted, not raised
    loop: list = []
    loop.append(loop)
    writer.event("broken", loop=loop)
    writer.event("last")
    raw = (tmp_path / "events.jsonl").read_bytes()
    assert raw.isascii() and raw.endswith(b"\n")
    events = [json.loads(line, parse_constant=no_constant) for line in raw.split(b"\n")[:-1]]
    assert [event["event"] for event in events] == ["session", "log", "last"]
    assert events[1]["values"] == {"a": None, "b": [None, {"c": [None, 1.5]}]}
    assert events[1]["text"] == "\u2028 \ud800 \n \x00 é"
    assert writer.errors == 2
    assert events[0] | {"pid": os.getpid(), "process_start": process_start(os.getpid())} == events[0]
    assert len({event["session"] for event in events}) == 1
    assert [event["m"] for event in events] == sorted(event["m"] for event in events)


@ROOT
def test_a_disk_that_fills_up_in_the_middle_of_a_line_loses_none(small_disk):
    reader = EventReader(small_disk / "events.jsonl")
    writer = RunWriter(str(small_disk))
    writer.open_pulse()
    pad = "x" * 700
    writer.event("log", number=0, pad=pad)
    filler = fill(
        small_disk / "fill"
    )  # pages of 4096: what is left of the events' own page takes a few lines
    for number in range(1, 30):
        writer.event("log", number=number, pad=pad)
    torn = (small_disk / "events.jsonl").read_bytes()
    assert not torn.endswith(b"\n")
    assert torn.count(b"\n") < 10
    numbers = [event["number"] for event in reader.new() if event["event"] == "log"]
    filler.unlink()
    for number in range(30, 33):
        writer.event("log", number=number, pad=pad)
    numbers += [event["number"] for event in reader.new()]
    assert numbers == list(range(33))
    assert reader.malformed == 1
    assert writer.pulse.get("append_errors") > 10
    assert writer.pulse.get("events_written") == 34
    assert writer.errors == 0


@ROOT
def test_a_disk_that_is_full_from_the_start_loses_none(small_disk):
    filler = fill(small_disk / "fill")
    folder = small_disk / "run"
    writer = RunWriter(str(folder))
    for number in range(3):
        writer.event("log", number=number)
    filler.unlink()
    writer.event("log", number=3)
    events = lines(folder)
    assert [event["event"] for event in events] == ["session", "log", "log", "log", "log"]
    assert [event["number"] for event in events[1:]] == [0, 1, 2, 3]


def test_what_waits_for_the_disk_is_bounded(tmp_path):
    (tmp_path / "file").write_text("")
    writer = RunWriter(str(tmp_path / "file" / "run"))
    for number in range(MAX_PENDING + 50):
        writer.event("log", number=number)
    kept = [json.loads(line)["number"] for line in writer._pending]
    assert kept == list(range(50, MAX_PENDING + 50))
    assert writer.errors == MAX_PENDING + 50
    assert (tmp_path / "file").read_text() == ""


def test_a_folder_that_can_not_be_written_as_a_user_sees_it(tmp_path):
    """Root may write everywhere, so this is done as nobody."""
    user = os.geteuid() or 65534
    tmp_path.chmod(0o555)
    code = """
        import os, sys
        from tunewatch.probe.writer import RunWriter
        if os.geteuid() == 0:
            os.setuid(int(sys.argv[2]))
        writer = RunWriter(sys.argv[1])
        writer.phase("compute"); writer.event("log"); writer.enter("data"); writer.alive()
        writer.exception(ValueError(), during="train")
        print("alive", writer.pulse)
    """
    child = python(code, tmp_path, user, stdout=subprocess.PIPE)
    assert child.communicate(timeout=60)[0] == "alive None\n"
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_writes_nothing(tmp_path):
    writer = RunWriter(str(tmp_path))
    writer.phase("compute", "before")
    before = (tmp_path / "events.jsonl").read_bytes(), (tmp_path / "pulse.0").read_bytes()
    child = os.fork()
    if child == 0:
        try:
            writer.phase("evaluate", "in the child")
            writer.event("log")
            writer.enter("save")
            writer.alive()
            writer.exception(ValueError(), during="train")
            writer._goodbye()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ((tmp_path / "events.jsonl").read_bytes(), (tmp_path / "pulse.0").read_bytes()) == before
    writer.event("log")
    assert lines(tmp_path)[-1]["event"] == "log"


def copy_of_the_probe(name):
    folder = Path(pulse_module.__file__).parent
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return importlib.import_module(f"{name}.writer")


def test_two_copies_of_the_probe_share_one_writer(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWATCH_RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "_tunewatch_probe", {}, raising=False)
    other = copy_of_the_probe("_probe_copy")
    try:
        assert other.RunWriter is not RunWriter
        assert other.process_globals() is process_globals()
        first = other.RunWriter.from_environment()
        assert RunWriter.from_environment() is first
        error = ValueError()
        first.exception(error, during="train")
        RunWriter(str(tmp_path / "run")).exception(error, during="process")
        assert [event["event"] for event in lines(tmp_path / "run")] == ["session", "exception"]
    finally:
        for name in [name for name in sys.modules if name.startswith("_probe_copy")]:
            del sys.modules[name]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("TUNEWATCH_RUN_FOLDER", raising=False)
    monkeypatch.setattr(sys, "_tunewatch_probe", {}, raising=False)
    monkeypatch.chdir(tmp_path)
    writer = RunWriter.from_environment()
    assert writer.inert
    writer.event("log")
    writer.phase("compute")
    writer.error()
    assert writer.open_pulse() is None
    assert list(tmp_path.iterdir()) == []


CANARY = "CANARY-ROW-TEXT"


class Slotted(Exception):
    __slots__ = ()

    def __setattr__(self, name, value):
        raise AttributeError(name)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError(CANARY)


@pytest.mark.parametrize("kind", [KeyError, RuntimeError, UnicodeError, Slotted, Mute])
def test_an_exception_is_reported_once_and_not_quoted(tmp_path, kind):
    writer = RunWriter(str(tmp_path))
    try:
        try:
            raise ValueError(CANARY)
        except ValueError:
            raise kind(CANARY) from None
    except kind as error:
        writer.exception(error, during="train")
        if kind is not Slotted:
            writer.exception(error, during="process")
    reported = [event for event in lines(tmp_path) if event["event"] == "exception"]
    assert [event["type"] for event in reported] == [kind.__name__]
    assert reported[0]["frames"][-1].endswith("test_an_exception_is_reported_once_and_not_quoted")
    for path in tmp_path.iterdir():
        assert CANARY.encode() not in path.read_bytes()


def test_a_fault_of_our_own_is_noted_without_what_it_quotes(tmp_path):
    writer = RunWriter(str(tmp_path))
    try:
        raise ValueError(CANARY)
    except ValueError:
        for _ in range(5):
            try:
                raise KeyError(f"{CANARY}2")
            except KeyError:
                writer.error()
    noted = (tmp_path / "probe-errors.log").read_text()
    assert noted.count("KeyError\n") == 3
    assert "test_probe_folder.py" in noted
    assert CANARY not in noted


def test_the_phases_share_out_the_time(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("tunewatch.probe.writer.time.monotonic", lambda: now)
    writer = RunWriter(str(tmp_path))
    writer.phase("prepare", "imports")
    for phase, seconds in (("data", 3.0), ("compute", 1.0), ("data", 5.0), ("compute", 2.0), ("save", 7.0)):
        now += seconds
        writer.enter(phase)
    found = read_pulse(str(tmp_path / "pulse.0"))
    assert found["prepare_seconds"] == pytest.approx(3.0)
    assert found["data_seconds"] == pytest.approx(1.0 + 2.0)
    assert found["compute_seconds"] == pytest.approx(5.0 + 7.0)
    assert found["phase"] == pulse_module.PHASES.index("save")


def test_repeats_of_a_phase_are_thinned_out(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("tunewatch.probe.writer.time.monotonic", lambda: now)
    writer = RunWriter(str(tmp_path))
    for number in range(100):
        now += 0.1
        writer.phase("prepare", "tokenizing", ratio=number / 99)
    events = [event for event in lines(tmp_path) if event["event"] == "phase"]
    assert 15 <= len(events) <= 25  # ten seconds, two a second
    assert events[-1]["ratio"] == 1.0


def test_an_orderly_end_is_told_and_a_kill_is_not(tmp_path):
    code = """
        import os, sys
        from tunewatch.probe.writer import RunWriter
        RunWriter(sys.argv[1]).event("log")
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), 9)
    """
    for end, expected in (("return", ["session", "log", "exit"]), ("kill", ["session", "log"])):
        child = python(code, tmp_path / end, end)
        assert child.wait(60) == (-signal.SIGKILL if end == "kill" else 0)
        assert [event["event"] for event in lines(tmp_path / end)] == expected


def test_a_new_process_ends_the_torn_line_of_one_before(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"t": 1.0, "event": "lo')
    RunWriter(str(tmp_path)).event("phase", phase="prepare")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines[0] == '{"t": 1.0, "event": "lo'
    assert [json.loads(line)["event"] for line in lines[1:]] == ["session", "phase"]


def test_a_program_below_a_training_leaves_its_pulse_alone(tmp_path):
    """An evaluation script that the training starts has the same rank; only one that trains takes the pulse."""
    training = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pulse = Pulse(str(tmp_path / "pulse.0"), rank=0)
        pulse.update(pid=float(training.pid), step=7.0)
        other = RunWriter(str(tmp_path))
        other.phase("prepare", "transformers imported")
        assert other.pulse is None
        found = read_pulse(str(tmp_path / "pulse.0"))
        assert (found["pid"], found["step"]) == (training.pid, 7.0)
        assert other.open_pulse(take=True) is not None
        assert read_pulse(str(tmp_path / "pulse.0"))["pid"] == os.getpid()
    finally:
        training.kill()
        training.wait()


def test_the_pulse_of_a_dead_process_is_replaced(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    Pulse(str(tmp_path / "pulse.0"), rank=0).update(pid=float(gone.pid))
    assert RunWriter(str(tmp_path)).open_pulse() is not None


# -- what is deferred --------------------------------------------------------------------------------------


def test_what_is_deferred_is_done_soon_and_the_thread_sleeps_when_there_is_nothing(tmp_path):
    writer = RunWriter(str(tmp_path))
    for number in range(2):
        writer.later(time.monotonic(), writer.event, "log")
        wait_for(
            lambda number=number: (tmp_path / "events.jsonl").exists() and len(lines(tmp_path)) == 2 + number
        )
        wait_for(lambda: writer._background.asleep, what="a sleeping thread")
    writer._background.end()


def test_what_was_deferred_comes_before_what_is_told_at_once_and_keeps_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # it has not come to it yet
    writer = RunWriter(str(tmp_path))
    before = time.monotonic()
    writer.later(before - 5.0, lambda: writer.event("log", number=1))
    writer.later(before - 4.0, lambda: 1 / 0)  # a fault of ours takes nothing else away
    writer.later(before - 3.0, lambda: writer.event("log", number=2))
    writer.event("save")
    told = lines(tmp_path)
    assert [event["event"] for event in told] == ["session", "log", "log", "save"]
    assert [event.get("number") for event in told[1:3]] == [1, 2]
    assert [event["m"] for event in told[1:3]] == [pytest.approx(before - 5.0), pytest.approx(before - 3.0)]
    assert told[1]["t"] == pytest.approx(told[2]["t"] - 2.0, abs=1e-3)
    assert writer.errors == 1


def test_what_is_deferred_is_bounded_and_done_at_once_where_there_are_no_threads(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer = RunWriter(str(tmp_path / "a"))
    writer.later(time.monotonic(), writer.event, "log")
    assert [event["event"] for event in lines(tmp_path / "a")] == ["session", "log"]
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # it never comes to run
    writer = RunWriter(str(tmp_path / "b"))
    for _ in range(MAX_LATER):
        writer.later(time.monotonic(), writer.event, "log")
    assert not (tmp_path / "b").exists()
    writer.later(time.monotonic(), writer.event, "log")
    assert len(lines(tmp_path / "b")) == 1 + MAX_LATER + 1


def test_a_forked_child_does_not_do_what_its_parent_deferred(tmp_path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    writer = RunWriter(str(tmp_path))
    writer.later(time.monotonic(), writer.event, "log")
    child = os.fork()
    if child == 0:
        try:
            writer.later(time.monotonic(), writer.event, "log")
            writer.deliver()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert not (tmp_path / "events.jsonl").exists()
    writer.deliver()
    assert [event["event"] for event in lines(tmp_path)] == ["session", "log"]


TRAIN = """
    import os, sys
    from types import SimpleNamespace as N
    from tunewatch.probe.reporter import Reporter
    from tunewatch.probe.writer import RunWriter
    reporter = Reporter(RunWriter(sys.argv[1]))
    state, control = N(global_step=0, max_steps=9, epoch=0.0), N(should_evaluate=False, should_save=False)
    reporter.train_begin(N(output_dir=""), state)
    for step in range(1, 4):
        reporter.step_begin()
        state.global_step = step
        reporter.step_end(None, state, control)
        reporter.log(None, state, {"loss": float(step)})
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), 9)
"""


def test_a_kill_does_not_lose_the_last_step_and_an_orderly_end_loses_nothing(tmp_path):
    for end in ("kill", "return"):
        child = python(TRAIN, tmp_path / end, end)
        assert child.wait(60) == (-signal.SIGKILL if end == "kill" else 0)
        pulse = read_pulse(str(tmp_path / end / "pulse.0"))
        assert (pulse["step"], pulse["steps_total"], pulse["first_step"]) == (3.0, 3.0, 0.0)
    told = [event for event in lines(tmp_path / "return") if event["event"] in ("log", "exit")]
    assert [event.get("step") for event in told] == [1, 2, 3, None]


def test_while_the_disk_takes_nothing_the_curve_goes_first(small_disk, monkeypatch):
    """What is kept is bounded; of it, the begin of the run and its exceptions outlive the logs."""
    monkeypatch.setattr(writer_module, "MAX_PENDING", 100)
    writer = RunWriter(str(small_disk))
    writer.event("train_begin", step=0)
    fill(small_disk / "fill")
    writer.event("save", step=1)
    for step in range(150):
        writer.event("log", step=step, values={"loss": 1.0})
    writer.event("exception", type="OSError")
    assert len(writer._pending) == 100
    (small_disk / "fill").unlink()
    writer.event("exit")
    events = list(
        EventReader(small_disk / "events.jsonl").new()
    )  # a line that the full disk tore is passed over
    kinds = [event["event"] for event in events]
    assert [kind for kind in kinds if kind != "log"] == [
        "session",
        "train_begin",
        "save",
        "exception",
        "exit",
    ]
    steps = [event["step"] for event in events if event["event"] == "log"]
    assert steps == sorted(steps) and steps[-1] == 149
    assert 97 <= len(steps) < 150, "a few found room in the last page of the file"
