"""The verdicts about one run, kept up to date by its events."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from tunewatch.health.collapse import Collapse
from tunewatch.health.evaluation import Evaluation, Scale
from tunewatch.health.flat import Flat
from tunewatch.health.learning import Data, DeadLoss, NoGradient
from tunewatch.health.life import HubPushes, Life, Patience, Settings, Writers
from tunewatch.health.moment import Moment
from tunewatch.health.numbers import NonFinite, ScalerSkips
from tunewatch.health.pace import Tempo
from tunewatch.health.reading import Reader, finite, mapping, whole
from tunewatch.health.saving import Saving
from tunewatch.health.schedule import Restart, Resume, ZeroRate
from tunewatch.health.shape import GradientNorm, Loss
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import LEVELS, Findings, Verdict

_SURVIVE_A_BEGIN = (
    "stalled", "hub_push_failed", "checkpoint_broken", "work_at_risk", "will_not_fit", "settings_without_effect",
)  # fmt: skip
"""What is not about the training that begins."""


class Health:
    """The verdicts about one run, kept up to date by `event` and `tick`.

    `event` takes the run folder's events of this session in order; a log that is read on its own (a replay) may leave
    out everything but `log`. `past` takes those of earlier sessions: they raise nothing, but a resume is compared with
    them. No event raises an exception, whatever it holds. Memory and time for an event do not grow with the run.
    """

    def __init__(self, patience: Patience | None = None, thresholds: Thresholds | None = None) -> None:
        self.patience = patience or Patience()
        self.thresholds = thresholds or Thresholds()
        limits = self.thresholds
        self._findings = findings = Findings(limits.off)
        self._known = False
        self._life = Life(findings, self.patience)
        self._saving = Saving(findings, limits)
        self._tempo = Tempo(findings, limits)
        settings = Settings(findings)
        self.same_as = settings.same_as
        self._hub = HubPushes(findings)
        self._reader = Reader()
        self._nonfinite = NonFinite(findings, limits)
        self._skips = ScalerSkips(findings, limits)
        self._dead = DeadLoss(findings, limits)
        self._gradient = NoGradient(findings, limits)
        self._flat = Flat(findings, limits)
        self._collapse = Collapse(findings, limits)
        self._data = Data(findings, limits)
        self._zero_rate = ZeroRate(findings, limits)
        self._restart = Restart(findings, limits)
        self._resume = Resume(findings)
        self._loss = Loss(findings, limits)
        self._norm = GradientNorm(findings, limits)
        self._evaluation = Evaluation(findings, limits)
        self._scale = Scale(findings, limits)
        self._writers = Writers(findings, limits)
        self._handlers = {
            "train_begin": self._on_train_begin,
            "log": self._on_log,
            "nonfinite": self._nonfinite.step,
            "finite": lambda event: self._nonfinite.sound(),
            "evaluate": lambda event: self._life.remember("evaluate", finite(event.get("seconds"))),
            "save": lambda event: self._life.remember("save", finite(event.get("seconds"))),
            "hub_push": self._hub.event,
        }

    @property
    def verdicts(self) -> list[Verdict]:
        """What holds now, the worst first."""
        return sorted(self._findings.verdicts, key=lambda verdict: -LEVELS.index(verdict.level))

    @property
    def signals(self) -> Set[str]:
        """The names of the verdicts."""
        return self._findings.signals

    @property
    def level(self) -> str:
        """One word for the run: ok, attention, bad, or unknown while nothing was heard of it."""
        worst = max((LEVELS.index(verdict.level) for verdict in self._findings.verdicts), default=0)
        if worst:
            return LEVELS[worst]
        return "ok" if self._known else "unknown"

    def is_active(self, signal: str) -> bool:
        return signal in self._findings

    @property
    def nonfinite_since(self) -> int | None:
        """First step of a streak of damaged steps that goes on; None when the last step was sound."""
        return self._nonfinite.since

    @property
    def deadline(self) -> float | None:
        """When (CLOCK_MONOTONIC) the silence becomes a stall; None while nothing is expected."""
        return self._life.deadline

    # -- events -------------------------------------------------------------------------------------------

    def event(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the run folder."""
        name = event.get("event")
        handler = self._handlers.get(name) if isinstance(name, str) else None
        if handler is not None:
            handler(event)

    def past(self, event: Mapping[str, Any]) -> None:
        """Take in one event of an earlier session of the run."""
        if event.get("event") == "train_begin":
            self._resume.past(Training.of(event))
        elif event.get("event") == "log":
            rate = finite(mapping(event.get("values")).get("learning_rate"))
            self._restart.past(whole(event.get("step")), rate)

    def _on_train_begin(self, event: Mapping[str, Any]) -> None:
        self._known = True
        training = Training.of(event)
        self._findings.keep_only(*_SURVIVE_A_BEGIN)
        self._reader.preference = training.preference
        for detector in (
            self._nonfinite, self._skips, self._dead, self._gradient, self._flat, self._collapse, self._data,
            self._zero_rate, self._restart, self._resume, self._loss, self._norm, self._evaluation,
            self._scale, self._writers, self._saving, self._tempo,
        ):  # fmt: skip
            detector.begin(training)

    def _on_log(self, event: Mapping[str, Any]) -> None:
        self._known = True
        reading = self._reader.read(event)
        loss, evaluation = self._loss, self._evaluation
        self._nonfinite.log(reading, skipped=reading.bad and self._skips.more_in(reading))
        if reading.train:
            self._findings.next_log()
            if reading.skipped is not None or self._skips.skipping:
                self._skips.log(reading)
            self._dead.log(reading)
            self._gradient.log(reading)
            if reading.tokens_all is not None:
                self._data.log(reading)
            self._zero_rate.log(reading, skipping=self._skips.skipping)
            self._restart.log(reading)
            self._writers.log(reading)
            loss.log(reading)
            self._flat.log(reading, loss.smooth, loss.noise, evaluation)
            self._collapse.log(reading, loss.smooth, evaluation)
            self._norm.log(reading)
        if reading.evals:
            evaluation.log(reading, loss.smooth)
        if self._scale.compares:
            self._scale.log(reading, loss.smooth)

    # -- time ---------------------------------------------------------------------------------------------

    def tick(self, moment: Moment) -> None:
        """Judge the time since the last sign of life and what lies on the disk, and take back what has healed."""
        self._known = True
        self._life.tick(moment)
        self._saving.tick(moment)
        self._tempo.tick(moment)
        self._nonfinite.tick(moment.step)
        self._evaluation.tick(moment.checkpoint_steps)

    def allowed(self, moment: Moment) -> float:
        """Seconds of silence that the run's phase and own pace excuse."""
        return self._life.allowed(moment)

    def silence(self) -> None:
        """The run has ended: time proves nothing any more."""
        self._life.silence()
