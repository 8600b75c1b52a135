"""A loss that comes down too far."""

from __future__ import annotations

from tunewatch.health.baseline import Smooth
from tunewatch.health.evaluation import Evaluation
from tunewatch.health.reading import Reading, finite
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings


class Collapse:
    """`collapsed_loss`: after the first epoch the train loss is almost nothing: it may know its data by heart.

    With f the quick mean of the train loss and L0 the mean of its first ten: f < `collapse_share` (0.02) L0, and
    - text: a supervised fine-tuning (by the trainer's class) with f < `collapse_loss` (0.02 nats a token), or 99 %
      (`collapse_accuracy`) of the tokens guessed right, unless an evaluation loss is as low (below 10 f);
    - anything: f < `collapse_of_eval` (0.01) of the newest evaluation loss.
    Source: no text that people write can be foretold to 0.02 nats a token; the second limit is a fifth of the smallest
    ratio seen in healthy public logs. Off where a reward or a preference is optimized.
    Can not see: anything in the first epoch, and without epochs in the log. Short answers (one of two labels) may well
    be foretold without being remembered; an evaluation tells.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._sft, self._collapsed = training.supervised, False

    def log(self, reading: Reading, smooth: Smooth, evaluation: Evaluation) -> None:
        train = smooth.fast
        if train >= self._limits.collapse_share * smooth.first or reading.preference or smooth.best is None:
            if self._collapsed:
                self._release()
            return
        epoch = self._epoch(reading)
        newest = evaluation.newest if epoch is not None else None
        if epoch is None or epoch <= 1.0 or not self._remembers(reading, train, newest):
            if self._collapsed:
                self._release()
            return
        self._collapsed = True
        beside = f", where the evaluation loss is {newest:.4g}" if newest is not None else ""
        self._findings.hold(
            "collapsed_loss", reading.step,
            f"The train loss fell from {smooth.first:.4g} to {train:.2g} in {epoch:.1f} epochs{beside}: "
            "it may know its data by heart.",
            "Test it on texts it has not seen; if it fails there, train for fewer epochs or on more data.",
        )  # fmt: skip

    def _release(self) -> None:
        self._collapsed = False
        self._findings.release("collapsed_loss")

    def _remembers(self, reading: Reading, train: float, evaluation: float | None) -> bool:
        limits = self._limits
        accuracy = finite(reading.values.get("mean_token_accuracy"))
        text = (self._sft and train < limits.collapse_loss) or (
            accuracy is not None and accuracy >= limits.collapse_accuracy
        )
        if text:
            return evaluation is None or evaluation >= 10.0 * train
        return evaluation is not None and train < limits.collapse_of_eval * evaluation

    @staticmethod
    def _epoch(reading: Reading) -> float | None:
        epoch = finite(reading.epoch)
        return finite(reading.values.get("epoch")) if epoch is None else epoch
