"""How a run ended, judged on what is known: a table of endings, and what must hold for every one."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tunewatch.supervisor.ending import ADVICE, Evidence, judge

TRAINED = Evidence(
    returncode=0,
    way="exec",
    attached=True,
    trained=True,
    finished=True,
    exited=True,
    step=30,
    max_steps=30,
    session_steps=30,
    phase="package",
)
"""A script that trained 30 of 30 steps and left in order."""

DIED = dataclasses.replace(
    TRAINED, returncode=-9, finished=False, exited=False, step=20, session_steps=20, phase="compute"
)
"""The same, killed with signal 9 at step 20."""

BUILT_IN = dataclasses.replace(TRAINED, way="train", package={"ok": True})


def of(base, **changes):
    return dataclasses.replace(base, **changes)


def error(reason, name="RuntimeError", **more):
    return {"event": "exception", "reason": reason, "type": name, **more}


PACKAGING_FAILED = {"ok": False, "reason": "packaging"}
NAN_WEIGHTS = {"ok": False, "reason": "nan", "weights_finite": False}
SIGTERM_CHECKPOINT = {"requested_stop": True, "step": 7, "session_steps": 7}
"""transformers' own: train() returns normally, far from done."""

CASES = {
    # -- completed
    "all done": (TRAINED, ""),
    "built-in job": (BUILT_IN, ""),
    "early stopping": (of(TRAINED, requested_stop=True, step=12), ""),
    "a resume of a finished run": (of(TRAINED, session_steps=0), ""),
    "a resume of a finished built-in job": (of(BUILT_IN, session_steps=0), ""),
    "steps unknown": (of(TRAINED, step=None, max_steps=None), ""),
    "no training at all": (Evidence(0, "exec"), ""),
    "only an evaluation": (of(TRAINED, trained=False, finished=False, step=None, phase="evaluate"), ""),
    "adopted": (of(TRAINED, returncode=None, way="callback"), ""),
    "adopted, early stopping": (of(TRAINED, returncode=None, requested_stop=True, step=12), ""),
    "an exception that the script survived": (of(TRAINED, exceptions=[error("oom_gpu")]), ""),
    "a rank died but the command says all is well": (of(TRAINED, dead_ranks=[1]), ""),
    "cancelled too late": (of(TRAINED, cancel_requested=True), ""),
    "terminated too late": (of(TRAINED, terminate_requested=True), ""),
    "stalled, then it went on": (of(TRAINED, stalled=True), ""),
    "another process of the group was killed": (of(TRAINED, oom_kills=1), ""),
    # -- exit code 0 proves nothing
    "os._exit(0) in the middle": (of(DIED, returncode=0), "exited_early"),
    "os._exit(0) while preparing": (
        of(DIED, returncode=0, trained=False, step=None, session_steps=0, phase="prepare"), "exited_early",
    ),
    "a swallowed exception": (
        of(TRAINED, finished=False, step=3, exceptions=[error("unknown")]), "exited_early",
    ),
    "the data ran out": (of(TRAINED, step=20), "exited_early"),
    "the built-in job without a package": (of(BUILT_IN, package=None), "exited_early"),
    "NaN to the end": (of(TRAINED, nonfinite_since=17), "nan"),
    "NaN to the end, built-in": (of(BUILT_IN, nonfinite_since=17), "nan"),
    "NaN to the end, adopted": (of(TRAINED, returncode=None, nonfinite_since=17), "nan"),
    "packaging failed": (of(BUILT_IN, package=PACKAGING_FAILED), "packaging"),
    "packaging found NaN": (of(BUILT_IN, package=NAN_WEIGHTS), "nan"),
    "packaging failed without a reason": (of(BUILT_IN, package={"ok": False}), "unknown"),
    # -- preempted
    "SIGTERM": (of(DIED, returncode=-15), "preempted"),
    "SIGTERM through a shell": (of(DIED, returncode=143), "preempted"),
    "SIGTERM through us": (of(DIED, returncode=-15, terminate_requested=True), "preempted"),
    "SIGTERM through us, torchrun": (
        of(DIED, returncode=1, terminate_requested=True, exceptions=[error("unknown", "SignalException")]),
        "preempted",
    ),
    "SIGTERM to torchrun itself": (
        of(DIED, returncode=1, exceptions=[error("unknown", "SignalException")], dead_ranks=[0, 1]),
        "preempted",
    ),
    "SIGTERM that the script turns into an interrupt": (
        of(DIED, returncode=130, terminate_requested=True, exceptions=[error("cancelled", "KeyboardInterrupt")]),
        "preempted",
    ),
    "SIGKILL after the grace": (of(DIED, terminate_requested=True), "preempted"),
    "a SIGTERM checkpoint": (of(TRAINED, terminate_requested=True, **SIGTERM_CHECKPOINT), "preempted"),
    "a SIGTERM checkpoint, built-in": (
        of(BUILT_IN, package=None, terminate_requested=True, **SIGTERM_CHECKPOINT), "preempted",
    ),
    # The built-in job leaves without a package, in order and asked to stop, only after a SIGTERM checkpoint: early
    # stopping is packaged. In a script the two look alike, and early stopping is the more frequent.
    "a SIGTERM checkpoint that we did not see, built-in": (
        of(BUILT_IN, package=None, **SIGTERM_CHECKPOINT), "preempted",
    ),
    "a SIGTERM checkpoint, adopted": (
        of(TRAINED, returncode=None, terminate_requested=True, **SIGTERM_CHECKPOINT), "preempted",
    ),
    # -- cancelled
    "Ctrl-C": (of(DIED, returncode=1, cancel_requested=True), "cancelled"),
    "Ctrl-C, then SIGKILL": (of(DIED, cancel_requested=True), "cancelled"),
    "Ctrl-C of a stalled run": (of(DIED, cancel_requested=True, stalled=True), "cancelled"),
    "Ctrl-C and SIGTERM": (of(DIED, cancel_requested=True, terminate_requested=True), "cancelled"),
    "Ctrl-C, the script stops in order": (
        of(TRAINED, cancel_requested=True, requested_stop=True, step=12), "cancelled",
    ),
    "Ctrl-C while preparing, the script exits with 0": (
        of(TRAINED, cancel_requested=True, trained=False, finished=False, step=None, phase="prepare"),
        "cancelled",
    ),
    "Ctrl-C of a command that is no training": (Evidence(0, "exec", cancel_requested=True), "cancelled"),
    "SIGINT": (of(DIED, returncode=-2), "cancelled"),
    "SIGINT through a shell": (of(DIED, returncode=130), "cancelled"),
    "SIGINT of a stalled run": (of(DIED, returncode=-2, stalled=True), "cancelled"),
    "an interrupted notebook": (
        of(DIED, returncode=None, way="callback", exceptions=[error("cancelled", "KeyboardInterrupt")]),
        "cancelled",
    ),
    # -- signals
    "SIGKILL": (DIED, "killed_signal_9"),
    "SIGKILL through a shell": (of(DIED, returncode=137), "killed_signal_9"),
    "SIGSEGV": (of(DIED, returncode=-11), "killed_signal_11"),
    "SIGKILL after the training, built-in": (of(BUILT_IN, returncode=-9, package=None), "killed_signal_9"),
    "SIGBUS in a step": (of(DIED, returncode=-7), "shm"),
    "SIGBUS waiting for data": (of(DIED, returncode=-7, phase="data"), "shm"),
    "SIGBUS in an evaluation": (of(DIED, returncode=135, phase="evaluate"), "shm"),
    "SIGBUS while preparing": (of(DIED, returncode=-7, phase="prepare"), "killed_signal_7"),
    "SIGKILL of a NaN run": (of(DIED, nonfinite_since=5), "killed_signal_9"),
    # -- memory
    "the kernel's killer": (of(DIED, oom_kills=1), "oom_host"),
    "the kernel's killer, through a shell": (of(DIED, returncode=137, oom_kills=1), "oom_host"),
    "the kernel's killer, adopted": (of(DIED, returncode=None, oom_kills=1), "oom_host"),
    "the kernel's killer, stalled before": (of(DIED, oom_kills=1, stalled=True), "oom_host"),
    "the kernel's killer took a rank": (
        of(DIED, returncode=1, oom_kills=1, exceptions=[error("unknown"), error("rank_killed")]), "oom_host",
    ),
    "the kernel's killer took a rank, nobody spoke": (
        of(DIED, returncode=1, oom_kills=1, exited=True, dead_ranks=[1]), "oom_host",
    ),
    "a kill elsewhere, and a segmentation fault here": (
        of(DIED, returncode=-11, oom_kills=1), "killed_signal_11",
    ),
    "a kill elsewhere, and an exception here": (
        of(DIED, returncode=1, exited=True, oom_kills=1, exceptions=[error("data")]), "data",
    ),
    "a kill elsewhere, and a plain command's exit code": (Evidence(7, "exec", oom_kills=1), "unknown"),
    "a kill elsewhere, and the exit code of a script": (
        of(DIED, returncode=3, exited=True, oom_kills=1), "unknown",
    ),
    # -- stalled
    "stalled, then killed": (of(DIED, stalled=True), "stalled"),
    "stalled, then SIGTERM": (of(DIED, returncode=-15, stalled=True), "stalled"),
    "stalled, then SIGTERM through us": (
        of(DIED, returncode=-15, stalled=True, terminate_requested=True), "stalled",
    ),
    "stalled, then gone, adopted": (of(DIED, returncode=None, stalled=True), "stalled"),
    "stalled until the collectives timed out": (
        of(DIED, returncode=1, stalled=True, exceptions=[error("nccl_timeout")]), "nccl_timeout",
    ),
    # -- exceptions
    **{
        f"an exception: {reason}": (of(DIED, returncode=1, exited=True, exceptions=[error(reason)]), reason)
        for reason in ADVICE if reason not in ("cancelled", "exited_early", "preempted", "stalled")
    },
    "an exception with a reason of its own making": (
        of(DIED, returncode=1, exceptions=[error("my reason")]), "unknown",
    ),
    "an exception without a reason": (of(DIED, returncode=1, exceptions=[{"type": "X"}]), "unknown"),
    "an exception, adopted": (of(DIED, returncode=None, exited=True, exceptions=[error("data")]), "data"),
    "an exception after the training": (
        of(TRAINED, returncode=1, exceptions=[error("hub")]), "hub",
    ),
    "an exception while saving on a full disk": (
        of(DIED, returncode=1, phase="save", disk_full=True, exceptions=[error("unknown")]), "disk_full",
    ),
    "an exception of a NaN run": (
        of(DIED, returncode=1, nonfinite_since=5, exceptions=[error("unknown")]), "nan",
    ),
    "a known exception of a NaN run": (
        of(DIED, returncode=1, nonfinite_since=5, exceptions=[error("oom_gpu")]), "oom_gpu",
    ),
    # -- torchrun exits with 1 for everything
    "a rank raised": (
        of(DIED, returncode=1, exceptions=[error("oom_gpu"), error("unknown", "ChildFailedError")]), "oom_gpu",
    ),
    "a rank raised something unknown, its peer timed out": (
        of(DIED, returncode=1, exceptions=[
            error("unknown", "KeyError"), error("nccl_timeout"), error("unknown", "ChildFailedError"),
        ]), "unknown",
    ),
    "the innocent rank spoke first": (
        of(DIED, returncode=1, exceptions=[error("unknown"), error("rank_killed", "ChildFailedError")]),
        "rank_killed",
    ),
    "a rank was killed and nobody spoke": (of(DIED, returncode=1, dead_ranks=[1]), "rank_killed"),
    "a rank was killed, adopted": (of(DIED, returncode=None, dead_ranks=[1]), "rank_killed"),
    "torchrun itself was killed": (of(DIED, returncode=137), "killed_signal_9"),
    "torchrun was killed with its ranks": (of(DIED, returncode=137, dead_ranks=[0, 1]), "killed_signal_9"),
    # -- before the training
    "no such command": (Evidence(127, "exec"), "missing_file"),
    "a script that exits with 127": (of(DIED, returncode=127, exited=True), "unknown"),
    "arguments refused": (Evidence(2, "exec"), "config"),
    "a plain failure": (Evidence(7, "exec"), "unknown"),
    "gone without a word, adopted": (of(DIED, returncode=None), "unknown"),
    "left in order before the end, adopted": (
        of(TRAINED, returncode=None, finished=False, step=3), "exited_early",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("evidence", "reason"), CASES.values(), ids=CASES)
def test_table(evidence, reason):
    ending = judge(evidence)
    state = {"": "completed", "cancelled": "cancelled"}.get(reason, "failed")
    assert (ending.state, ending.reason) == (state, reason)
    assert ending.exit_code == evidence.returncode
    assert ending.message.endswith(".")


def test_every_reason_of_the_list_is_reached():
    assert set(ADVICE) == {reason for _, reason in CASES.values()} - {""} - {
        reason for _, reason in CASES.values() if reason.startswith("killed_signal_")
    }


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        (TRAINED, "Completed at step 30 of 30."),
        (of(TRAINED, requested_stop=True, step=12), "Completed at step 12 of 30 (stopped on request)."),
        (of(TRAINED, session_steps=0), "Nothing to do: it was done already at step 30 of 30."),
        (Evidence(0, "exec"), "The command ended with exit code 0."),
        (
            of(DIED, phase="save", oom_kills=1),
            "The kernel killed it: its memory cgroup was full while saving at step 20 of 30.",
        ),
        (
            of(DIED, phase="prepare", phase_detail="tokenizing", trained=False, step=None, returncode=-11),
            "Killed by signal 11 (SIGSEGV) while preparing (tokenizing) before the first step.",
        ),
        (
            of(DIED, returncode=1, exceptions=[error("oom_gpu", "OutOfMemoryError", detail="tried to allocate 2 GiB")]),
            "OutOfMemoryError (tried to allocate 2 GiB) at step 20 of 30.",
        ),
        (
            of(DIED, returncode=-15, nonfinite_since=5),
            "Terminated from outside at step 20 of 30. Loss or gradients were NaN or infinite since step 5.",
        ),
    ],
)  # fmt: skip
def test_the_message_says_what_and_where(evidence, message):
    assert judge(evidence).message == message


