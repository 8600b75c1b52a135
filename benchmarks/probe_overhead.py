"""What the probe costs the training thread: on a real tiny training, beside other loggers' callbacks.

    python benchmarks/probe_overhead.py [--steps 500] [--folder DIR] [--packages DIR]
    python benchmarks/probe_overhead.py --long

The first form trains a tiny Llama that logs every step, with our callback and transformers' own for TensorBoard,
Trackio and MLflow in the same run, and times from outside what each takes of the training thread per logged step:
of ours every hook of the step, of theirs `on_log` alone. It is wall time: on a busy machine p99 and max hold
the scheduler's time, too. What each does on threads of its own is not in it; for ours, its CPU time is shown.
Loggers are looked for in --packages (a folder made with `pip install --target`) after the environment; one that is
not found is said to be missing.

The second form sends 100,000 steps through the reporter and shows whether the cost or the memory grows.

Everything is written below --folder (a temporary folder by default): it decides about the disk.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TAP_HOOKS = ("micro_batch", "gradient_norm")
CALLBACK_HOOKS = ("on_step_begin", "on_step_end", "on_log")
LOGGERS = {
    "tensorboard": "TensorBoardCallback",
    "trackio": "TrackioCallback",
    "mlflow": "MLflowCallback",
}
LONG_STEPS, LONG_PART = 100_000, 10_000
WARM_UP = 20
"""Steps left out at the beginning: files are opened there, code runs for the first time."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.long:
            long_run(Path(name))
            return
        if options.packages is not None:
            sys.path.append(str(options.packages))
        show("alone, in a loop", bare_writes(Path(name) / "bare"))
        compare(Path(name), options.steps)


def show(title: str, rows: list[tuple[str, list[float]]]) -> None:
    print(f"{title + ' (microseconds)':<42}{'calls':>8}{'median':>10}{'p99':>10}{'max':>10}")
    for label, times in rows:
        print(f"{label:<42}{len(times):>8}" + "".join(f"{value * 1e6:>10.1f}" for value in summary(times)))
    print()


def summary(times: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], ordered[-1]


# -- alone -------------------------------------------------------------------------------------------------


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
        ("event: a log of five values", timed(lambda: writer.event("log", step=1, values=values), 5_000)),
        ("phase: enter", timed(lambda: writer.enter("data"), 5_000)),
    ]


