"""Runs that compute and learn nothing."""

from __future__ import annotations

from tunewatch.health.reading import Reading
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings


class DeadLoss:
    """`zero_loss`, `labels_masked`: a loss of exactly 0.0, twice in a row, that was not reached by learning.

    - gradient norm 0.0: no label is left in the data (TRL then logs a finite 0): `labels_masked`. The same when the
      count of label tokens stands still while all tokens grow, whatever the loss.
    - no gradient norm in the log (transformers before 4.38): a dead run logs 0.0 for ever: `zero_loss`. So does one
      whose label tokens grow.
    - gradient norm above 0: transformers 4 rounds the loss to 4 digits, so this is "below 5e-5", and alive.
    "Not reached by learning": among the first two logs, or the last loss above 0 was over `dead_loss` (0.05); a model
    that memorised its data comes down to 0 in small steps. Off where a reward is optimized: there 0.0 is usual.
    Source: what transformers and TRL log for such runs. Can not see: masked labels where the loss is NaN and not 0, and
    no tokens are counted (then it is `nonfinite`).
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._zeros = self._still = self._logs = 0
        self._alive: float | None = None
        self._tokens: tuple[float, float] = (0.0, 0.0)
        self._tokens_known = self._raised = False

    def log(self, reading: Reading) -> None:
        if reading.preference:
            return
        loss = reading.loss
        if reading.tokens_all is not None and reading.tokens_loss is not None:
            self._count_tokens(reading.tokens_all, reading.tokens_loss)
        self._logs += 1
        if loss == 0.0 and reading.norm_bad is None:
            self._zeros += 1
        else:
            self._zeros = 0
            if loss is not None:
                self._alive = loss
        if self._zeros >= 2 or self._still >= 2 or self._raised:
            self._judge(reading)

    def _judge(self, reading: Reading) -> None:
        early = self._logs - self._zeros < 2
        dead = self._zeros >= 2 and (early or self._alive is None or self._alive > self._limits.dead_loss)
        masked = self._still >= 2 or (dead and reading.norm == 0.0 and not self._tokens_known)
        silent = dead and not masked and (reading.norm is None or reading.norm == 0.0)
        self._raised = masked or silent
        if masked:
            self._masked(reading.step)
        else:
            self._findings.release("labels_masked")
        if silent:
            self._findings.hold(
                "zero_loss", reading.step,
                "The loss is exactly 0.0 log after log: the run is dead, or no label reaches the loss.",
                "Stop it, and look for NaN in the steps before and at the labels of the data.",
            )  # fmt: skip
        else:
            self._findings.release("zero_loss")

    def _count_tokens(self, all_tokens: float, labels: float) -> None:
        everything, before = self._tokens
        if labels > before:
            self._still = 0
            self._tokens_known = True
        elif all_tokens > everything:
            self._still += 1
        self._tokens = (all_tokens, labels)

    def _masked(self, step: int | None) -> None:
        self._findings.hold(
            "labels_masked", step,
            "No token counts for the loss: all labels are masked, so the loss and its gradient are 0.",
            "Stop it, and check the chat template, the response marker and the maximal length.",
        )  # fmt: skip


class NoGradient:
    """`nothing_trainable`, `no_gradient`.

    `nothing_trainable`: the model begins with 0 trainable parameters; holds for the session.
    `no_gradient`: grad_norm == 0.0 while the learning rate and the loss are above 0, in the first `no_gradient_start`
    (5) logs without exception, or `no_gradient_later` (30) in a row. Healthy runs with batches of one row whose labels
    are all cut off log norm 0 in half of their lines, but none of them begins with five. Off where a reward is
    optimized: equal rewards give no gradient. Source: what frozen adapters log, and public logs.
    Can not see: a norm that is not logged (max_grad_norm 0), or an adapter of which only a part is frozen.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._zeros = 0
        self._alive = False

    def begin(self, training: Training) -> None:
        self._zeros, self._alive = 0, False
        if training.trainable == 0 and training.total != 0:
            self._findings.hold(
                "nothing_trainable", training.step,
                "The model has 0 trainable parameters: the training can not change it.",
                "Stop it, and check that the adapter is added, enabled and not frozen.",
            )  # fmt: skip

    def log(self, reading: Reading) -> None:
        if reading.norm is None or reading.preference:
            return
        if reading.norm != 0.0:
            self._alive = True
            if self._zeros:
                self._zeros = 0
                self._findings.release("no_gradient")
            return
        if reading.loss != 0.0 and (reading.lr is None or reading.lr > 0.0):
            self._zeros += 1
        limit = self._limits.no_gradient_later if self._alive else self._limits.no_gradient_start
        if self._zeros >= limit:
            self._findings.hold(
                "no_gradient", reading.step,
                f"The gradient norm was exactly 0 in the last {self._zeros} logs: nothing is learned.",
                "Stop it, and check that parameters require gradients and that the loss depends on them.",
            )  # fmt: skip
        else:
            self._findings.release("no_gradient")


class Data:
    """`data_not_consumed`: the count of tokens stands still for `data_logs` (3) logs while the steps go on.

    Source: the probe's own count of the tokens given to the model. Can not see: the same batch over and over.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._still = 0
        self._step: int | None = None
        self._tokens: float | None = None

    def log(self, reading: Reading) -> None:
        step, tokens = reading.step, reading.tokens_all
        if step is None or tokens is None:
            return
        if self._tokens is not None and self._step is not None and step > self._step:
            self._still = self._still + 1 if tokens <= self._tokens else 0
        self._step, self._tokens = step, tokens
        if self._still >= self._limits.data_logs:
            self._findings.hold(
                "data_not_consumed", step,
                f"The steps go on to {step}, but no token was read in the last {self._still} logs.",
                "Stop it, and check what the data loader and the collator return.",
            )  # fmt: skip
        else:
            self._findings.release("data_not_consumed")
