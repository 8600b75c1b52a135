"""What the probe costs the training thread: its hooks on a real tiny training, and its bare writes.

    python benchmarks/probe_overhead.py [--steps 200] [--folder DIR]

The hooks are timed from outside, one by one, in wall time: on a busy machine p99 and max hold the scheduler's time,
too. The run folder is made below --folder (a temporary folder by default): it decides about the disk.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOOKS = (
    "micro_batch", "gradient_norm", "step_begin", "substep_end", "step_end", "log", "prediction_step", "evaluate",
    "save", "train_begin", "train_end",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        rows = [*bare_writes(Path(name) / "bare"), *real_run(Path(name), options.steps)]
    print(f"{'microseconds':<34}{'calls':>8}{'median':>10}{'p99':>10}{'max':>10}")
    for label, times in rows:
        print(f"{label:<34}{len(times):>8}" + "".join(f"{value * 1e6:>10.1f}" for value in summary(times)))


def summary(times: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], ordered[-1]


def bare_writes(folder: Path) -> list[tuple[str, list[float]]]:
    """Time an event line and a pulse on their own."""
    from tunewatch.probe.writer import RunWriter

    writer = RunWriter(str(folder))
    pulse = writer.open_pulse()
    if pulse is None:
        raise SystemExit(f"the pulse can not be written below {folder}")
    values = {"loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-4, "entropy": 2.5, "num_tokens": 1e6}
    return [
        ("pulse: publish", timed(pulse.publish, 20_000)),
        ("pulse: update of four fields", timed(lambda: pulse.update(step=1, epoch=2, max_steps=3, rank=0), 20_000)),
        ("event: a log of five values", timed(lambda: writer.event("log", step=1, values=values), 5_000)),
        ("phase: enter", timed(lambda: writer.enter("data"), 5_000)),
    ]  # fmt: skip


def timed(function: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return times


def real_run(folder: Path, steps: int) -> list[tuple[str, list[float]]]:
    """Train a tiny Llama for real, with every hook of the reporter timed."""
    os.environ.update(TUNEWATCH_RUN_FOLDER=str(folder / "run"), HF_HUB_OFFLINE="1")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from tunewatch import TunewatchCallback
    from tunewatch.probe.pulse import read_pulse
    from tunewatch.probe.reporter import Reporter

    torch.set_num_threads(1)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name in HOOKS:
        setattr(Reporter, name, stopwatch(getattr(Reporter, name), times[name]))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip
    rows = [{"input_ids": list(range(20)), "labels": list(range(20))} for _ in range(64)]
    trainer = Trainer(
        model=model, train_dataset=rows, eval_dataset=rows[:16], callbacks=[TunewatchCallback()],
        args=TrainingArguments(
            str(folder / "out"), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            logging_steps=1, eval_strategy="steps", eval_steps=max(1, steps // 4), save_steps=max(1, steps // 4),
            report_to="none", use_cpu=True, disable_tqdm=True,
        ),
    )  # fmt: skip
    with Path(os.devnull).open("w") as quiet:  # the printed logs
        stdout, sys.stdout = sys.stdout, quiet
        try:
            began = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - began
        finally:
            sys.stdout = stdout
    pulse = read_pulse(str(folder / "run" / "pulse.0"))
    if pulse is None:
        raise SystemExit("the run left no pulse")
    ours = pulse["hook_seconds"]
    print(
        f"{steps} steps in {seconds:.2f} s, of which {ours:.3f} s in the probe ({ours / seconds:.2%}), ",
        end="",
    )
    print(f"{ours / steps * 1e6:.0f} us a step; {pulse['hook_errors']:.0f} errors\n")
    return [(f"hook: {name}", times[name]) for name in HOOKS if times[name]]


def stopwatch(method: Callable[..., None], times: list[float]) -> Callable[..., None]:
    def measured(*args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        method(*args, **kwargs)
        times.append(time.perf_counter() - began)

    return measured


if __name__ == "__main__":
    main()
