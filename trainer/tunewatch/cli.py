"""The `tunewatch` command."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from tunewatch import __version__, states
from tunewatch.durations import DurationError, parse_deadline, parse_duration, slurm_deadline
from tunewatch.finetune.errors import nearest
from tunewatch.health import SIGNALS, Patience, ThresholdError, Thresholds
from tunewatch.probe.values import as_number
from tunewatch.progressview import shown_percent
from tunewatch.provenance import masked_command, masked_text, overlap_warning
from tunewatch.review import ReviewError, mark_reviewed, read_samples, review_state, was_evaluated
from tunewatch.run import (
    child_environment,
    report_end,
    report_start,
    report_unseen,
    run_id_not_watched,
    say,
    supervise,
)
from tunewatch.runfolder import RunFolder, RunFolderError, create_run, list_runs, open_run
from tunewatch.supervisor.endpoint import ListenError
from tunewatch.supervisor.handover import relieve
from tunewatch.supervisor.process import Adopted
from tunewatch.supervisor.watch import AlreadyWatched, Options, Supervisor, shell_code_of

app = typer.Typer(
    name="tunewatch",
    help="Watch LLM fine-tuning runs you cannot sit next to.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Listen = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT to serve metrics on; default 127.0.0.1 and the first free port from 9470 on."
    ),
]
PatienceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--patience", help="PHASE=DURATION of silence allowed, e.g. step=5m, evaluate=1h (repeatable)."
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the run, shown to people; need not be unique.")]
RunId = Annotated[str | None, typer.Option("--run-id", help="Id of the run; default: a new one.")]
Grace = Annotated[str, typer.Option(help="Time between a request to end and SIGKILL.")]
Walltime = Annotated[
    str | None, typer.Option(help="How long its time is, from now, e.g. 8h; you are told if it will not do.")
]
Deadline = Annotated[
    str | None,
    typer.Option(
        help="When its time is over: 2026-12-24T18:00 (local time, or with a zone), or 18:00 for the next such time. "
        "Of several (--walltime, the end of a Slurm job) the earliest counts."
    ),
]
Off = Annotated[
    list[str] | None, typer.Option("--off", help="A signal that is not to be raised (repeatable).")
]
ThresholdOption = Annotated[
    list[str] | None,
    typer.Option("--threshold", help="NAME=VALUE, e.g. overfit_ratio=1.15 (repeatable)."),
]
NoLinger = Annotated[bool, typer.Option("--no-linger", help="Leave at once when the run has ended.")]


class UsageError(Exception):
    """The command can not be done as asked; the text is for the user."""


class CommandError(UsageError):
    """The command to be watched can not be run; `code` is what a shell exits with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


WRONG_USAGE = 64
"""EX_USAGE of sysexits.h."""


