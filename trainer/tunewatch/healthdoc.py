"""docs/health.md, made from the tables that the verdicts are made with.

python -m tunewatch.healthdoc > docs/health.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from tunewatch.health import LEVELS, SIGNALS, Thresholds
from tunewatch.health.glance import ACT_OF

MEANINGS: dict[str, str] = {
    "nonfinite": "Loss or gradient norm is NaN or infinite, and the weights with them.",
    "nonfinite_isolated": "A loss was not finite, but nothing shows that it reached the weights.",
    "norm_overflow": "A gradient norm was not finite in fp16, whose loss scaling skips such a step.",
    "fp16_overflow": "The fp16 loss scaling skips so many steps that the model hardly learns.",
    "fp16_skips": "The fp16 loss scaling skipped steps, as it does at the start.",
    "zero_loss": "The loss is exactly 0.0 log after log: the run is dead, or no label reaches it.",
    "labels_masked": "No token counts for the loss: all labels are masked.",
    "nothing_trainable": "The model has 0 trainable parameters.",
    "no_gradient": "The gradient norm is exactly 0 log after log.",
    "lr_zero": "The learning rate is 0 outside of warm-up and end.",
    "lr_zero_expected": "The learning rate is 0, as it is at the first and last step of many schedules.",
    "flat": "The loss has not come down since the start.",
    "collapsed_loss": "The loss fell to almost nothing: the model may know its data by heart.",
    "data_not_consumed": "Steps go on, but no token is read.",
    "settings_without_effect": "The losses are those of another run that has other settings.",
    "loss_huge": "The loss starts far above that of a guess.",
    "loss_scale": "The logged loss is the evaluation loss times accumulation steps or ranks: summed, not averaged.",
    "spike": "The loss jumped once.",
    "spikes": "The loss jumps again and again, or has not come back from a jump.",
    "diverging": "The loss rises and stays up.",
    "grad_spike": "The gradient norm jumped once.",
    "grad_explosion": "The gradient norm stays far above its usual size.",
    "eval_nonfinite": "An evaluation loss is NaN or infinite.",
    "no_best_checkpoint": "No evaluation loss was finite so far: there is no best checkpoint.",
    "overfitting": "The evaluation loss rises while the train loss does not.",
    "eval_rising": "The evaluation loss rises, and so does the train loss.",
    "resume_lost": "A resume did not bring back the optimizer or the learning rate schedule.",
    "lr_restarted": "The learning rate rose again, or does not go on where it was before a resume.",
    "schedule_reshaped": "A resume has another number of steps, and so another schedule.",
    "arguments_overridden": "The checkpoint's logging, evaluation or saving steps are used, not those asked for.",
    "never_logs": "There are more steps between two logs than there are steps.",
    "step_back": "The step of a log is lower than that of the log before.",
    "two_writers": "Two processes write the log of one run.",
    "stalled": "No sign of life for longer than phase and pace excuse. Its limits are in `patience`.",
    "hub_push_failed": "The last push to the hub failed; transformers says nothing of it.",
    "checkpoint_broken": "The newest checkpoint folder is not complete, and a resume would take it.",
    "work_at_risk": "Much work has been done since the last checkpoint that a resume can trust.",
    "checkpoint_overdue": "A checkpoint that was due has not come.",
    "will_not_fit": "The checkpoints to come do not fit on the disk, or the steps to come not into the time.",
    "slow": "The run has become much slower than it was.",
    "data_starved": "It waits for its data for much of the time.",
    "slow_rank": "One rank keeps the others waiting.",
}
"""What each signal says, in one sentence."""

_SKIPS, _RATE, _SPIKES = ("fp16_overflow",), ("lr_restarted",), ("spike", "spikes")
_EVALS, _PACE = ("overfitting", "eval_rising"), ("slow", "data_starved", "slow_rank")

LIMITS: dict[str, tuple[tuple[str, ...], str]] = {
    "nonfinite_streak": (("nonfinite",), "Steps or logs in a row, where a single one may do no harm."),
    "nonfinite_many": (("nonfinite",), "Or: how many of them in a window."),
    "nonfinite_window": (("nonfinite",), "Steps or logs of this window."),
    "dead_loss": (
        ("zero_loss", "labels_masked"),
        "Last loss above 0 from which a 0.0 was not reached by learning.",
    ),
    "no_gradient_start": (("no_gradient",), "Logs with norm 0 from the start on."),
    "no_gradient_later": (("no_gradient",), "Logs with norm 0 in a row, later."),
    "scaler_search_steps": (_SKIPS, "Steps in which the scaler looks for its scale."),
    "scaler_search_skips": (_SKIPS, "Skipped steps that this search may take."),
    "skipped_share": (_SKIPS, "Share of steps skipped."),
    "schedule_tail": (("lr_zero",), "From this share of the steps on a rate of 0 is the schedule's end."),
    "lr_jump": (_RATE, "Factor between the rates before and after a resume."),
    "lr_jump_of_peak": (_RATE, "The same as a share of the highest rate."),
    "lr_fallen": (_RATE, "Share of its peak below which the rate has fallen."),
    "lr_risen": (_RATE, "Factor by which it has risen again."),
    "lr_risen_of_peak": (_RATE, "The same as a share of its peak."),
    "flat_logs": (("flat",), "Logs before the loss may be called flat."),
    "flat_ratio": (("flat",), "Share of the loss at the start that it is above now."),
    "flat_best_ratio": (("flat",), "Share of the loss at the start that it has never been below."),
    "flat_sigma": (("flat",), "Or, after twice as many logs: how far below it is now, in the noise."),
    "still_logs": (("flat",), "First losses that are compared with each other."),
    "still_spread": (("flat",), "Share within which they all lie."),
    "collapse_share": (("collapsed_loss",), "Share of the loss at the start that it is below."),
    "collapse_loss": (("collapsed_loss",), "Loss of a supervised fine-tuning that is almost nothing."),
    "collapse_accuracy": (("collapsed_loss",), "Or: share of the tokens that it guesses right."),
    "collapse_of_eval": (("collapsed_loss",), "Or: share of the evaluation loss that it is below."),
    "data_logs": (("data_not_consumed",), "Logs without a new token."),
    "huge_loss": (("loss_huge",), "Loss in the first three logs."),
    "spike_sigma": (_SPIKES, "Jump in the noise of the loss."),
    "spike_ratio": (_SPIKES, "Jump as a share of the loss."),
    "spike_least": (_SPIKES, "Smallest jump that counts."),
    "spike_floor": (_SPIKES, "The same as a share of the first losses, if that is less."),
    "spikes_sigma": (("spikes",), "Jump in the noise, for those that are counted."),
    "spike_window": (("spikes",), "Logs in which they are counted."),
    "spike_hits": (("spikes",), "How many of them."),
    "burst_sigma": (("spikes",), "Rise of five logs on average, in the noise."),
    "burst_floor": (("spikes",), "The same as a share of the first losses."),
    "diverging_ratio": (("diverging",), "Rise above the best, as a share of it."),
    "diverging_least": (("diverging",), "Smallest rise that counts."),
    "diverging_of_first": (("diverging",), "Times the first loss from which that one counts as the best."),
    "diverging_floor": (("diverging",), "The same as a share of the first losses, if that is less."),
    "diverging_sigma": (("diverging",), "Rise in the noise."),
    "diverging_clear_ratio": (("diverging",), "Or, where there is little noise: rise above the best."),
    "diverging_clear_sigma": (("diverging",), "And the rise in the noise then."),
    "diverging_logs": (("diverging",), "Logs for which it stays up."),
    "grad_sigma": (("grad_spike", "grad_explosion"), "Jump of the norm's logarithm, in its noise."),
    "grad_factor": (("grad_spike", "grad_explosion"), "Factor of the jump."),
    "grad_hits": (("grad_explosion",), "Jumps among five logs."),
    "grad_burst_sigma": (("grad_explosion",), "Rise of five logs on average, in the noise."),
    "overfit_ratio": (_EVALS, "Evaluation loss as a multiple of the best."),
    "overfit_least": (_EVALS, "Smallest rise that counts."),
    "overfit_evals": (_EVALS, "Evaluations in a row above both."),
    "overfit_sigma": (_EVALS, "Rise in the noise of the evaluation loss."),
    "rising_evals": (_EVALS, "Or: evaluations in a row, each above the one before."),
    "rising_ratio": (_EVALS, "Multiple of the best that these reach."),
    "loss_scale_tolerance": (("loss_scale",), "How near the ratio is to a factor, as a share."),
    "writers_score": (("two_writers",), "Decayed count of steps back."),
    "risk_seconds": (("work_at_risk",), "Seconds of work since the last checkpoint."),
    "risk_factor": (("work_at_risk",), "The same as a multiple of what usually lies between two."),
    "risk_without": (("work_at_risk",), "Seconds of work where no checkpoint is to come."),
    "overdue_steps": (("checkpoint_overdue",), "Steps beyond the one at which it was due."),
    "overdue_seconds": (("checkpoint_overdue",), "Seconds beyond it."),
    "room_margin": (("will_not_fit",), "Share by which time is short, and by which the disk suffices again."),
    "late_steps": (("will_not_fit",), "Steps of this session before its end is estimated."),
    "late_seconds": (("will_not_fit",), "Seconds for which the estimate is too late."),
    "pace_steps": (_PACE, "Steps of a stretch that is compared, at least."),
    "pace_seconds": (_PACE, "Seconds of such a stretch, at least."),
    "pace_windows": (_PACE, "Stretches in a row."),
    "slow_ratio": (("slow",), "Share of its best speed that it is below."),
    "starved_share": (("data_starved",), "Share of the time in which it waits."),
    "starved_wait": (("data_starved",), "Seconds that a step waits, at least."),
    "slow_rank_share": (("slow_rank",), "Share of the time that the rank costs the others."),
    "slow_rank_wait": (("slow_rank",), "Seconds of a step that it costs them, at least."),
}
"""Of each limit the signals that it belongs to, and what it is."""

INTRODUCTION = """\
# Health: signals, acts and limits

