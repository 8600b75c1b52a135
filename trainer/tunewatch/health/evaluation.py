"""Evaluation losses: overfitting, those that are not finite, and a train loss on another scale."""

from __future__ import annotations

from tunewatch.health.baseline import Smooth
from tunewatch.health.reading import Reading
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings

MAX_EVAL_SETS = 32
"""Evaluation sets that are followed."""

CURVATURE = 1.954
"""Mean |second difference| of a normal variable over its standard deviation: sqrt(6) sqrt(2/pi)."""

NOISE_WEIGHT = 0.1
LARGE_FACTOR = 4
"""From here on no difference between the data sets explains a train loss that is so many times the evaluation's."""
NEAR = 10
"""Steps between a train loss and an evaluation at the start that are compared."""


class EvalSet:
    """One evaluation set's losses: best, noise, and how long they rise.

    The noise comes from second differences (|e - 2 e' + e''| / 1.954), which a steady rise or fall leaves at 0.
    """

    __slots__ = (
        "above", "before", "best", "best_step", "count", "fast_at_best", "first", "last", "noise", "rises", "rising",
    )  # fmt: skip

    def __init__(self, value: float, step: int | None, fast: float) -> None:
        self.first = self.last = self.best = value
        self.before: float | None = None
        self.best_step, self.fast_at_best = step, fast
        self.noise = 0.0
        self.above = self.rises = 0
        self.count = 1
        self.rising = False

    def add(self, value: float, step: int | None, fast: float, limits: Thresholds) -> None:
        self.count += 1
        if self.before is not None:
            weight = max(NOISE_WEIGHT, 1.0 / (self.count - 2))
            self.noise += weight * (abs(value - 2.0 * self.last + self.before) / CURVATURE - self.noise)
        over = value - self.best
        floor = min(limits.overfit_least, limits.overfit_least * abs(self.first))
        above = over > max(
            (limits.overfit_ratio - 1.0) * abs(self.best), floor, limits.overfit_sigma * self.noise
        )
        self.above = self.above + 1 if above else 0
        self.rises = self.rises + 1 if value > self.last else 0
        steady = self.rises >= limits.rising_evals and over > max(
            (limits.rising_ratio - 1.0) * abs(self.best), floor
        )
        self.rising = self.above >= limits.overfit_evals or steady
        self.before, self.last = self.last, value
        if value < self.best:
            self.best, self.best_step, self.fast_at_best = value, step, fast


class Evaluation:
    """`overfitting`, `eval_rising`, `eval_nonfinite`, `no_best_checkpoint`.

    Of each evaluation set (a sound one does not heal another), e the new loss, `best` the lowest so far: it rises when
    e - best > max(10 % (`overfit_ratio` 1.10) of best, floor, `overfit_sigma` (2.5) noise) in `overfit_evals` (2)
    evaluations in a row, or when it rose `rising_evals` (3) times in a row to more than `rising_ratio` (1.05) of best;
    floor = 0.01, or 1 % of the first loss if that is less. It is `overfitting` while the train loss is not above what
    it was at the best evaluation, `eval_rising` when that rose too. A set is only ever compared with itself, for losses
    over completions or of other texts are on other scales. Off where a reward or a preference is optimized.
    `no_best_checkpoint`: no evaluation loss of any set was ever finite.
    Source: early stopping, with its patience tightened by the noise; limits chosen on public logs.
    Can not see: other metrics; an accuracy may still improve while the loss rises. Nor the first two evaluations.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._sets: dict[str, EvalSet] = {}
        self._broken: set[str] = set()
        self._ever_finite = False
        self._checkpoints: frozenset[int] | None = None
        self._overfits: tuple[str, EvalSet] | None = None

    def begin(self, training: Training) -> None:
        self._broken.clear()
        self._overfits = None
        if not training.step:
            self._sets.clear()
            self._ever_finite = False

    @property
    def newest(self) -> float | None:
        """The lowest of the sets' newest losses; None before the first."""
        return min((known.last for known in self._sets.values()), default=None)

    @property
    def fall(self) -> tuple[float, float] | None:
        """First and lowest loss of the set that fell most; None before a second evaluation."""
        fallen = [(known.first, known.best) for known in self._sets.values() if known.count > 1]
        return min(fallen, key=lambda item: item[1] - item[0], default=None)

    def log(self, reading: Reading, smooth: Smooth) -> None:
        for key, value, spelled in reading.evals:
            if value is None:
                self._nonfinite(key, reading.step, spelled or "nan")
                continue
            self._broken.discard(key)
            self._ever_finite = True
            self._findings.drop("no_best_checkpoint")
            if not reading.preference:
                self._follow(key, value, reading.step, smooth)
        if not self._broken:
            self._findings.drop("eval_nonfinite")

    def tick(self, checkpoints: frozenset[int] | None) -> None:
        """The steps of the checkpoints that are there now."""
        if checkpoints == self._checkpoints:
            return
        self._checkpoints = checkpoints
        if self._overfits is not None and self._findings.is_held("overfitting"):
            self._say_overfitting(*self._overfits, None)

    def _nonfinite(self, key: str, step: int | None, spelled: str) -> None:
        if key not in self._broken and len(self._broken) >= MAX_EVAL_SETS:
            return
        self._broken.add(key)
        at = f" at step {step}" if step is not None else ""
        self._findings.hold(
            "eval_nonfinite", step, f"The evaluation loss ({key}){at} is {spelled}.",
            "Check the evaluation data for rows without labels; the best checkpoint can not be told.",
        )  # fmt: skip
        if not self._ever_finite:
            self._findings.hold(
                "no_best_checkpoint", step,
                "No evaluation loss was finite so far: there is no best checkpoint, and the last weights are kept.",
                "Mend the evaluation data, and choose a checkpoint by hand.",
            )  # fmt: skip

    def _follow(self, key: str, value: float, step: int | None, smooth: Smooth) -> None:
        known = self._sets.get(key)
        if known is None:
            if len(self._sets) < MAX_EVAL_SETS:
                self._sets[key] = EvalSet(value, step, smooth.fast)
            return
        known.add(value, step, smooth.fast, self._limits)
        if known.rising:
            self._rising(key, known, step, smooth)
        elif not any(item.rising for item in self._sets.values()):
            self._findings.release("overfitting")
            self._findings.release("eval_rising")

    def _rising(self, key: str, known: EvalSet, step: int | None, smooth: Smooth) -> None:
        if smooth.fast <= known.fast_at_best:
            self._findings.release("eval_rising")
            self._overfits = (key, known)
            self._say_overfitting(key, known, step)
        else:
            self._findings.release("overfitting")
            self._findings.hold(
                "eval_rising", step, f"{_rise(key, known)}, and the train loss rose too.",
                "Stop it, and resume from a checkpoint before the rise with a lower learning rate.",
            )  # fmt: skip

    def _say_overfitting(self, key: str, known: EvalSet, step: int | None) -> None:
        self._findings.hold(
            "overfitting", step, f"{_rise(key, known)} while the train loss did not rise: the model overfits.",
            f"Stop it, and keep {self._best_checkpoint(known.best_step)}.",
        )  # fmt: skip

    def _best_checkpoint(self, best: int | None) -> str:
        if best is None:
            return "the checkpoint nearest to the best evaluation"
        if self._checkpoints is None:
            return f"the checkpoint nearest to step {best}"
        if best in self._checkpoints:
            return f"the checkpoint of step {best}: it is still there"
        if not self._checkpoints:
            return f"a checkpoint of about step {best} the next time: there is none"
        nearest = min(self._checkpoints, key=lambda step: abs(step - best))
        return f"the checkpoint of step {nearest}: that of step {best} is not there"


