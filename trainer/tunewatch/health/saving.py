"""What is saved, what would be lost, and whether there is room and time for the rest."""

from __future__ import annotations

from typing import NamedTuple

from tunewatch.health.duration import human_duration
from tunewatch.health.moment import Moment
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings


class Saving:
    """The verdicts about checkpoints, disk and time, of a training that goes on."""

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings = findings
        self._at_risk, self._broken = AtRisk(findings, limits), Broken(findings)
        self._overdue, self._room = Overdue(findings, limits), Room(findings, limits)

    def begin(self, training: Training) -> None:
        self._overdue.begin(training)

    def tick(self, moment: Moment) -> None:
        self._at_risk.tick(moment)
        self._broken.tick(moment)
        if moment.phase == "package":  # no step is to come, even if it was stopped early
            self._findings.drop("checkpoint_overdue", "will_not_fit")
            return
        self._overdue.tick(moment)
        self._room.tick(moment)


class AtRisk:
    """`work_at_risk`: what would be lost if the run died now has become too much.

    u is the time of the steps since the last complete checkpoint. Where checkpoints are made, u > max(`risk_seconds`
    (30 min), `risk_factor` (2.5) times the usual time between two): two were due and did not come. Where none is made
    before the last step (or how often is not known), u > `risk_seconds` while u and the rest of the run together are
    above `risk_without` (4 h; where the rest is not known, once u itself is above it): said early, because a restart
    with checkpoints then costs half an hour, and not of a short run, which one simply does again. Source: with a save
    of 30 s and a machine that lives for days, the best interval (the root of 2 x cost of a save x time between two
    failures) is near an hour; several times that is more than people mean to lose.
    Can not see: checkpoints that a script writes elsewhere or in another form.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits

    def tick(self, moment: Moment) -> None:
        unsaved, usual, saves = moment.unsaved_seconds, moment.save_seconds_apart, moment.saves
        if unsaved is None:
            self._findings.drop("work_at_risk")
        elif saves.only_at_the_end or (usual is None and saves.strategy is not None):
            self._without(moment, unsaved)
        elif usual is not None and unsaved > max(self._limits.risk_seconds, self._limits.risk_factor * usual):
            self._findings.hold(
                "work_at_risk", moment.step,
                f"The last complete checkpoint is {human_duration(unsaved)} of work old; usual is "
                f"{human_duration(usual)}.",
                "Look why no checkpoint is written; do not stop the run before there is one.",
            )  # fmt: skip
        else:
            self._findings.drop("work_at_risk")

    def _without(self, moment: Moment, unsaved: float) -> None:
        rest = moment.left_seconds if moment.saves.only_at_the_end else None
        if unsaved <= self._limits.risk_seconds or unsaved + (rest or 0.0) <= self._limits.risk_without:
            self._findings.drop("work_at_risk")
            return
        why = "No checkpoint has been made for a long time"
        if moment.saves.strategy == "no":
            why = "This training makes no checkpoints (save_strategy no)"
        elif moment.saves.only_at_the_end:
            why = f"The first checkpoint comes at the end, at step {moment.saves.last}"
        end = f", and {human_duration(unsaved + rest)} at its end" if rest else ""
        self._findings.hold(
            "work_at_risk", moment.step,
            f"{why}: {human_duration(unsaved)} of work would be lost now{end}.",
            "Restart it with save_steps while that is cheap, or know that a crash loses all of it.",
        )  # fmt: skip


class Overdue:
    """`checkpoint_overdue`: a step at which the trainer should have saved (save_strategy steps) is long past, and since
    then neither did a save end nor does a complete checkpoint of it, or of a later step, lie there.

    Long is more than `overdue_steps` (2) steps and `overdue_seconds` (5 min), so that a saver that writes in a thread,
    and a look at a slow disk, have their time; a checkpoint folder that is there but not complete is a matter of
    `checkpoint_broken`. A resume owes nothing for the steps before it. Source: transformers saves before it begins the
    next step; nobody has measured how late other savers are.
    Can not see: save_strategy epoch or best, a save that wrote nothing and said that it did, and anything on a machine
    that does not run rank 0.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._begun = training.step
        self._missed: tuple[int, float] | None = None
        """The first step that was not saved, and when it was found to be past."""

    def tick(self, moment: Moment) -> None:
        step, saved = moment.step, moment.saved_step
        if self._missed is not None and saved is not None and saved >= self._missed[0]:
            self._missed = None
        if (
            self._missed is None
            and step is not None
            and 0 in moment.ranks
            and moment.saves.strategy == "steps"
        ):
            due = moment.saves.latest(step - 1)
            if due is not None and due > max(self._begun, -1 if saved is None else saved):
                self._missed = (due, moment.now)
        if self._missed is None or step is None or moment.writing or not self._is_long_past(step, moment.now):
            self._findings.drop("checkpoint_overdue")
            return
        newest = "there is none" if saved is None else f"the newest is of step {saved}"
        self._findings.hold(
            "checkpoint_overdue", step,
            f"A checkpoint was due at step {self._missed[0]}; at step {step} {newest}.",
            "Look in the log for an error of the save and at the disk of the output folder; do not stop it before "
            "there is one.",
        )  # fmt: skip

    def _is_long_past(self, step: int, now: float) -> bool:
        assert self._missed is not None
        due, since = self._missed
        return step > due + self._limits.overdue_steps and now > since + self._limits.overdue_seconds