<!-- Made by `python -m tunewatch.healthdoc > docs/health.md`: change the tables in the code, not this page. -->

## One glance

A run has one **health**: `ok`, `attention`, `bad`, or `unknown` while nothing was heard of it. With it go a **reason**,
one sentence, and an **act**. They are the same in `tunewatch runs`, in verdict.json (`health`, `reason`, `act`,
`act_text`, `resume_from`) and in the metrics (`tunewatch_health_level`, `tunewatch_suggested_act{act}`).

| act | what to do |
| --- | --- |
| `keep` | let it run; of a run that has ended: leave it as it is |
| `stop` | end it; what it has so far is the result |
| `restart` | begin anew: with other settings where these would fail again, else once more; `act_text` says which |
| `resume` | stop it if it lives, and go on from the checkpoint that `resume_from` names |

While it lives, the reason is that of the worst signal (below). `resume` names the newest checkpoint that holds all a
resume needs, belongs to this run, and was written before the trouble: before the first NaN, before the rise of a loss
that diverges (twice `diverging_logs` before it was told), not after the best evaluation. Where there is none, the act
is `restart`.

When it has ended: **completed** is `keep`, unless a bad signal holds to the end (a run whose labels were all masked has
no result worth keeping). **Cancelled** is `keep`, and says from where it can go on. **Failed** is bad (preempted and
hangup: attention). A run that failed late is resumed; one that failed early, for a reason that lies in its settings,
is restarted with other ones, since it would fail again; where something has to be changed before a resume, `act_text`
says so.

