"""An nvidia-smi for tests, run as a program: answers as the files in its folder say.

FAKE_SMI names a folder. Every call is logged to `calls` there: start, end, and overlap when
another one still runs. Then:

- `hang`: never answers, and ignores SIGTERM; with `grandchild` another process keeps the pipes open too.
- `raw`: its text is the answer to every question, whatever was asked.
- `gpus.json`: a list of cards, each a dict from column to cell; a question is answered column by column, and
  a column that no card has is refused as the real program does. `headers.json` renames headers.
- `processes`: rows of uuid, process id and memory in answer to a question for processes.
- `listing`: the answer to -L. `lost`: a PCI bus id that silences all questions which do not use -i.
- `delay`: seconds until any answer.
- `exit_code`, `stderr`, `trailer` (text after the table) are added to any answer.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SMI"])
UNITS = {
    "utilization.gpu": "%",
    "fan.speed": "%",
    "memory.used": "MiB",
    "memory.reserved": "MiB",
    "memory.total": "MiB",
    "clocks.current.graphics": "MHz",
    "clocks.current.sm": "MHz",
    "clocks.current.memory": "MHz",
    "clocks.current.video": "MHz",
    "power.draw": "W",
    "power.draw.average": "W",
    "power.draw.instant": "W",
    "enforced.power.limit": "W",
    "power.limit": "W",
    "power.max_limit": "W",
    "clocks_event_reasons_counters.sw_power_cap": "us",
    "clocks_event_reasons_counters.sync_boost": "us",
    "clocks_event_reasons_counters.sw_thermal_slowdown": "us",
    "clocks_event_reasons_counters.hw_thermal_slowdown": "us",
    "clocks_event_reasons_counters.hw_power_brake_slowdown": "us",
}


def option(name: str, default: str = "") -> str:
    path = FOLDER / name
    return path.read_text() if path.exists() else default


def note(what: str) -> None:
    with (FOLDER / "calls").open("a") as log:
        log.write(f"{what} {' '.join(sys.argv[1:])}\n")


def answer() -> tuple[str, int]:
    if (FOLDER / "raw").exists():
        return (FOLDER / "raw").read_text(errors="replace"), 0
    if "-L" in sys.argv:
        return option("listing"), 0
    if any(argument.startswith("--query-compute-apps=") for argument in sys.argv):
        return "gpu_uuid, pid, used_gpu_memory [MiB]\n" + option("processes"), 0
    question = next(argument for argument in sys.argv if argument.startswith("--query-gpu="))
    columns = question.partition("=")[2].split(",")
    cards = json.loads(option("gpus.json", "[]"))
    if not cards:
        return "No devices were found\n", 6
    if "-i" in sys.argv:
        wanted = sys.argv[sys.argv.index("-i") + 1].split(",")
        cards = [card for card in cards if card["uuid"] in wanted]
    elif lost := option("lost"):
        return f"Unable to determine the device handle for GPU {lost}: Unknown Error\n", 255
    for column in columns:
        if not any(column in card for card in cards):
            return f'Field "{column}" is not a valid field to query.\n', 2
    renamed = json.loads(option("headers.json", "{}"))
    header = ", ".join(
        renamed.get(column, column) + (f" [{UNITS[column]}]" if column in UNITS else "") for column in columns
    )
    rows = [", ".join(card.get(column, "[N/A]") for column in columns) for card in cards]
    return "\n".join([header, *rows]) + "\n", 0


def main() -> None:
    note("start")
    lock = (FOLDER / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note("overlap")
    if (FOLDER / "grandchild").exists():
        subprocess.Popen(["sleep", "300"])
    if (FOLDER / "hang").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    time.sleep(float(option("delay", "0")))
    text, code = answer()
    sys.stdout.write(text + option("trailer"))
    sys.stderr.write(option("stderr"))
    sys.stdout.flush()
    note("end")
    sys.exit(int(option("exit_code", str(code))))


main()