class _Judging(typer.core.TyperCommand):
    """A command whose exit code says what it found: where it was asked wrongly, the code is WRONG_USAGE."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().make_context(*arguments, **options)
        except Exception as error:
            if getattr(error, "exit_code", None) == 2:
                error.exit_code = WRONG_USAGE  # type: ignore[attr-defined]
            raise

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except UsageError as error:
            raise CommandError(str(error), WRONG_USAGE) from error


@app.command("exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def exec_command(
    context: typer.Context,
    name: Name = None,
    run_id: RunId = None,
    listen: Listen = None,
    patience: PatienceOption = None,
    grace: Grace = "60s",
    walltime: Walltime = None,
    deadline: Deadline = None,
    off: Off = None,
    threshold: ThresholdOption = None,
    no_linger: NoLinger = False,
) -> None:
    """Run any training command and watch it: tunewatch exec -- python train.py

    The callback attaches itself to transformers' Trainer (and TRL's) without a change of the code. Output passes
    through untouched, and the exit code is the command's own.
    """
    command = context.args
    if not command:
        raise UsageError(
            "exec: no command given. Write it behind --, as in: tunewatch exec -- python train.py"
        )
    limits = _limits(parse_thresholds(threshold or []), off or [])
    options = _options(listen, patience, grace, no_linger, walltime, limits, deadline)
    folder = create_run(
        run_id=run_id_not_watched(run_id),
        name=masked_text(name or Path(_script(command)).stem),
        way="exec",
        command=masked_command(command),
    )
    supervisor = Supervisor(folder, options)
    report_start(supervisor)

    def begin() -> None:
        supervisor.start(command, child_environment(folder, "exec", attach=True))

    try:
        code = supervise(supervisor, begin, shares_terminal=True)
    except OSError as error:
        code = shell_code_of(error)
        what = "command not found" if code == 127 else f"can not be executed ({error.strerror})"
        raise CommandError(f"exec: {what}: {command[0]}", code) from error
    report_end(supervisor)
    report_unseen(supervisor)
    raise typer.Exit(code)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file; see examples/run.yaml.")],
    name: Name = None,
    run_id: RunId = None,
    listen: Listen = None,
    patience: PatienceOption = None,
    grace: Grace = "60s",
    walltime: Walltime = None,
    deadline: Deadline = None,
    off: Off = None,
    threshold: ThresholdOption = None,
    no_linger: NoLinger = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Fine-tune with TRL's SFTTrainer and PEFT from a YAML file, watched from start to end."""
    from tunewatch.trainjob import prepare, run_job

    thresholds = parse_thresholds(threshold or [])
    limits = _limits(thresholds, off or [])
    options = _options(listen, patience, grace, no_linger, walltime, limits, deadline)
    job = prepare(
        config, name=name, run_id=run_id, options=options, patience=parse_patience(patience or []),
        thresholds=thresholds,
    )  # fmt: skip
    raise typer.Exit(run_job(job, quiet=quiet))


@app.command()
def adopt(
    run: Annotated[str, typer.Argument(help="Id of the run, or path of its folder.")],
    pid: Annotated[
        int | None, typer.Option(help="The training process; default: the one the last supervisor watched.")
    ] = None,
    listen: Listen = None,
    patience: PatienceOption = None,
    deadline: Deadline = None,
    off: Off = None,
    threshold: ThresholdOption = None,
    no_linger: NoLinger = False,
    session: Annotated[
        str | None, typer.Option(hidden=True, help="Which session of the process; our callback names it.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", hidden=True)] = False,
) -> None:
    """Watch a run whose supervisor is gone (killed, say): the training goes on without one, unseen."""
    folder = open_run(run)
    known = folder.read("supervisor.json") or {}
    start = None
    if pid is None:
        pid, start = known.get("child_pid"), known.get("child_process_start")
    if pid is None:
        raise UsageError(f"adopt: it is not known which process run {folder.run_id} is; name it with --pid")
    ended = (folder.read("verdict.json") or {}).get("ending")
    if ended is not None and session is None and Adopted(pid, start).poll():
        raise UsageError(f"adopt: run {folder.run_id} has ended: {ended['state']}. {ended['message']}")
    kept_limits, kept_off = _kept(known)
    limits = _limits({**kept_limits, **parse_thresholds(threshold or [])}, [*kept_off, *(off or [])])
    options = _options(listen, patience, "60s", no_linger, limits=limits, deadline=deadline)
    if deadline is None:
        options.deadline = as_number(known.get("deadline"))
    if known.get("patience"):
        options = replace(
            options, patience=Patience(**{**known["patience"], **parse_patience(patience or [])})
        )
    if session is not None:
        relieve(folder, pid)
    supervisor = Supervisor(folder, options)
    if not quiet:
        report_start(supervisor)
    code = supervise(supervisor, lambda: supervisor.adopt(pid, start, session))
    if not quiet:
        report_end(supervisor)
    raise typer.Exit(code)


@app.command()
def runs(
    run: Annotated[str | None, typer.Argument(help="One run to tell more of: its id, or a path.")] = None,
) -> None:
    """List the runs of this machine, the newest last, or tell what is known of one."""
    if run is not None:
        print("\n".join(_describe(open_run(run))))
        return
    folders = list_runs()
    if not folders:
        say("no runs yet")
        return
    for folder in folders:
        print(_run_line(folder))


