"""Writes what no training would write, in any order, into its run folder: `any_events.py SEED`. Ends as it likes."""

import json
import os
import random
import sys
import time
from pathlib import Path

from tunewatch.probe.pulse import FIELDS, PHASES, Pulse
from tunewatch.probe.writer import process_start

dice = random.Random(int(sys.argv[1]))
folder = Path(os.environ["TUNEWATCH_RUN_FOLDER"])
ODD = [None, True, -1, 3, 7.5, 1e300, 10**30, "nan", "x" * 300, "\n", [], [1], {}, {"a": {"b": 1}}]
EVENTS = (
    "session", "phase", "state", "provenance", "device", "train_begin", "log", "evaluate", "save", "nonfinite",
    "finite", "train_end", "train_return", "exception", "samples", "hub_push", "package", "epoch", "unheard of",
)  # fmt: skip
GARBAGE = (b"{", b"null\n", b"[]\n", b'{"event": 3}\n', b"\xff\xfe\n", b'{"event": "log", "step": NaN}\n')
NAMES = (
    "step", "max_steps", "effective", "restored", "values", "nonfinite", "seconds", "phase", "detail", "ratio", "loss",
    "restart", "requested_stop", "state", "info", "gpus", "rank", "session", "type", "reason", "ok", "tokens", "t", "m",
)  # fmt: skip


def sane():
    step = dice.randrange(30)
    return {
        "step": step,
        "max_steps": 30,
        "values": {"loss": dice.random(), "eval_loss": dice.random(), "grad_norm": dice.random()},
        "nonfinite": dice.choice([{}, {"loss": "nan"}]),
        "effective": {"batch_size": 8},
        "loss": True,
        "seconds": 1.0,
        "session": dice.choice("ab"),
    }


def line():
    if dice.random() < 0.1:
        return dice.choice(
            [b"{", b"null\n", b"[]\n", b'{"event": 3}\n', b"\xff\xfe\n", b'{"event": "log", "step": NaN}\n']
        )
    event = {"t": time.time(), "m": time.monotonic(), "rank": 0, **sane(), "event": dice.choice(EVENTS)}
    for _ in range(dice.randrange(4)):
        event[dice.choice(NAMES)] = dice.choice(ODD)
    return json.dumps(event).encode() + b"\n"


pulse = Pulse(str(folder / "pulse.0"), rank=0)
hello = {
    "t": time.time(), "m": time.monotonic(), "event": "session", "rank": 0, "session": "a", "pid": os.getpid(),
    "process_start": process_start(os.getpid()), "world_size": 1,
}  # fmt: skip
with (folder / "events.jsonl").open("ab", buffering=0) as file:
    file.write(json.dumps(hello).encode() + b"\n")
    for _ in range(80):
        file.write(line())
        for name in dice.sample([name for name in FIELDS if name.endswith("_total")], 3):
            pulse.add(name, dice.random())
        pulse.update(
            phase=float(dice.randrange(len(PHASES))), step=float(dice.randrange(30)),
            phase_monotonic=time.monotonic(), activity_monotonic=time.monotonic(),
        )  # fmt: skip
        time.sleep(0.02)
# Whoever watches has seen something of it before it ends.
deadline = time.monotonic() + 30.0
while not (folder / "seen").exists() and time.monotonic() < deadline:
    time.sleep(0.02)
sys.exit(dice.choice([0, 0, 1, 3]))