@pytest.mark.parametrize(
    ("evidence", "when"),
    [
        (of(DIED, session_steps=9), "early"),
        (of(DIED, session_steps=10), "late"),
        (of(DIED, step=5003, max_steps=9000, session_steps=3), "early"),  # three steps after a resume
        (Evidence(1, "exec", session_seconds=59.0), "early"),
        (Evidence(1, "exec", session_seconds=3600.0), "late"),  # its steps are not seen, its time is
    ],
)
def test_early_and_late(evidence, when):
    assert judge(evidence).when == when


@pytest.mark.parametrize(
    ("evidence", "in_advice", "not_in_advice"),
    [
        (of(DIED, last_resumable="checkpoint-20"), "Resume from checkpoint-20.", None),
        (of(DIED, returncode=-15, last_resumable="checkpoint-20"), "Resume from checkpoint-20.", None),
        (of(TRAINED, nonfinite_since=25, last_resumable="checkpoint-20"), "Resume from checkpoint-20.", None),
        (
            of(DIED, returncode=1, exceptions=[error("oom_gpu")], last_resumable="checkpoint-20"),
            "one long sample: cap max_length or sort by length. Resume from checkpoint-20.",
            "batch size",
        ),
        (
            of(DIED, returncode=1, session_steps=2, exceptions=[error("oom_gpu")], last_resumable="checkpoint-20"),
            "Lower the batch size",
            "Resume",
        ),
        (
            of(DIED, returncode=1, session_steps=2, exceptions=[error("unknown")], last_resumable="checkpoint-20"),
            "change the settings rather than try again",
            "Resume",
        ),
        (of(DIED, returncode=-15, session_steps=2, last_resumable="checkpoint-20"), "Resume from checkpoint-20", None),
        (of(DIED, returncode=-2, last_resumable="checkpoint-20"), "", "Resume"),
        (of(TRAINED, last_resumable="checkpoint-30"), "", "Resume"),
        (DIED, "dmesg", "checkpoint"),
    ],
)  # fmt: skip
def test_advice_names_the_checkpoint_where_a_resume_helps(evidence, in_advice, not_in_advice):
    advice = judge(evidence).advice
    assert in_advice in advice
    assert not_in_advice is None or not_in_advice not in advice