samples_app = typer.Typer(
    name="samples",
    help="Read what a finished model writes, and say that you have read it.",
    no_args_is_help=True,
)
app.add_typer(samples_app)

Run = Annotated[str, typer.Argument(help="Id of the run, or path of its folder or output_dir.")]


@samples_app.command("list")
def list_samples(run: Run) -> None:
    """List the samples of a run, a line each."""
    folder = open_run(run)
    for sample in read_samples(folder):
        prompt, generated = _text(sample["prompt"]), _text(sample["generated"])
        print(f"{sample['index'] + 1:4}  {_short(prompt, 40):40}  {_short(generated, 60)}".rstrip())
    say(f"run {folder.run_id}: {review_state(folder)}")


@samples_app.command("show")
def show_samples(
    run: Run, number: Annotated[int | None, typer.Argument(help="Only this one, counted from 1.")] = None
) -> None:
    """Show the samples of a run in full; on a terminal, page by page."""
    from rich.console import Console

    folder = open_run(run)
    rows = read_samples(folder)
    if number is not None and not 1 <= number <= len(rows):
        raise UsageError(f"samples show: run {folder.run_id} has samples 1 to {len(rows)}, found {number}")
    chosen = rows if number is None else rows[number - 1 : number]
    text = "\n".join(_sample_text(row, len(rows)) for row in chosen)
    if sys.stdout.isatty():
        console = Console()
        with console.pager():
            console.print(text, markup=False, highlight=False)
        say(f"when you have read them: tunewatch samples review {folder.run_id} --all")
    else:
        print(text)


@samples_app.command("review")
def review_samples(
    run: Run,
    all_of_them: Annotated[bool, typer.Option("--all", help="You have read all samples.")] = False,
    through: Annotated[
        int | None, typer.Option(help="You have read the samples up to this one; 0 takes a review back.")
    ] = None,
) -> None:
    """Say that you have read the samples of a run; `tunewatch runs` and the metrics then say so too."""
    folder = open_run(run)
    if all_of_them == (through is not None):
        raise UsageError("samples review: say how many you have read, with either --all or --through N")
    say(f"run {folder.run_id}: {mark_reviewed(folder, through)}")


@app.command()
def rules(
    grafana_url: Annotated[str | None, typer.Option(help="Where your Grafana is, for dashboard_url.")] = None,
    runbook_url: Annotated[str | None, typer.Option(help="Where the runbooks are, for runbook_url.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write the rule files to; default: print them.")
    ] = None,
) -> None:
    """Print the alert and recording rules for your own Prometheus."""
    from tunewatch.rules import render_rules

    for file_name, text in render_rules(grafana_url, runbook_url).items():
        if output is None:
            print(f"# {file_name}\n{text}")
        else:
            output.mkdir(parents=True, exist_ok=True)
            (output / file_name).write_text(text, encoding="utf-8")


@app.command()
def stack(
    time_scale: Annotated[
        float, typer.Option(help="Divide every interval of the shipped files by this.")
    ] = 1.0,
    prometheus_port: Annotated[int | None, typer.Option(help="Default: 9090, or the next free one.")] = None,
    alertmanager_port: Annotated[
        int | None, typer.Option(help="Default: 9093, or the next free one.")
    ] = None,
    receiver_url: Annotated[str | None, typer.Option(help="Webhook for alerts; default: shown here.")] = None,
    alertmanager_config: Annotated[
        Path | None, typer.Option(help="Routes and receivers of yours; start from alertmanager.slack.yml.")
    ] = None,
    grafana_url: Annotated[
        str | None, typer.Option(help="A Grafana of yours, for the links in alerts.")
    ] = None,
    retention: Annotated[str, typer.Option(help="How long Prometheus keeps samples.")] = "30d",
) -> None:
    """Run Prometheus and Alertmanager for the runs of this machine, until Ctrl-C."""
    from rich.console import Console

    from tunewatch.runfolder import tunewatch_home
    from tunewatch.stack import gpu_driver_is_here, run_stack

    try:
        code = run_stack(
            tunewatch_home(),
            time_scale=time_scale,
            prometheus_port=prometheus_port,
            alertmanager_port=alertmanager_port,
            receiver_url=receiver_url,
            alertmanager_file=alertmanager_config,
            grafana_url=grafana_url,
            retention=retention,
            sidecar="auto" if gpu_driver_is_here() else None,
            console=Console(),
        )
    except ValueError as error:
        raise UsageError(f"stack: {error}") from None
    raise typer.Exit(code)