def _rise(key: str, known: EvalSet) -> str:
    best = f"{known.best:.4g}" + (f" at step {known.best_step}" if known.best_step is not None else "")
    return f"The evaluation loss ({key}) rose from {best} to {known.last:.4g}"


class Scale:
    """`loss_scale`: the train loss is the evaluation loss times gradient accumulation, times ranks, or times both.

    Some versions of transformers (4.46 to 4.51, for one) log a loss that was summed and not averaged. Compared are the
    first train loss with an evaluation within 10 steps of it, and at later evaluations the quick mean of the train
    loss; the ratio has to be within `loss_scale_tolerance` (25 %) of a factor; a factor below 4 counts only at the
    start and within 10 %. Source: the sums that these versions log.
    Can not see: anything without an evaluation, or with neither accumulation nor ranks.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        parts = {
            "gradient accumulation steps": training.accumulation,
            "ranks": training.world_size,
            "accumulation steps times ranks": training.accumulation * training.world_size,
        }
        self._factors = [(factor, what) for what, factor in parts.items() if factor > 1]
        self._eval: tuple[int, float] | None = None
        self._train: tuple[int, float] | None = None

    @property
    def compares(self) -> bool:
        """Whether there is a factor to look for."""
        return bool(self._factors)

    def log(self, reading: Reading, smooth: Smooth) -> None:
        if reading.preference:
            return
        step = reading.step or 0
        if reading.loss is not None and reading.loss > 0.0 and self._train is None:
            self._train = (step, reading.loss)
            self._compare_start(reading.step)
        for _, value, _ in reading.evals[:1]:
            if value is None or value <= 0.0:
                continue
            if self._eval is None:
                self._eval = (step, value)
                self._compare_start(reading.step)
            if smooth.count:
                self._judge(reading.step, smooth.fast, value, least=LARGE_FACTOR)

    def _compare_start(self, step: int | None) -> None:
        if self._train is not None and self._eval is not None and abs(self._train[0] - self._eval[0]) <= NEAR:
            self._judge(step, self._train[1], self._eval[1], least=2)

    def _judge(self, step: int | None, train: float, evaluation: float, *, least: int) -> None:
        for factor, what in self._factors:
            tolerance = self._limits.loss_scale_tolerance if factor >= LARGE_FACTOR else 0.1
            if factor >= least and abs(train / evaluation / factor - 1.0) <= tolerance:
                self._findings.hold(
                    "loss_scale", step,
                    f"The train loss {train:.4g} is {train / evaluation:.1f} times the evaluation loss "
                    f"{evaluation:.4g}: about the {factor} {what}.",
                    "Keep it, but read the train loss divided by that; update transformers for a right one.",
                )  # fmt: skip
                return