REASONS = st.one_of(st.sampled_from(sorted(ADVICE)), st.none(), st.text(max_size=5), st.integers())
EXCEPTIONS = st.lists(
    st.fixed_dictionaries({}, optional={"reason": REASONS, "type": st.text(max_size=5), "detail": st.text(max_size=5)}),
    max_size=3,
)  # fmt: skip
STEPS = st.one_of(st.none(), st.integers(0, 40))
EVIDENCE = st.builds(
    Evidence,
    returncode=st.one_of(st.none(), st.integers(-64, 255)),
    way=st.sampled_from(["train", "exec", "callback"]),
    attached=st.booleans(), trained=st.booleans(), finished=st.booleans(), exited=st.booleans(),
    requested_stop=st.booleans(), step=STEPS, max_steps=STEPS, session_steps=st.integers(0, 40),
    phase=st.sampled_from(["prepare", "data", "compute", "evaluate", "save", "package"]),
    phase_detail=st.text(max_size=5), exceptions=EXCEPTIONS,
    package=st.one_of(st.none(), st.fixed_dictionaries({"ok": st.booleans()}, optional={"reason": REASONS})),
    nonfinite_since=st.one_of(st.none(), st.integers(1, 40)), oom_kills=st.integers(0, 2),
    cancel_requested=st.booleans(), terminate_requested=st.booleans(), stalled=st.booleans(),
    dead_ranks=st.lists(st.integers(0, 3), max_size=2), disk_full=st.booleans(),
    last_resumable=st.one_of(st.none(), st.just("checkpoint-4")), session_seconds=st.floats(0, 1e6),
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(EVIDENCE)
@example(of(DIED, returncode=1, exceptions=[{}]))
@example(of(BUILT_IN, package={"ok": False, "reason": 7}))
def test_what_holds_for_every_ending(evidence):
    ending = judge(evidence)
    assert (
        ending.reason == ""
        or ending.reason in ADVICE
        or re.fullmatch(r"killed_signal_\d{1,2}", ending.reason)
    )
    assert (ending.state == "completed") == (ending.reason == "")
    assert (ending.state == "cancelled") == (ending.reason == "cancelled")
    assert ending.state in ("completed", "cancelled", "failed")
    assert ending.when in ("early", "late")
    assert ending.message
    assert bool(ending.advice) == (ending.state == "failed")
    if ending.state == "completed":
        assert evidence.returncode in (0, None)
        assert evidence.nonfinite_since is None
        assert evidence.way != "train" or evidence.package["ok"]
    if evidence.cancel_requested:
        assert ending.state != "failed"