@app.command()
def doctor(
    prometheus_url: Annotated[
        str | None, typer.Option(help="Default: that of a running `tunewatch stack`.")
    ] = None,
    alertmanager_url: Annotated[
        str | None, typer.Option(help="Default: the one Prometheus sends to.")
    ] = None,
    no_test_alert: Annotated[bool, typer.Option("--no-test-alert", help="Do not send a test alert.")] = False,
) -> None:
    """Will it wake me? Checks the way from this machine's runs to your receiver, with a test alert."""
    from rich.console import Console

    from tunewatch.doctor import diagnose, exit_code, print_report
    from tunewatch.runfolder import tunewatch_home

    checks = diagnose(tunewatch_home(), prometheus_url, alertmanager_url, send_test_alert=not no_test_alert)
    print_report(checks, Console())
    raise typer.Exit(exit_code(checks))


@app.command()
def demo(
    fault: Annotated[
        str | None, typer.Option(help="nan, stall, kill, oom or disk_full: break the run for real.")
    ] = None,
    keep: Annotated[
        bool | None,
        typer.Option("--keep/--no-keep", help="Keep Prometheus running afterwards; default: on a terminal."),
    ] = None,
) -> None:
    """Show everything on this machine: stack, a real small fine-tune, and the alert as you would get it."""
    from tunewatch.demo import run_demo

    raise typer.Exit(run_demo(fault, keep=keep))


@app.command(cls=_Judging)
def replay(
    files: Annotated[
        list[str], typer.Argument(help="Logs of trainings in any form, folders of them, or ids of runs.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of text.")] = False,
    off: Off = None,
    threshold: ThresholdOption = None,
) -> None:
    """Judge past runs by their logs, with the detectors that watch live ones.

    Exit code by the worst run: 0 ok or unknown, 1 attention, 2 bad; 3 when nothing could be read; 64 for a wrong
    option.
    """
    from tunewatch.replay import Report, exit_code, json_list, summary, text_lines
    from tunewatch.replay import replay as replay_path

    limits = _limits(parse_thresholds(threshold or []), off or [])
    seen: list[Report] = []

    def reports() -> Iterator[Report]:
        for path in files:
            for report in replay_path(path, limits):
                seen.append(report)
                yield report

    if as_json:
        for line in json_list(reports()):
            print(line)
    else:
        for report in reports():
            for line in text_lines(report):
                print(line)
        print(summary(seen))
    raise typer.Exit(exit_code(seen))