A signal that holds stays for ten more training logs after its condition has passed, so that it does not flicker.

## Off, or with other limits

| where | how |
| --- | --- |
| `tunewatch exec`, `train`, `adopt`, `replay` | `--off SIGNAL`, `--threshold NAME=VALUE`, each as often as needed |
| the run's YAML file | `health: {off: [SIGNAL, ...], thresholds: {NAME: VALUE, ...}}` |
| a script or notebook | `TunewatchCallback(off=["SIGNAL"], thresholds={"NAME": VALUE})` |

The command line goes before the file; what either switches off is off. A supervisor that takes over (`adopt`) goes on
with what the one before it was given. Under `exec` and `train` those of the callback count for nothing. A name that
there is not is an error, which names the nearest one.

A signal that is off is in no verdict, changes no health, leaves no evidence, and **has no series**:
`tunewatch_health{signal="..."}` is absent, so that no alert on it can fire. It does not silence the end: a run that
ended with NaN in its weights has failed with reason `nan`, and one that was killed after a stall with `stalled`,
whatever is off.

A limit that is moved makes the detector more or less patient than what it was tuned for: a share of healthy public
logs that it does not flag is known for the defaults only. A `log` is one training log line; a share is from 0 to 1;
`noise` is the standard deviation of one log around its neighbours.
"""


def document() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, "## Signals\n", *_signals(), "\n## Limits\n", *_limits()])


def _signals() -> Iterator[str]:
    yield "`info` is a note: it never changes the health. What each can not see stands with its detector in the code.\n"
    yield from _table(
        ("signal", "level", "act", "meaning"),
        (
            (f"`{signal}`", level, f"`{ACT_OF[signal]}`", MEANINGS[signal])
            for signal, level in sorted(SIGNALS.items(), key=lambda item: -LEVELS.index(item[1]))
        ),
    )


def _limits() -> Iterator[str]:
    yield from _table(
        ("limit", "default", "of", "meaning"),
        (
            (
                f"`{name}`",
                f"{getattr(Thresholds, name):g}",
                ", ".join(f"`{signal}`" for signal in LIMITS[name][0]),
                LIMITS[name][1],
            )
            for name in Thresholds.names()
        ),
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.stdout.write(document() + "\n")
