"""The command: whatever it is given, its output and its exit code; and files that are none."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tunewatch.cli import main
from tunewatch.health import Thresholds
from tunewatch.replay import replay

GOOD = [{"loss": 2.0 - step / 100, "step": step} for step in range(1, 31)]
RISING = [*GOOD, *({"eval_loss": value, "step": 30} for value in (1.0, 1.5, 2.0))]
BROKEN = [*GOOD, {"loss": float("nan"), "step": 31}]


def written(path: Path, history: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps({"log_history": history}))
    return str(path)


def command(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"TUNEWATCH_HOME": str(home)} if home else {})}
    return subprocess.run(
        [sys.executable, "-m", "tunewatch", "replay", *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def strict(text: str) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    value: list[dict[str, Any]] = json.loads(text, parse_constant=refuse)
    return value


def problem(path: Path) -> str:
    """Why nothing could be judged there."""
    (found,) = replay(str(path), Thresholds())
    assert found.health == "unknown" and not found.readable
    assert found.problem is not None
    return found.problem


def test_the_report_is_a_line_a_run_and_one_a_signal(tmp_path: Path) -> None:
    good, broken = written(tmp_path / "good", GOOD), written(tmp_path / "broken", BROKEN)
    done = command(good, broken, str(tmp_path / "none"))
    assert done.returncode == 2 and done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{good}: ok (trainer_state: 30 logs, 30 losses, 0 evaluations, up to step 30)",
        f"{broken}: bad (trainer_state: 31 logs, 31 losses, 0 evaluations, up to step 31)",
        "  bad       nonfinite, step 31: The loss is NaN or infinite since step 31: the weights are damaged. "
        "Stop it. Resume from a checkpoint before that step with a lower learning rate or bf16.",
        f"{tmp_path / 'none'}: unknown (no such file, folder or run)",
        "2 runs in 2 files: 1 bad, 1 ok; nothing to judge in 1 more",
    ]


def test_json_names_file_run_health_signals_and_counts(tmp_path: Path) -> None:
    rising = written(tmp_path / "rising", RISING)
    done = command("--json", rising, str(tmp_path / "none"))
    assert done.returncode == 1
    first, second = strict(done.stdout)
    (signal,) = first.pop("signals")
    assert {key: signal[key] for key in ("signal", "level", "step")} == {
        "signal": "overfitting", "level": "attention", "step": 30,
    }  # fmt: skip
    assert signal["message"] and signal["advice"]
    assert first == {
        "file": rising, "run": 1, "format": "trainer_state", "health": "attention", "logs": 33, "losses": 30,
        "evals": 3, "steps": 30, "step_source": "logged", "problem": None,
    }  # fmt: skip
    assert second == {
        "file": str(tmp_path / "none"), "run": None, "format": None, "health": "unknown", "signals": [], "logs": 0,
        "losses": 0, "evals": 0, "steps": None, "step_source": "none", "problem": "no such file, folder or run",
    }  # fmt: skip


def test_the_exit_code_is_the_worst_verdict(tmp_path: Path) -> None:
    good, rising = written(tmp_path / "good", GOOD), written(tmp_path / "rising", RISING)
    assert command(good).returncode == 0
    assert command(good, rising).returncode == 1
    assert command(str(tmp_path / "none"), good).returncode == 0
    assert command("--json", str(tmp_path / "none")).returncode == 3


def test_signals_can_be_switched_off_and_limits_moved(tmp_path: Path) -> None:
    rising = written(tmp_path / "rising", RISING)
    assert command("--off", "overfitting", rising).returncode == 0
    assert command("--threshold", "overfit_ratio=3", "--threshold", "rising_ratio=3", rising).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threshold", "no_such=1"], "expected NAME=VALUE with one of nonfinite_streak"),
        (["--threshold", "flat_logs=2.5"], "threshold flat_logs: 2.5 is not a whole number above 0"),
        (["--threshold", "flat_ratio=x"], "expected a number above 0"),
        (["--threshold", "flat_ratio=-1"], "threshold flat_ratio: -1.0 is not a number above 0"),
        (["--off", "no_such"], "no such signal: no_such; there are nonfinite"),
        (["--jason"], "No such option: --jason"),
    ],
)
def test_a_wrong_option_names_what_is_allowed_and_is_no_verdict(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tunewatch", "replay", *arguments, written(tmp_path / "a", GOOD)])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert ended.value.code == 64 and said in output.err and output.out == ""


def test_a_run_is_found_by_its_id_and_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "my-run"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"run_id": "my-run"}')
    events = [{"t": 1.0, "m": 1.0, "event": "train_begin", "rank": 0, "session": "a", "step": 0,
               "effective": {"precision": "bf16"}, "trainable_parameters": 0, "total_parameters": 5}]  # fmt: skip
    events += [
        {**events[0], "event": "log", "step": step, "values": {"loss": 2.0}, "nonfinite": {}}
        for step in (1, 2)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for given in ("my-run", str(folder), str(folder / "events.jsonl")):
        (found,) = strict(command("--json", given, home=tmp_path).stdout)
        assert (found["run"], found["format"], found["logs"], found["health"]) == (
            "my-run",
            "events",
            2,
            "bad",
        )
        assert [signal["signal"] for signal in found["signals"]] == ["nothing_trainable"]


def test_a_folder_gives_all_files_below_it_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        written(tmp_path / name, GOOD)
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "aa" / "checkpoint-5").mkdir(parents=True)
    written(tmp_path / "aa" / "checkpoint-5" / "trainer_state.json", GOOD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text(
        '{"t": 1, "event": "log", "step": 1, "values": {"loss": 2.0}}\n'
    )
    (tmp_path / "run" / "child.log").write_text("{'loss': 2.0}\n")
    found = [
        (item.file.removeprefix(f"{tmp_path}/"), item.health) for item in replay(str(tmp_path), Thresholds())
    ]
    assert found == [("a", "ok"), ("aa/checkpoint-5/trainer_state.json", "ok"), ("b", "ok"), ("run", "ok")]


def test_what_links_lead_to_comes_once(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "below").mkdir(parents=True)
    (outside / "deep").mkdir(parents=True)
    written(folder / "below" / "a", GOOD)
    written(outside / "deep" / "b", GOOD)
    for name, target in {
        "again": "below", "file": "below/a", "home": ".", "up": "..", "far": "../outside", "farther": "../outside",
    }.items():  # fmt: skip
        (folder / name).symlink_to(target)
    (outside / "deep" / "round").symlink_to("../../folder")
    found = [item.file.removeprefix(f"{folder}/") for item in replay(str(folder), Thresholds())]
    assert found == ["below/a", "far/deep/b"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_read_says_so_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0)
    written(tmp_path / "b", GOOD)
    assert [(item.health, item.problem) for item in replay(str(tmp_path), Thresholds())] == [
        ("unknown", "Permission denied"), ("ok", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (gzip.compress(b"x", mtime=0), "gzip"),
        (bz2.compress(b"x"), "bzip2"),
        (lzma.compress(b"x"), "xz"),
        (b"PK\3\4..", "zip"),
    ],
    ids=["gzip", "bzip2", "xz", "zip"],
)
def test_a_compressed_file_says_so(head: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(head)
    assert problem(tmp_path / "a") == f"a compressed file ({kind})"


def test_what_is_no_log_gives_a_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "1-empty").write_bytes(b"")
    (tmp_path / "2-binary").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "3-blank").write_text(" \n\n")
    (tmp_path / "4-numbers").write_text("1 2.5\n2 2.25\n")
    (tmp_path / "5-words").write_text("training went well, loss 0.5\n")
    (tmp_path / "6-config").write_text(json.dumps({"model_type": "llama", "layers": 2}, indent=2))
    (tmp_path / "7-data").write_text('{"prompt": "loss", "completion": "x"}\n' * 3)
    (tmp_path / "8-nested").write_text('{"log_history": ' + "[" * 100_000)
    (tmp_path / "9-long").write_text('{"loss": ' + "9" * 2_000_000 + "}\n")
    os.mkfifo(tmp_path / "a-pipe")
    (tmp_path / "b-link").symlink_to("b-link")
    (tmp_path / "c-away").symlink_to("gone")
    written(tmp_path / "d-good", GOOD)
    found = {item.file.rpartition("/")[2]: item for item in replay(str(tmp_path), Thresholds())}
    good = {name for name, item in found.items() if item.health != "unknown"}
    assert good == {"d-good"}
    assert all(item.health == "unknown" for name, item in found.items() if name not in good)
    said = {name: item.problem for name, item in found.items() if name not in good}
    assert said["1-empty"] == "an empty file"
    assert said["2-binary"] == "a binary file that is no event file of TensorBoard"
    assert said["3-blank"] == said["7-data"] == "no log of a training in it"
    assert said["4-numbers"] == "only numbers: nothing says what they are"
    assert said["5-words"] == said["6-config"] == "no log of a training in it"
    assert said["a-pipe"] == "a pipe, no regular file"
    assert said["b-link"] == "a symbolic link that leads to itself"
    assert said["c-away"] == "no such file, folder or run"
    assert all(said.values())
    assert len(found) == 13


def test_devices_sockets_and_names_that_can_not_be_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        assert problem(tmp_path / "s") == "a socket, no regular file"
    assert problem(Path("/dev/null")) == "a device, no regular file"
    (found,) = replay("a\0b", Thresholds())
    assert found.problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a"
    written(path, GOOD)
    path.chmod(0)
    assert problem(path) == "Permission denied"


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    assert problem(tmp_path) == "a folder without files in it"


def test_a_name_that_is_no_text_is_shown_and_stays_json(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\n"
    Path(os.fsdecode(path)).write_text(json.dumps(GOOD))
    (found,) = strict(command("--json", str(tmp_path)).stdout)
    assert found["file"] == f"{tmp_path}/??" and found["health"] == "ok"


def test_bytes_that_are_no_utf_8_do_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"r\xe9seau \xff\n{'loss': 1.5, 'epoch': 0.1}\n")
    (found,) = replay(str(tmp_path / "a"), Thresholds())
    assert found.losses == 1


PAD = "x" * 4000
MEMORY = """
import resource, sys
from tunewatch.health import Thresholds
from tunewatch.replay import replay
list(replay(sys.argv[1], Thresholds()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
list(replay(sys.argv[2], Thresholds()))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [
        ('{"log_history": [', f'{{"loss": 1.5, "pad": "{PAD}"}},\n', '{"loss": 1.5}]}'),
        ("", f'{{"loss": 1.5, "pad": "{PAD}"}}\n', ""),
        (f"{PAD}\n", f"{{'loss': 1.5, 'pad': '{PAD}'}}\n", ""),
        ("", f"\r 10%|{PAD[:40]}| 1/2 [00:01<00:01]", ""),
        ("words ", PAD, ""),
        ("{'loss': ", PAD, ""),
        ('{"x": "', PAD, ""),
        ('{"log_history": [{"x": "', PAD, ""),
    ],
)
def test_memory_does_not_grow_with_the_file(head: str, unit: str, tail: str, tmp_path: Path) -> None:
    """32 MiB after 8 MiB of the same need at most 8 MiB more; KiB are compared."""
    for name, size in (("small", 8 << 20), ("large", 32 << 20)):
        with (tmp_path / name).open("w") as file:
            file.write(head + unit * (size // len(unit)) + tail)
    paths = [str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 8 << 10