@app.command("import", cls=_Judging)
def import_command(
    files: Annotated[
        list[str], typer.Argument(help="Logs of trainings in any form, folders of them, or ids of runs.")
    ],
    into: Annotated[
        Path | None,
        typer.Option(help="Data folder of a Prometheus (--storage.tsdb.path), which may be running."),
    ] = None,
    openmetrics: Annotated[
        str | None, typer.Option(help="File to write OpenMetrics text to instead, - for standard output.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Id of the run; default: its own, or one made of its logs.")
    ] = None,
    name: Name = None,
    start: Annotated[
        str | None, typer.Option(help="When a run without times of its own began, e.g. 2026-01-31T18:00.")
    ] = None,
    end: Annotated[
        str | None, typer.Option(help="When it ended; default: when its file was written.")
    ] = None,
    seconds_per_log: Annotated[
        float | None, typer.Option(help="How far apart its logs are; default: by its summary, else 10.")
    ] = None,
    interval: Annotated[str, typer.Option(help="How often a value that does not change is written.")] = "1m",
) -> None:
    """Put past runs into Prometheus, so that they stand beside new ones in Grafana.

    Exit code: 0 all were imported, 1 some were not, 3 none was.
    """
    from tunewatch.backfill import ImportRefused, run_import
    from tunewatch.binaries import BinaryMissing

    try:
        code = run_import(
            files,
            into=into,
            openmetrics=openmetrics,
            run_id=run_id,
            name=name,
            start=start,
            end=end,
            seconds_per_log=seconds_per_log,
            interval=interval,
        )
    except (ImportRefused, DurationError, BinaryMissing) as error:
        raise UsageError(str(error)) from error
    raise typer.Exit(code)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: every expected error is one line on stderr and exit code 2 (64 where 2 is a verdict)."""
    try:
        app()
    except (UsageError, RunFolderError, ListenError, AlreadyWatched, ReviewError) as error:
        _fail(error)
    except Exception as error:
        if getattr(error, "tunewatch_reason", None) is None:
            raise
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    say(str(error))
    sys.exit(error.code if isinstance(error, CommandError) else 2)


def _options(
    listen: str | None,
    patience: list[str] | None,
    grace: str,
    no_linger: bool,
    walltime: str | None = None,
    limits: Thresholds | None = None,
    deadline: str | None = None,
) -> Options:
    try:
        options = Options(
            linger=not no_linger,
            grace=parse_duration(grace),
            patience=Patience(**parse_patience(patience or [])),
            thresholds=limits or Thresholds(),
            walltime=parse_duration(walltime) if walltime is not None else None,
            deadline=_deadline(deadline),
            allocation_end=slurm_deadline(os.environ, time.time()),
        )
    except DurationError as error:
        raise UsageError(str(error)) from error
    if listen is not None:
        host, _, port = listen.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"--listen {listen!r}: expected HOST:PORT, e.g. 127.0.0.1:9470")
        options.host, options.port = host.strip("[]") or options.host, int(port)
    return options


def _deadline(text: str | None) -> float | None:
    try:
        return None if text is None else parse_deadline(text, datetime.now(UTC))
    except DurationError as error:
        raise UsageError(f"--deadline: {error}") from error


def parse_patience(items: list[str]) -> dict[str, float]:
    """Read `--patience` items into fields of Patience; UsageError names the phases there are."""
    values: dict[str, float] = {}
    for item in items:
        phase, equals, text = item.partition("=")
        if not equals or phase not in Patience.names():
            raise UsageError(
                f"--patience {item!r}: expected PHASE=DURATION with one of {', '.join(Patience.names())}"
            )
        values[phase] = _factor(text) if phase == "step_factor" else parse_duration(text)
    return values


def parse_thresholds(items: list[str]) -> dict[str, float]:
    """Read `--threshold` items into limits by name; UsageError names the limits there are."""
    values: dict[str, float] = {}
    names = Thresholds.names()
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or name not in names:
            near = nearest(name, names)
            raise UsageError(
                f"--threshold {item!r}: expected NAME=VALUE with one of {', '.join(names)}"
                + (f"; did you mean {near!r}?" if near else "")
            )
        try:
            values[name] = float(text)
        except ValueError:
            raise UsageError(f"--threshold {item!r}: expected a number above 0") from None
    return values


def _limits(thresholds: Mapping[str, float], off: Iterable[str]) -> Thresholds:
    try:
        return Thresholds.chosen(thresholds, off)
    except ThresholdError as error:
        raise UsageError(str(error)) from error


def _kept(known: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Thresholds and switched-off signals that the last supervisor was given, as far as there still are such."""
    limits, off = known.get("thresholds") or {}, known.get("off") or ()
    names = Thresholds.names()
    return {name: limits[name] for name in limits if name in names}, [name for name in off if name in SIGNALS]


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise UsageError(f"--patience step_factor={text}: expected a number above 0")
    return factor