def timed(function: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return times


# -- in a training -----------------------------------------------------------------------------------------


class PerStep:
    """Stopwatches whose readings are added up for each logged step."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[float]] = collections.defaultdict(list)
        self.steps: list[float] = []
        self._now = 0.0

    def watch(self, owner: Any, name: str) -> None:
        """Time the method `name` of an object or a class."""
        method = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            spent = time.perf_counter() - began
            self.hooks[name].append(spent)
            self._now += spent
            return result

        setattr(owner, name, measured)

    def step_over(self) -> None:
        self.steps.append(self._now)
        self._now = 0.0


def compare(folder: Path, steps: int) -> None:
    """Train for real with every logger there is, and print what each took per logged step."""
    os.environ.update(
        TUNEWATCH_RUN_FOLDER=str(folder / "run"), HF_HUB_OFFLINE="1", TENSORBOARD_LOGGING_DIR=str(folder / "tb"),
        TRACKIO_DIR=str(folder / "trackio"), MLFLOW_TRACKING_URI=f"sqlite:///{folder / 'mlflow.db'}",
        MLFLOW_DISABLE_TELEMETRY="true", GRADIO_ANALYTICS_ENABLED="False",
    )  # fmt: skip
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from tunewatch import TunewatchCallback
    from tunewatch.probe.pulse import read_pulse
    from tunewatch.probe.reporter import Reporter

    torch.set_num_threads(1)
    watches = {"tunewatch": PerStep()}
    background = cpu_of_background()
    ours = TunewatchCallback()
    for name in TAP_HOOKS:
        watches["tunewatch"].watch(Reporter, name)
    for name in CALLBACK_HOOKS:
        watches["tunewatch"].watch(ours, name)
    loggers, missing = find_loggers()
    for name, callback in loggers.items():
        watches[name] = PerStep()
        watches[name].watch(callback, "on_log")

    class EndOfStep(TrainerCallback):
        """The last of the callbacks: all others have done their work of this step."""

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            for watch in watches.values():
                watch.step_over()

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip
    row = {"input_ids": list(range(20)), "attention_mask": [1] * 20, "labels": list(range(20))}
    arguments = TrainingArguments(
        str(folder / "out"), max_steps=steps, per_device_train_batch_size=2, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[row] * 64,
        callbacks=[*loggers.values(), ours, EndOfStep()],
    )
    with silence():
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    pulse = read_pulse(str(folder / "run" / "pulse.0"))
    if pulse is None:
        raise SystemExit("the run left no pulse")
    print(f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{steps} steps in {seconds:.2f} s; {pulse['hook_errors']:.0f} errors in the probe\n")
    show(
        "our hooks in this training",
        [(name, times[WARM_UP:]) for name, times in watches["tunewatch"].hooks.items()],
    )
    show(
        "per logged step",
        [
            (
                "tunewatch, all hooks" if name == "tunewatch" else f"{name} {versions(name)}, on_log",
                watch.steps[WARM_UP:steps],
            )
            for name, watch in watches.items()
        ],
    )
    print(f"tunewatch's background thread: {sum(background) / steps * 1e6:.1f} us CPU a step\n")
    for name, why in missing.items():
        print(f"missing: {name} ({why})")
    others = [
        summary(watch.steps[WARM_UP:steps])[0] for name, watch in watches.items() if name != "tunewatch"
    ]
    if others:
        share = summary(watches["tunewatch"].steps[WARM_UP:steps])[0] / min(others)
        print(f"ours is {share:.3f} of the cheapest of the others")


def cpu_of_background() -> list[float]:
    """Have the CPU time of each round of our background thread noted."""
    from tunewatch.probe.writer import RunWriter

    rounds: list[float] = []
    work = RunWriter._work

    def measured(self: RunWriter) -> bool:
        began = time.thread_time()
        result = work(self)
        rounds.append(time.thread_time() - began)
        return result

    RunWriter._work = measured  # type: ignore[method-assign]
    return rounds


def versions(package: str) -> str:
    from importlib import metadata

    names = {"mlflow": ("mlflow", "mlflow-skinny")}.get(package, (package,))
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def find_loggers() -> tuple[dict[str, Any], dict[str, str]]:
    """transformers' callbacks of the loggers that can be imported, and why the others can not."""
    from transformers.integrations import integration_utils

    found, missing = {}, {}
    for name, callback in LOGGERS.items():
        try:
            found[name] = getattr(integration_utils, callback)()
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error).splitlines()[0]
    return found, missing


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep the printed logs off the screen."""
    with Path(os.devnull).open("w") as quiet, contextlib.redirect_stdout(quiet):
        yield


# -- for long ----------------------------------------------------------------------------------------------


def long_run(folder: Path) -> None:
    """Send many steps through a reporter, as the callback and the tap would."""
    import torch

    from tunewatch.probe.reporter import Reporter
    from tunewatch.probe.writer import RunWriter

    reporter = Reporter(RunWriter(str(folder / "run")))
    arguments = SimpleNamespace(output_dir=str(folder))
    state = SimpleNamespace(global_step=0, max_steps=LONG_STEPS, epoch=0.0, num_train_epochs=1)
    control = SimpleNamespace(should_evaluate=False, should_save=False, should_training_stop=False)
    ids = torch.arange(40).reshape(2, 20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    loss, norm = torch.tensor(1.5), torch.tensor(0.5)
    times = array.array("d", bytes(8 * LONG_STEPS))
    reporter.train_begin(arguments, state)
    reporter.writer.deliver()
    resident = []
    for step in range(LONG_STEPS):
        began = time.perf_counter()
        reporter.step_begin()
        reporter.micro_batch(loss, inputs)
        reporter.gradient_norm(norm)
        state.global_step, state.epoch = step + 1, step / LONG_STEPS
        reporter.step_end(arguments, state, control)
        reporter.log(
            arguments, state, {"loss": 1.5, "grad_norm": 0.5, "learning_rate": 1e-4, "epoch": state.epoch}
        )
        times[step] = time.perf_counter() - began
        if step % 100 == 0:
            reporter.writer.deliver()  # no time passes here in which the background thread could
        if step in (LONG_PART, LONG_STEPS - 1):
            resident.append(resident_bytes())
    print(f"{LONG_STEPS} steps, each of them logged; {reporter.writer.errors} errors")
    show(
        "per step",
        [(f"first {LONG_PART}", list(times[:LONG_PART])), (f"last {LONG_PART}", list(times[-LONG_PART:]))],
    )
    print(
        f"resident memory after step {LONG_PART}: {resident[0] / 2**20:.2f} MiB, at the end {resident[1] / 2**20:.2f}"
    )


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
