"""How fast `tunewatch replay` is: log entries a second, and its peak memory, on synthetic histories.

    python benchmarks/replay.py [--entries N] [--files N] [--profile] [--large]

Writes the files into a temporary folder: trainer_state.json with the keys of a plain SFT (loss, grad_norm,
learning_rate, epoch, step) and evaluations, trainer_log.jsonl of LLaMA-Factory, console output with progress bars,
our events.jsonl, event files of TensorBoard. One call of `tunewatch replay FOLDER` reads all files of one form.
--profile names the functions that cost most. --large reads one trainer_state.json of 1 GiB.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunewatch.replay.tensorboard import masked_crc

Entry = dict[str, Any]


def history(entries: int, seed: int) -> Iterator[Entry]:
    """A healthy run: a jagged loss that comes down, one evaluation in ten logs."""
    rng = random.Random(seed)
    for index in range(entries):
        step, epoch = 10 * (index + 1), round((index + 1) / 5000, 4)
        if index % 10 == 9:
            loss = round(1.5 + 1 / (1 + index / 500), 4)
            yield {
                "epoch": epoch,
                "eval_loss": loss,
                "eval_runtime": 12.5,
                "eval_samples_per_second": 80.1,
                "step": step,
            }
        else:
            loss = round(1 + 1.5 / (1 + index / 500) + rng.gauss(0, 0.1), 4)
            rate = 2e-4 * (1 - index / (entries + 1))
            yield {
                "epoch": epoch,
                "grad_norm": rng.lognormvariate(0, 0.3),
                "learning_rate": rate,
                "loss": loss,
                "step": step,
            }


def trainer_state(file: Any, logs: Iterator[Entry]) -> None:
    file.write('{\n  "best_metric": null,\n  "log_history": [\n')
    for index, entry in enumerate(logs):
        file.write((",\n" if index else "") + "    " + json.dumps(entry, indent=6)[:-1] + "    }")
    file.write('\n  ],\n  "max_steps": 100\n}\n')


def trainer_log(file: Any, logs: Iterator[Entry]) -> None:
    for entry in logs:
        entry["current_steps"], entry["lr"] = entry.pop("step"), entry.pop("learning_rate", None)
        file.write(json.dumps({**entry, "elapsed_time": "0:00:10", "remaining_time": "1:00:00"}) + "\n")


def console(file: Any, logs: Iterator[Entry]) -> None:
    for entry in logs:
        step = entry.pop("step")
        file.write(f"\r {step % 100}%|###   | {step}/99999999 [00:10<10:00,  1.23it/s]\r{' ' * 60}\r")
        file.write(f"{ {key: f'{value:.4g}' for key, value in entry.items()} }\n")


def events(file: Any, logs: Iterator[Entry]) -> None:
    for entry in logs:
        step = entry.pop("step")
        line = {
            "t": 1.7e9,
            "m": 1e4,
            "event": "log",
            "rank": 0,
            "session": "s",
            "step": step,
            "epoch": entry["epoch"],
        }
        file.write(json.dumps({**line, "values": entry, "nonfinite": {}, "tokens_seen": step * 1000}) + "\n")


def tensorboard(file: Any, logs: Iterator[Entry]) -> None:
    """As transformers writes it with torch: a record for each number."""

    def record(data: bytes) -> bytes:
        length = struct.pack("<Q", len(data))
        return (
            length + struct.pack("<I", masked_crc(length)) + data + bytes(4)
        )  # replay does not compare the last sum

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def varint(value: int) -> bytes:
        return (bytes([value & 127 | 128]) + varint(value >> 7)) if value > 127 else bytes([value])

    out = file.buffer
    for number, entry in enumerate(logs):
        step, group = entry.pop("step"), "eval" if "eval_loss" in entry else "train"
        head = b"\x09" + struct.pack("<d", 1.7e9 + number) + b"\x10" + varint(step)
        for key, value in sorted(entry.items(), key=lambda item: item[0] == "epoch"):
            tag = f"train/{key}" if key == "epoch" else f"{group}/{key.removeprefix('eval_')}"
            scalar = field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
            out.write(record(head + field(5, field(1, scalar))))


FORMS: dict[str, Callable[[Any, Iterator[Entry]], None]] = {
    "trainer_state": trainer_state, "trainer_log": trainer_log, "console": console, "events": events,
    "tensorboard": tensorboard,
}  # fmt: skip


def measure(name: str, folder: Path, entries: int) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir())
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.Popen(
        [sys.executable, "-m", "tunewatch", "replay", "--json", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = done.communicate()
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    logs = sum(report["logs"] for report in json.loads(output))
    assert logs == entries, f"{name}: {logs} of {entries} log entries were read"
    print(
        f"| {name} | {entries} | {size / 1e6:.0f} MB | {wall:.1f} | {seconds:.1f} | {1e6 * seconds / entries:.1f} | "
        f"{after.ru_maxrss / 1024:.0f} MB |",
        flush=True,
    )


def profile(folder: Path) -> None:
    from tunewatch.health import Thresholds
    from tunewatch.replay import replay

    profiler = cProfile.Profile()
    profiler.enable()
    for _ in replay(str(folder), Thresholds()):
        pass
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def large(folder: Path) -> int:
    """One file of 1 GiB, written from one block of entries."""
    block = [json.dumps(entry) for entry in history(10_000, 0)]
    size = entries = 0
    with (folder / "trainer_state.json").open("w", encoding="utf-8") as file:
        file.write('{"log_history": [')
        while size < 1 << 30:
            size += file.write((", " if size else "") + ", ".join(block))
            entries += len(block)
        file.write("]}")
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of tunewatch replay.")
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--form", choices=FORMS, action="append")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print("| form | log entries | size | wall s | cpu s | cpu us an entry | peak memory (of all so far) |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.form or FORMS:
        with tempfile.TemporaryDirectory() as made:
            folder, each = Path(made), options.entries // options.files
            for number in range(options.files):
                with (folder / f"{number:05}").open("w", encoding="utf-8", newline="") as file:
                    FORMS[name](file, history(each, number))
            measure(name, folder, each * options.files)
            if options.profile:
                profile(folder)
    if options.large:
        with tempfile.TemporaryDirectory() as made:
            measure("one trainer_state of 1 GiB", Path(made), large(Path(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