def _script(command: list[str]) -> str:
    """What a command is called: its Python script where it has one."""
    return next((part for part in command if part.endswith(".py")), command[0])


def _run_line(folder: RunFolder) -> str:
    facts: dict[str, Any] = folder.read("run.json") or {}
    verdict = folder.read("verdict.json") or {}
    state = _state(folder, verdict)
    parts = [_step(verdict)]
    if state == states.COMPLETED:
        parts += [_evaluation(folder), _samples(folder)]
    if verdict.get("act") not in (None, "keep"):
        parts.append(str(verdict.get("act_text")))
    shown = ", ".join(filter(None, parts))
    return f"{folder.run_id:24} {facts.get('name', '')!s:20} {state:12} {verdict.get('health', ''):10} {shown}".rstrip()


def _state(folder: RunFolder, verdict: Mapping[str, Any]) -> str:
    state = str(verdict.get("state", "unknown"))
    known = folder.read("supervisor.json") or {}
    alive = known.get("pid") and not Adopted(known["pid"], known.get("process_start")).poll()
    return state if state in states.TERMINAL or alive else f"unwatched, last seen {state}"


def _step(verdict: Mapping[str, Any]) -> str:
    """Where a run is. All of it is done when the run is completed, not when the last step is."""
    step, total = verdict.get("step"), verdict.get("max_steps")
    if step is None:
        return ""
    return (
        f"step {step}/{total} ({shown_percent(step, total, verdict.get('state'))}%)"
        if total
        else f"step {step}/?"
    )


def _evaluation(folder: RunFolder) -> str:
    return "evaluated" if was_evaluated(folder) else "not evaluated"


def _samples(folder: RunFolder) -> str:
    return str(review_state(folder) or "no samples")


_TOLD = (
    "base_model", "base_model_revision", "dataset", "dataset_revision", "dataset_hash", "dataset_rows", "eval_rows",
    "method", "lora_r", "lora_alpha", "batch_size", "learning_rate", "max_length", "precision", "seed",
)  # fmt: skip


def _describe(folder: RunFolder) -> Iterator[str]:
    """What is known of a run, a line each; what is unknown is left out."""
    facts: dict[str, Any] = folder.read("run.json") or {}
    verdict = folder.read("verdict.json") or {}
    ending, info = verdict.get("ending") or {}, facts.get("info", {})
    lines = {
        "run": folder.run_id,
        "name": facts.get("name"),
        "state": _state(folder, verdict),
        "ending": f"{ending.get('message', '')} {ending.get('advice', '')}".strip(),
        "health": verdict.get("health"),
        "reason": verdict.get("reason") if verdict.get("reason") != ending.get("message") else None,
        "act": verdict.get("act_text"),
        "evidence": ", ".join(verdict.get("evidence") or ()),
        "progress": _step(verdict),
        "evaluation": _evaluation(folder),
        "samples": _samples(folder),
        "resumed_from": facts.get("resumed_from"),
        **{key: info.get(key) for key in _TOLD},
    }
    for key, value in lines.items():
        if value not in (None, ""):
            yield f"{key:20} {value}"
    if overlap := info.get("eval_overlap_rows"):
        yield f"{'warning':20} {overlap_warning(overlap, info.get('eval_rows', '?'))}"


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""A model may write anything, also what a terminal would obey."""


def _text(value: Any) -> str:
    """A prompt or an answer as text: messages with their roles."""
    if isinstance(value, list):
        value = "\n".join(f"[{message.get('role')}] {message.get('content')}" for message in value)
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value))


def _short(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _sample_text(row: Mapping[str, Any], total: int) -> str:
    parts = (("prompt", row["prompt"]), ("reference", row["reference"]), ("generated", row["generated"]))
    body = "\n\n".join(f"{name}:\n{_text(value)}" for name, value in parts)
    return f"=== sample {row['index'] + 1} of {total} ===\n\n{body}\n"
