"""The `tunewatch` command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from tunewatch import __version__, states
from tunewatch.durations import DurationError, parse_duration
from tunewatch.health import Patience, Thresholds
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
    str | None, typer.Option(help="When the allocation ends, from now, e.g. 8h; shown as a deadline.")
]
NoLinger = Annotated[bool, typer.Option("--no-linger", help="Leave at once when the run has ended.")]


class UsageError(Exception):
    """The command can not be done as asked; the text is for the user."""


class CommandError(UsageError):
    """The command to be watched can not be run; `code` is what a shell exits with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@app.command("exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def exec_command(
    context: typer.Context,
    name: Name = None,
    run_id: RunId = None,
    listen: Listen = None,
    patience: PatienceOption = None,
    grace: Grace = "60s",
    walltime: Walltime = None,
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
    options = _options(listen, patience, grace, no_linger, walltime)
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
    no_linger: NoLinger = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Fine-tune with TRL's SFTTrainer and PEFT from a YAML file, watched from start to end."""
    from tunewatch.trainjob import prepare, run_job

    options = _options(listen, patience, grace, no_linger, walltime)
    job = prepare(config, name=name, run_id=run_id, options=options, patience=parse_patience(patience or []))
    raise typer.Exit(run_job(job, quiet=quiet))


@app.command()
def adopt(
    run: Annotated[str, typer.Argument(help="Id of the run, or path of its folder.")],
    pid: Annotated[
        int | None, typer.Option(help="The training process; default: the one the last supervisor watched.")
    ] = None,
    listen: Listen = None,
    patience: PatienceOption = None,
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
    options = _options(listen, patience, "60s", no_linger)
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
    grafana_url: Annotated[
        str | None, typer.Option(help="A Grafana of yours, for the links in alerts.")
    ] = None,
    retention: Annotated[str, typer.Option(help="How long Prometheus keeps samples.")] = "30d",
) -> None:
    """Run Prometheus and Alertmanager for the runs of this machine, until Ctrl-C."""
    from rich.console import Console

    from tunewatch.runfolder import tunewatch_home
    from tunewatch.stack import gpu_driver_is_here, run_stack

    raise typer.Exit(
        run_stack(
            tunewatch_home(),
            time_scale=time_scale,
            prometheus_port=prometheus_port,
            alertmanager_port=alertmanager_port,
            receiver_url=receiver_url,
            grafana_url=grafana_url,
            retention=retention,
            sidecar="auto" if gpu_driver_is_here() else None,
            console=Console(),
        )
    )


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


@app.command()
def replay(
    files: Annotated[
        list[str], typer.Argument(help="Logs of trainings in any form, folders of them, or ids of runs.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of text.")] = False,
    off: Annotated[
        list[str] | None, typer.Option("--off", help="A signal that is not to be raised (repeatable).")
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option("--threshold", help="NAME=VALUE, e.g. overfit_ratio=1.15 (repeatable)."),
    ] = None,
) -> None:
    """Judge past runs by their logs, with the detectors that watch live ones.

    Exit code by the worst run: 0 ok or unknown, 1 attention, 2 bad; 3 when nothing could be read.
    """
    from tunewatch.replay import Report, exit_code, json_list, summary, text_lines
    from tunewatch.replay import replay as replay_path

    limits = _thresholds(threshold or [], off or [])
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


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: every expected error is one line on stderr and exit code 2."""
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
) -> Options:
    try:
        options = Options(
            linger=not no_linger,
            grace=parse_duration(grace),
            patience=Patience(**parse_patience(patience or [])),
            walltime=parse_duration(walltime) if walltime is not None else None,
        )
    except DurationError as error:
        raise UsageError(str(error)) from error
    if listen is not None:
        host, _, port = listen.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"--listen {listen!r}: expected HOST:PORT, e.g. 127.0.0.1:9470")
        options.host, options.port = host.strip("[]") or options.host, int(port)
    return options


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


def _thresholds(items: list[str], off: list[str]) -> Thresholds:
    values: dict[str, Any] = {}
    defaults = Thresholds()
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or name not in Thresholds.names():
            raise UsageError(
                f"--threshold {item!r}: expected NAME=VALUE with one of {', '.join(Thresholds.names())}"
            )
        kind = type(getattr(defaults, name))
        try:
            values[name] = kind(text)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise UsageError(f"--threshold {item!r}: expected {wanted} above 0") from error
    try:
        return Thresholds(**values, off=frozenset(off))
    except ValueError as error:
        raise UsageError(f"replay: {error}") from error


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
