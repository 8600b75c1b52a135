"""How a run ended, why, and what to do about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunewatch.health.glance import worth_resuming
from tunewatch.states import CANCELLED, COMPLETED, FAILED

EARLY_STEPS = 10
"""A run that fails before this many steps of its session fails "early": the settings are the suspect."""

EARLY_SECONDS = 60.0
"""The same for a command whose steps are not seen: it fails early within its first minute."""

ADVICE: dict[str, str] = {
    "nan": "Use a lower learning rate or bf16; checkpoints from the first bad step on are damaged.",
    "oom_gpu": "Lower the batch size or max_length, or turn on gradient checkpointing.",
    "oom_host": "Give the job more memory, or load less of the data set and fewer workers at once.",
    "shm": "Give the container more shared memory (docker --shm-size, a /dev/shm volume).",
    "missing_file": "Check the paths in the configuration.",
    "disk_full": "Free space where output_dir lies, or keep fewer checkpoints (save_total_limit).",
    "config": "Change the settings; the same ones will fail again.",
    "data": "Check the data set: fields, format and lengths.",
    "auth": "Log in to the hub (hf auth login) or ask for access to the model.",
    "hub": "Check the network and the hub, then start it again.",
    "nccl_timeout": "Find the rank that hung: its log and GPU say more than the others'.",
    "gpu_lost": "Do not use this GPU again before it was reset and checked (dmesg, XID).",
    "checkpoint_corrupt": "Do not use this checkpoint; an older, complete one will do.",
    "nothing_trainable": "Check lora.target_modules and frozen parameters: nothing would have been trained.",
    "packaging": "Look at the end of the log, free space where output_dir lies, and resume to package again.",
    "exited_early": "Look at the end of the log: the program left without finishing its training.",
    "preempted": "Start it again; it can go on from its last complete checkpoint.",
    "hangup": "Start it under nohup or in tmux, and it outlives its terminal.",
    "stalled": "Find out what it waited for (py-spy dump of the process) before you resume it.",
    "rank_killed": "Look at the kernel log of that rank's host (out of memory?) and its GPU.",
    "cancelled": "",
    "unknown": "Look at the end of the log.",
}
"""The closed list of reasons (and killed_signal_N), each with what to do."""


@dataclass(frozen=True)
class Ending:
    """The supervisor's word about the end of a run.

    `state` is completed, failed or cancelled; `reason` a key of ADVICE, `killed_signal_N`, or "" for a completed run;
    `when` is early or late; `message` one sentence.
    """

    state: str
    reason: str
    when: str
    message: str
    advice: str
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("state", "reason", "when", "message", "advice", "exit_code")
        }


@dataclass(frozen=True)
class Evidence:
    """What is known when the process is gone. `returncode` is Popen's (-N for signal N), None if nobody knows it."""

    returncode: int | None
    way: str
    attached: bool = False
    trained: bool = False
    """train() was entered."""
    finished: bool = False
    """on_train_end was seen, train() returned, or both."""
    exited: bool = False
    """The interpreter ended in an orderly way."""
    requested_stop: bool = False
    step: int | None = None
    max_steps: int | None = None
    session_steps: int = 0
    phase: str = "prepare"
    phase_detail: str = ""
    exceptions: Sequence[Mapping[str, Any]] = ()
    """Exception events, in order of time."""
    package: Mapping[str, Any] | None = None
    nonfinite_since: int | None = None
    """First bad step of a streak that lasted to the end; the weights are damaged from it on."""
    oom_kills: int = 0
    """Processes that the kernel killed in our memory cgroup during the run."""
    cancel_requested: bool = False
    terminate_requested: bool = False
    hung_up: bool = False
    """The terminal was closed, and the training was told."""
    stalled: bool = False
    dead_ranks: Sequence[int] = ()
    disk_full: bool = False
    """No room is left where output_dir lies."""
    last_resumable: str | None = None
    """The newest checkpoint that a resume can trust: of this run, whole, and from before `nonfinite_since`."""
    resume_pick: str | None = None
    """The newest checkpoint folder where it is not complete: a resume without a name would take it."""
    newest_complete: str | None = None
    """The newest complete checkpoint in the output folder, whichever run left it."""
    session_seconds: float = 0.0


def judge(evidence: Evidence) -> Ending:
    """Decide how a run ended. The first rule that fits decides; see the order in `_reason`."""
    reason, message = _reason(evidence)
    state = COMPLETED if reason == "" else CANCELLED if reason == "cancelled" else FAILED
    when = "early" if _is_early(evidence) else "late"
    if state == FAILED and reason != "nan" and evidence.nonfinite_since is not None:
        message += f" Loss or gradients were NaN or infinite since step {evidence.nonfinite_since}."
    if state == FAILED:
        message += _lost(evidence)
    return Ending(state, reason, when, message, _advice(evidence, reason, when), evidence.returncode)


