"""The run folder's layout, and its reading side on lines as they really come."""

from __future__ import annotations

import json
import os
import re
import stat
import threading

import pytest

from tunewatch import runfolder
from tunewatch.probe.pulse import Pulse
from tunewatch.runfolder import (
    EventReader,
    RunFolderError,
    choose_run_id,
    create_run,
    list_runs,
    new_run_id,
    open_run,
    remove_target,
    tunewatch_home,
    write_json,
    write_target,
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("TUNEWATCH_", "SLURM_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TUNEWATCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class TestHome:
    def test_where_it_is(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TUNEWATCH_HOME", "/a/b")
        assert str(tunewatch_home()) == "/a/b"
        monkeypatch.delenv("TUNEWATCH_HOME")
        monkeypatch.setenv("XDG_STATE_HOME", "/c")
        assert str(tunewatch_home()) == "/c/tunewatch"
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert tunewatch_home() == tmp_path / ".local/state/tunewatch"

    def test_a_relative_one_stays_where_it_was(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TUNEWATCH_HOME", "here")
        monkeypatch.chdir(tmp_path)
        assert tunewatch_home() == tmp_path / "here"

    def test_one_that_can_not_be_written(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TUNEWATCH_HOME", str(tmp_path / "file" / "home"))
        with pytest.raises(
            RunFolderError, match=r"TUNEWATCH_HOME .*/file/home can not be written: Not a directory"
        ):
            create_run(way="exec")

    def test_a_read_only_disk(self, monkeypatch):
        def refuse(*_args, **_kwargs):
            raise OSError(30, os.strerror(30))

        monkeypatch.setattr(runfolder.tempfile, "mkstemp", refuse)
        with pytest.raises(
            RunFolderError, match=r"Read-only file system\. Set TUNEWATCH_HOME to a folder on a local"
        ):
            create_run(way="exec")


class TestRunId:
    def test_a_new_one(self):
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", new_run_id())
        assert choose_run_id() != choose_run_id()

    def test_what_goes_before_what(self, monkeypatch):
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        assert choose_run_id() == "slurm-77-0"
        monkeypatch.setenv("TUNEWATCH_RUN_ID", "from-environment")
        assert choose_run_id() == "from-environment"
        assert choose_run_id("asked-for") == "asked-for"

    def test_slurm_arrays_and_requeues(self, monkeypatch):
        monkeypatch.setenv("SLURM_JOB_ID", "81")
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "80")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
        assert choose_run_id() == "slurm-80_3-0"
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        assert choose_run_id() == "slurm-80_3-2"

    @pytest.mark.parametrize("run_id", ["a", "A.b_c-9", "9" * 64])
    def test_allowed(self, run_id):
        assert choose_run_id(run_id) == run_id

    @pytest.mark.parametrize("run_id", ["a/b", "..", ".a", "-a", "a b", "a\n", "é", "9" * 65])
    def test_not_allowed(self, run_id):
        with pytest.raises(RunFolderError, match="is not allowed: letters, digits") as error:
            choose_run_id(run_id)
        assert repr(run_id) in str(error.value)


class TestCreate:
    def test_a_fresh_run(self, home):
        folder = create_run(run_id="r1", name="llama", way="exec", command=["python"], resumed_from=None)
        facts = folder.read("run.json")
        assert (facts["run_id"], facts["name"], facts["way"], facts["sessions"]) == ("r1", "llama", "exec", 1)
        assert facts["command"] == ["python"]
        assert folder.path == home / "runs" / "r1"
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder.path / "run.json").stat().st_mode) == 0o600

    def test_a_run_that_goes_on_keeps_what_is_known(self):
        first = create_run(run_id="r1", name="llama", way="exec", resumed_from="r0").read("run.json")
        again = create_run(run_id="r1", way="train", resumed_from=None).read("run.json")
        assert again == first | {"way": "train", "sessions": 2}
        assert create_run(run_id="r1", name="other", way="train").read("run.json")["name"] == "other"

    def test_without_a_name_it_is_called_by_its_id(self):
        assert create_run(run_id="r1", way="exec").read("run.json")["name"] == "r1"

    def test_a_broken_run_json_is_named(self):
        folder = create_run(run_id="r1", way="exec")
        (folder.path / "run.json").write_text("{")
        with pytest.raises(RunFolderError, match=r"r1/run.json can not be read"):
            create_run(run_id="r1", way="exec")
        (folder.path / "run.json").write_text("[]")
        with pytest.raises(RunFolderError, match="does not hold a JSON object"):
            folder.read("run.json")


class TestFind:
    def test_by_id_by_path_and_by_its_output(self, tmp_path, monkeypatch):
        folder = create_run(run_id="r1", way="exec")
        assert open_run("r1") == folder
        assert open_run(str(folder.path)) == folder
        monkeypatch.chdir(folder.path.parent)
        assert open_run("r1").path == folder.path
        output = tmp_path / "out"
        output.mkdir()
        write_json(output / "run.json", folder.read("run.json"))
        assert open_run(str(output)) == folder, "output_dir holds a copy of run.json"

    def test_none(self):
        with pytest.raises(RunFolderError, match=r"no run 'x' below .*/home/runs; there are none"):
            open_run("x")
        for number in range(7):
            create_run(run_id=f"r{number}", way="exec")
        with pytest.raises(RunFolderError, match="the latest are r2, r3, r4, r5, r6"):
            open_run("x")

    def test_a_list_by_age_of_folders_that_are_runs(self, home):
        assert list_runs() == []
        for number, run_id in enumerate(["b", "a", "c"]):
            folder = create_run(run_id=run_id, way="exec")
            os.utime(folder.path / "run.json", (1000 + number, 1000 + number))
        (home / "runs" / "no-run").mkdir()
        (home / "runs" / "file").write_text("")
        assert [folder.run_id for folder in list_runs()] == ["b", "a", "c"]


def test_the_target_file_is_what_file_sd_reads(home):
    folder = create_run(run_id="r1", way="exec")
    write_target(folder, "127.0.0.1:9470")
    assert folder.target_file == home / "targets" / "r1.json"
    content = json.loads(folder.target_file.read_text())
    assert content == [{"targets": ["127.0.0.1:9470"], "labels": {}}], "no run_id: the metrics carry it"
    assert stat.S_IMODE(folder.target_file.stat().st_mode) == 0o644, "Prometheus is another user"
    remove_target(folder)
    remove_target(folder)
    assert list((home / "targets").iterdir()) == []


class TestWriteJson:
    def test_a_reader_sees_all_of_it_or_what_was_before(self, tmp_path):
        path = tmp_path / "file.json"
        versions = [{"filler": str(number) * 20_000} for number in (1, 2)]
        write_json(path, versions[0])
        stop, seen = threading.Event(), []

        def read():
            while not stop.is_set():
                seen.append(json.loads(path.read_text()))

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(200):
            write_json(path, versions[number % 2])
        stop.set()
        reader.join()
        assert seen
        assert all(value in versions for value in seen)
        assert [item.name for item in tmp_path.iterdir()] == ["file.json"]

    def test_what_is_no_json_leaves_the_old_file_and_nothing_else(self, tmp_path):
        path = tmp_path / "file.json"
        write_json(path, {"a": 1})
        for value in (float("nan"), object()):
            with pytest.raises((ValueError, TypeError)):
                write_json(path, {"a": value})
        assert json.loads(path.read_text()) == {"a": 1}
        assert [item.name for item in tmp_path.iterdir()] == ["file.json"]

    def test_text_of_any_kind(self, tmp_path):
        path = tmp_path / "file.json"
        write_json(path, {"name": 'é🦙 "x"\n\\', "file": os.fsdecode(b"caf\xe9")})
        assert json.loads(path.read_text(encoding="utf-8")) == {"name": 'é🦙 "x"\n\\', "file": "caf?"}


def test_pulses_by_rank():
    folder = create_run(run_id="r1", way="exec")
    for rank in (0, 3):
        Pulse(str(folder.path / f"pulse.{rank}"), rank=rank).update(step=float(10 + rank))
    (folder.path / "pulse.1").write_bytes(b"short")
    (folder.path / "pulse.0.1234").write_bytes(b"a temporary file")
    (folder.path / "pulse.x").write_bytes(b"")
    assert {rank: pulse["step"] for rank, pulse in folder.pulses().items()} == {0: 10.0, 3: 13.0}


class TestEventReader:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "events.jsonl"

    @pytest.fixture
    def reader(self, path):
        return EventReader(path)

    def append(self, path, text):
        with path.open("a", encoding="utf-8") as file:
            file.write(text)

    def names(self, reader):
        return [event["event"] for event in reader.new()]

    def test_each_line_once_in_order(self, path, reader):
        assert self.names(reader) == []
        self.append(path, '{"event": "a"}\n{"event": "b"}\n')
        assert self.names(reader) == ["a", "b"]
        assert self.names(reader) == []
        self.append(path, '{"event": "c"}\n')
        assert self.names(reader) == ["c"]
        assert reader.position == path.stat().st_size

    def test_a_torn_last_line_waits_for_its_rest(self, path, reader):
        line = '{"event": "é", "x": 1}\n'.encode()
        for end in range(1, len(line)):
            path.write_bytes(b'{"event": "a"}\n' + line[:end])
            fresh = EventReader(path)
            assert self.names(fresh) == ["a"], end
            assert fresh.position == 15
            with path.open("ab") as file:
                file.write(line[end:])
            assert self.names(fresh) == ["é"], end
            assert fresh.malformed == 0

    def test_what_is_no_event_is_counted_and_skipped(self, path, reader):
        lines = [
            "no json",
            "[]",
            "7",
            "null",
            '{"no": "event"}',
            '{"event": 7}',
            '{"event": "x", "v": NaN}',
            '{"event"',
        ]
        self.append(path, "\n".join(["", *lines, '{"event": "good", "unknown": {}}', ""]))
        assert self.names(reader) == ["good"]
        assert reader.malformed == len(lines)

    def test_bytes_that_are_no_text(self, path, reader):
        path.write_bytes(b'\xff\xfe{"event": "a"}\n\x00\x00\n{"event": "b"}\n')
        assert self.names(reader) == ["b"]
        assert reader.malformed == 2

    def test_a_file_that_is_replaced_is_read_from_its_beginning(self, path, reader):
        self.append(path, '{"event": "a"}\n{"event": "b"}\n')
        assert self.names(reader) == ["a", "b"]
        other = path.with_name("other")
        other.write_text('{"event": "c"}\n{"event": "d"}\n{"event": "e"}\n')
        other.replace(path)
        assert self.names(reader) == ["c", "d", "e"]

    def test_a_file_that_is_cut_short_is_read_from_its_beginning(self, path, reader):
        self.append(path, '{"event": "a"}\n{"event": "b"}\n')
        assert self.names(reader) == ["a", "b"]
        path.write_text('{"event": "c"}\n')
        assert self.names(reader) == ["c"]

    def test_a_file_that_goes_away_and_comes_back(self, path, reader):
        self.append(path, '{"event": "a"}\n')
        assert self.names(reader) == ["a"]
        path.unlink()
        assert self.names(reader) == []

    def test_lines_longer_than_a_block(self, path, reader, monkeypatch):
        monkeypatch.setattr(runfolder, "_CHUNK", 7)
        self.append(path, '{"event": "a", "x": "' + "y" * 100 + '"}\n{"event": "b"}\n{"event"')
        assert self.names(reader) == ["a", "b"]
        self.append(path, ': "c"}\n')
        assert self.names(reader) == ["c"]

    def test_stopping_in_the_middle_loses_nothing(self, path, reader):
        self.append(path, '{"event": "a"}\n{"event": "b"}\n{"event": "c"}\n')
        assert next(iter(reader.new()))["event"] == "a"
        assert self.names(reader) == ["b", "c"]


def test_a_line_behind_a_torn_one_is_not_lost(tmp_path):
    """One process was cut off in the middle of a line, another wrote on."""
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"t": 1.0, "event": "log", "val{"t": 2.0, "event": "session"}\n{"t": 3.0, "event": "exit"}\n'
    )
    reader = EventReader(path)
    assert [event["event"] for event in reader.new()] == ["session", "exit"]
    assert reader.malformed == 1