class Broken:
    """`checkpoint_broken`: the newest checkpoint folder is not complete, and nobody writes it; a resume would take it.

    Can not see: a file whose end is there and whose content is damaged, for no tensor is loaded.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def tick(self, moment: Moment) -> None:
        if moment.broken_checkpoint is None:
            self._findings.drop("checkpoint_broken")
            return
        good = moment.good_checkpoint
        resume = f"the newest complete one is {good}" if good else "there is no complete one"
        self._findings.hold(
            "checkpoint_broken", moment.step,
            f"A resume would pick {moment.broken_checkpoint}, which is not complete; {resume}.",
            f"Keep it running, and resume from {good} if it dies." if good else "Keep it running to the next save.",
        )  # fmt: skip


class Cause(NamedTuple):
    """Why something will not fit, and what to do about it."""

    message: str
    advice: str


class Room:
    """`will_not_fit`: the disk is too small for the checkpoints to come, or the time for the steps to come.

    Disk: the checkpoints still to be written until the end lie there together, as far as `save_total_limit` lets them
    (a new one is written before an old one is removed), each as large as the newest complete one. They need more bytes,
    or more files, than are free; it is over when 5 % (`room_margin`) more than they need is free. Where it is not known
    how many come, the next one counts. Time: the steps to come, at the recent pace with its pauses, last longer than
    until the deadline, by more than 5 % (`room_margin`) of that time and 10 s, for a minute (`late_seconds`), after 20
    (`late_steps`) steps of this session; it is over when they fit again. Source of the margins: judgement; the mean of
    50 step times seldom moves by more than 5 %.
    Can not see: what else fills the disk, a quota that the file system does not tell, a first checkpoint; evaluations
    that are still to come for the first time; a deadline that nobody has named.
    """

    LEAST_LATE = 10.0

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._full: Cause | None = None
        self._late_since: float | None = None
        self._late = False

    def tick(self, moment: Moment) -> None:
        causes = [cause for cause in (self._disk(moment), self._time(moment)) if cause is not None]
        if not causes:
            self._findings.drop("will_not_fit")
            return
        self._findings.hold(
            "will_not_fit", moment.step,
            " ".join(cause.message for cause in causes), " ".join(cause.advice for cause in causes),
        )  # fmt: skip

    # -- disk ---------------------------------------------------------------------------------------------

    def _disk(self, moment: Moment) -> Cause | None:
        disk, need = moment.disk, _most_more(moment)
        shorts = [
            (room, each, unit)
            for room, each, unit in ((disk.free, disk.size, "bytes"), (disk.inodes, disk.files, "files"))
            if room is not None and each
        ]
        if not any(room < need * each for room, each, _ in shorts):
            margin = 1.0 + self._limits.room_margin
            if not any(room < need * each * margin for room, each, _ in shorts):
                self._full = None
            return self._full
        room, each, unit = min(shorts, key=lambda short: short[0] / short[1])
        self._full = Cause(
            _disk_message(moment, need, room, each, unit),
            "Free space in the output folder's disk, or lower save_total_limit, before the next save.",
        )
        return self._full

    # -- time ---------------------------------------------------------------------------------------------

    def _time(self, moment: Moment) -> Cause | None:
        left, deadline, step, last = moment.left_seconds, moment.deadline, moment.step, moment.max_steps
        if left is None or deadline is None or step is None or last is None or step >= last:
            self._late_since, self._late = None, False
            return None
        until = deadline - moment.now
        if not self._is_late(moment, left - until, until):
            return None
        if until <= 0:
            return Cause(
                f"Its time has been over for {human_duration(-until)}, and it needs about {human_duration(left)} more.",
                "See that it can go on; what is not saved is lost when it is ended.",
            )
        reached = min(last - 1, step + int(until / left * (last - step)))
        saved, known = _saved_by(moment, reached)
        message = (
            f"At its recent pace it needs {human_duration(left)} more, and its time is over in {human_duration(until)}:"
            f" it will get to about step {reached} of {last}, {human_duration(left - until)} short"
        )
        if saved is not None:
            return Cause(
                f"{message}; the last checkpoint before that is of step {saved}.",
                f"Ask for more time, or go on from checkpoint-{saved} in a next job.",
            )
        return Cause(
            f"{message}; no checkpoint falls before that." if known else f"{message}.",
            "Ask for more time, or restart it with a lower save_steps: what is not saved by then is lost.",
        )

    def _is_late(self, moment: Moment, late: float, until: float) -> bool:
        limits = self._limits
        if late <= 0 or moment.session_steps < limits.late_steps:
            self._late_since, self._late = None, False
        elif not self._late:
            if late > max(limits.room_margin * until, self.LEAST_LATE):
                since = self._late_since = moment.now if self._late_since is None else self._late_since
                self._late = moment.now - since >= limits.late_seconds
            else:
                self._late_since = None
        return self._late


def _most_more(moment: Moment) -> int:
    """The most checkpoints that will lie there at once, beyond those of now."""
    saves, present = moment.saves, moment.disk.present
    if moment.step is None or (to_come := saves.to_come(moment.step)) is None:
        return 1
    if saves.keep is None:
        return to_come
    return min(to_come, max(0, saves.keep - present) + 1)


def _disk_message(moment: Moment, need: int, room: float, each: float, unit: str) -> str:
    amount = _size if unit == "bytes" else _count
    fit = int(room // each)
    if fit == 0 or moment.step is None:
        return f"The next checkpoint needs about {amount(each)}, and {amount(room)} are free."
    at = moment.saves.nth(moment.step, fit + 1)
    where = f": that of step {at} will not fit" if at is not None else ""
    return (
        f"The checkpoints to come need up to {amount(need * each)} ({need} of about {amount(each)}), and "
        f"{amount(room)} are free{where}."
    )


def _saved_by(moment: Moment, step: int) -> tuple[int | None, bool]:
    """The step of the last checkpoint up to `step`, as far as known, and whether that can be known."""
    saves = moment.saves
    known = [moment.saved_step, saves.latest(step)]
    found = [one for one in known if one is not None]
    return max(found, default=None), saves.every is not None or saves.only_at_the_end


def _size(amount: float) -> str:
    return f"{amount / 1e9:.2f} GB" if amount >= 1e7 else f"{amount / 1e6:.2f} MB"


def _count(amount: float) -> str:
    return f"{amount:.0f} files"