def _lost(e: Evidence) -> str:
    """How much is done again after a resume."""
    saved = re.search(r"-(\d+)$", e.last_resumable or "")
    if saved is None or e.step is None or e.step <= int(saved.group(1)):
        return ""
    lost = e.step - int(saved.group(1))
    return (
        f" {lost} step{'s' if lost > 1 else ''} after {e.last_resumable} {'are' if lost > 1 else 'is'} lost."
    )


def _is_early(e: Evidence) -> bool:
    return e.session_steps < EARLY_STEPS if e.attached else e.session_seconds < EARLY_SECONDS


def _reason(e: Evidence) -> tuple[str, str]:
    if _succeeded(e):
        return "", _success(e)
    died_of = _signal_of(e.returncode)
    error = _first_cause(e)
    gone = died_of is not None or (e.returncode is None and not e.exited)
    if e.cancel_requested:
        return "cancelled", f"Cancelled{_at(e)}."
    if e.terminate_requested:
        if e.stalled:
            return "stalled", f"Terminated from outside after it had stalled{_while(e)}{_at(e)}."
        # Also when train() returned normally: a SIGTERM checkpoint makes it stop in good order, far from done.
        return "preempted", f"Terminated from outside{_at(e)}."
    if died_of == signal.SIGINT or (_is(error, "cancelled") and e.returncode != 0):
        return "cancelled", f"Interrupted{_at(e)}."
    if died_of == signal.SIGHUP or (e.hung_up and error is not None and error.get("type") in _HUNG_UP):
        return "hangup", f"Its terminal was closed{_at(e)}."
    if e.oom_kills and _looks_oom_killed(e, died_of, error):
        return "oom_host", f"The kernel killed it: its memory cgroup was full{_while(e)}{_at(e)}."
    if error is not None and e.returncode != 0:
        if error.get("type") == "SignalException":  # torchrun's: it was sent a signal, and exits with 1
            return "preempted", f"Terminated from outside{_at(e)}."
        return _of_exception(e, error)
    if e.dead_ranks and e.returncode != 0 and died_of is None:
        rank = e.dead_ranks[0]
        return "rank_killed", f"Rank {rank} died without an exception{_at(e)}; the others followed."
    if e.stalled and gone:
        how = f"Killed by signal {died_of}" if died_of is not None else "It died"
        return "stalled", f"{how} after it had stalled{_while(e)}{_at(e)}."
    if died_of == signal.SIGTERM:
        return "preempted", f"Terminated from outside{_at(e)}."
    if died_of == signal.SIGBUS and e.phase in ("data", "compute", "evaluate"):
        return "shm", f"Killed by signal 7 (bus error){_at(e)}: most often /dev/shm is full."
    if died_of is not None:
        hint = "; most often the machine ran out of memory" if died_of == signal.SIGKILL else ""
        return (
            f"killed_signal_{died_of}",
            f"Killed by signal {died_of} ({_signal_name(died_of)}){_while(e)}{_at(e)}{hint}.",
        )
    if e.nonfinite_since is not None:
        return "nan", f"It ended, but loss or gradients were NaN or infinite since step {e.nonfinite_since}."
    if e.package is not None and not e.package.get("ok"):
        return _listed(e.package.get("reason")), f"The training was done, but packaging failed{_at(e)}."
    if e.returncode == 127 and not e.attached:
        return "missing_file", "The command was not found."
    if e.returncode == 126 and not e.attached:
        return "config", "The command can not be executed."
    if e.returncode == 2 and not e.trained:
        return "config", "The command refused its arguments (exit code 2)."
    if e.returncode not in (0, None):
        return "unknown", f"It ended with exit code {e.returncode}{_while(e)}{_at(e)}."
    if gone:
        return "unknown", f"The process died without a word{_while(e)}{_at(e)}."
    if e.way == "train" and e.finished and e.requested_stop and not _reached(e):
        # The built-in job packages what early stopping leaves; it leaves without only after a SIGTERM checkpoint,
        # here of a SIGTERM that went past us.
        return "preempted", f"It saved a checkpoint on SIGTERM and stopped{_at(e)}."
    return "exited_early", f"The program ended{_while(e)}{_at(e)} without finishing its training."


def _listed(reason: object) -> str:
    """A reason of the closed list: what others report (a user's exception class may say anything) is no label."""
    known = isinstance(reason, str) and (reason in ADVICE or _KILLED.fullmatch(reason))
    return str(reason) if known else "unknown"


_KILLED = re.compile(r"killed_signal_\d{1,2}")


def _succeeded(e: Evidence) -> bool:
    """Whether everything that had to happen did: neither exit code 0 nor on_train_end alone proves it."""
    if e.returncode is None:
        if not e.exited or e.exceptions:
            return False
    elif e.returncode != 0:
        return False
    if e.nonfinite_since is not None or (e.package is not None and not e.package.get("ok")):
        return False
    if e.way == "train":
        return e.package is not None
    asked_to_end = e.terminate_requested or e.cancel_requested
    if not e.trained:
        left = e.attached and not e.exited  # os._exit of a program that had loaded a trainer
        return not asked_to_end and not left
    return e.finished and (_reached(e) or (e.requested_stop and not asked_to_end))


def _reached(e: Evidence) -> bool:
    return e.step is None or e.max_steps is None or e.step >= e.max_steps


def _looks_oom_killed(e: Evidence, died_of: int | None, error: Mapping[str, Any] | None) -> bool:
    """Whether ours was the victim: another process of the same cgroup may have been killed instead."""
    if e.returncode == 0:
        return False
    if died_of is not None:
        return died_of == signal.SIGKILL
    if error is not None:  # torchrun exits with 1 whatever its ranks died of
        return error.get("reason") in ("rank_killed", "killed_signal_9")
    return bool(e.dead_ranks) or (e.attached and not e.exited)


_HUNG_UP = ("SignalException", "OSError")
"""How a hangup ends what does not die of it: torchrun's word for any signal, and a write to a terminal that is gone."""


def _is(error: Mapping[str, Any] | None, reason: str) -> bool:
    return error is not None and error.get("reason") == reason


_FOLLOWS = ("nccl_timeout",)
"""What the innocent ranks report when another one is gone."""


def _first_cause(e: Evidence) -> Mapping[str, Any] | None:
    """The exception that the others followed: the first that was reported.

    One with a known reason is taken before an unknown one (a broken pipe of an innocent rank may be reported before
    torchrun tells which rank was killed); a timeout of the collectives only when nothing came before it.
    """
    known = [error for error in e.exceptions if _listed(error.get("reason")) not in ("unknown", *_FOLLOWS)]
    return known[0] if known else e.exceptions[0] if e.exceptions else None


def _of_exception(e: Evidence, error: Mapping[str, Any]) -> tuple[str, str]:
    reason = _listed(error.get("reason"))
    if reason in ("unknown", "config") and e.disk_full and e.phase in ("save", "package"):
        reason = "disk_full"
    if reason == "unknown" and e.nonfinite_since is not None:
        reason = "nan"
    if _KILLED.fullmatch(reason):
        hint = "; most often the machine ran out of memory" if reason == "killed_signal_9" else ""
        return reason, f"The training was killed by signal {reason[14:]}{_while(e)}{_at(e)}{hint}."
    detail = f" ({error['detail']})" if error.get("detail") else ""
    return reason, f"{error.get('type', 'An exception')}{detail}{_while(e)}{_at(e)}."


_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_CRASHED = (
    "Native code crashed: look at the end of the log, and at the versions of torch and of its extensions "
    "(PYTHONFAULTHANDLER=1 shows where)."
)
_KILLED_BY_SOMEBODY = (
    "Look at the kernel log (dmesg) for the out-of-memory killer, and ask who sent the signal."
)


def _advice(e: Evidence, reason: str, when: str) -> str:
    if reason in ("", "cancelled"):
        return ""
    if reason.startswith("killed_signal_"):
        text = _CRASHED if int(reason[14:]) in _CRASHES else _KILLED_BY_SOMEBODY
    elif reason == "oom_gpu" and when == "late":
        text = "Most likely one long sample: cap max_length or sort by length."
    else:
        text = ADVICE[reason]
    if reason == "checkpoint_corrupt" and e.resume_pick:
        newest = e.newest_complete
        what = (
            f"newest complete is {newest}: resume from {newest} by name." if newest else "none is complete."
        )
        return f"A resume would pick {e.resume_pick} (incomplete); {what}"
    if reason == "gpu_lost":
        where = f", from {e.last_resumable}" if e.last_resumable else ""
        return f"{text} Do not retry on this GPU: go on elsewhere{where}."
    if when == "early" and reason in ("unknown", "exited_early"):
        return f"{text} It failed early: change the settings rather than try again."
    if e.last_resumable and worth_resuming(reason, when):
        return f"{text} Resume from {e.last_resumable}."
    return text


def _success(e: Evidence) -> str:
    if not e.attached:
        return "The command ended with exit code 0."
    if not e.trained:
        return "It ended in good order; nothing was trained."
    if e.session_steps == 0:
        return f"Nothing to do: it was done already{_at(e)}."
    return f"Completed{_at(e)}{'' if _reached(e) else ' (stopped on request)'}."


def _at(e: Evidence) -> str:
    if e.step is None:
        return " before the first step" if e.attached else ""
    return f" at step {e.step}" + (f" of {e.max_steps}" if e.max_steps else "")


def _while(e: Evidence) -> str:
    if not e.attached:
        return ""
    words = {
        "prepare": f"while preparing ({e.phase_detail})" if e.phase_detail else "while preparing",
        "evaluate": "in an evaluation",
        "save": "while saving",
        "package": "after the training",
    }
    text = words.get(e.phase)
    return f" {text}" if text else ""


def _signal_of(returncode: int | None) -> int | None:
    """The signal a process died of: Popen's -N, or a shell's and torchrun's 128 + N."""
    if returncode is None:
        return None
    if returncode < 0:
        return -returncode
    return returncode - 128 if 128 < returncode < 128 + 65 else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
