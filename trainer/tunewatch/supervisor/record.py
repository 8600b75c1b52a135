"""Folds a run's events and pulses into what is known of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from tunewatch.probe.pace import Pace
from tunewatch.probe.pulse import PHASES, STEP_BUCKETS
from tunewatch.probe.tokens import KINDS as TOKEN_KINDS
from tunewatch.probe.values import as_number
from tunewatch.probe.writer import ACTIVITIES

MAX_METRICS = 64
"""Numeric log keys beyond the known ones that become series; the rest are counted as dropped."""

MAX_EVAL_SETS = 32

MAX_UNSAVED = 10_000
"""Logs since the last save whose token count is kept."""

_KNOWN_KEYS = frozenset(
    {
        "loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "num_input_tokens_seen", "train_loss",
        "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "step",
    }
)  # fmt: skip
_AGENT = ("ChildFailedError", "SignalException", "CalledProcessError")
"""What torchrun's agent raises: its word about its ranks counts."""

_EVAL_BOOKKEEPING = ("_runtime", "_samples_per_second", "_steps_per_second", "_num_tokens")


class Record:
    """One run's facts. `event` takes the run folder's lines in order, `pulse` the ranks' latest pulses.

    Events before `begin_session` are history: they tell of the whole run (tokens seen, the best evaluation, which
    steps are done again), but what counts for the session under way, and for its end, comes after it.
    """

    def __init__(self) -> None:
        self.info: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.effective: dict[str, Any] = {}
        self.arguments: dict[str, Any] = {}
        """The trainer's whole arguments, secrets masked, without paths and texts."""
        self.requested: dict[str, Any] = {}
        """Arguments as they were given; a resume takes some of them from the checkpoint instead."""
        self.parameters: dict[str, int] = {}
        self.history = True
        self.attached = False
        self.main_session: str | None = None
        self.sessions: dict[str, Mapping[str, Any]] = {}
        self.exited_sessions: set[str] = set()
        self.job_state: str | None = None
        self.trained = False
        self.training = False
        self.train_returned = False
        self.interactive = False
        self.requested_stop = False
        self.terminated = False
        """A checkpoint on SIGTERM ended the training."""
        self.exceptions: list[Mapping[str, Any]] = []
        self.package: Mapping[str, Any] | None = None
        self.output_dir: str | None = None
        self.save_total_limit: int | None = None
        self.saved_step: int | None = None
        """The step of the last save of this training."""
        self.loss: float | None = None
        self.losses = 0
        """Losses logged, in the whole run."""
        self.learning_rate: float | None = None
        self.grad_norm: float | None = None
        self.train_loss_mean: float | None = None
        self.eval_loss: dict[str, float] = {}
        self.best_eval_loss: float | None = None
        self.best_step: int | None = None
        self.evals_since_best: int | None = None
        self.other: dict[str, float] = {}
        self.dropped_total = 0
        self.tokens_seen: dict[str, float] = {}
        """Tokens of the whole run by kind; a kind whose earlier sessions nobody counted is absent."""
        self._counted: dict[str, float] = {}
        """What the probe had counted at the last log, since its process began."""
        self._counted_before: dict[str, float] = {}
        """The same when this training began: it may not be the first one of its process."""
        self._trl_tokens = self._trl_before = 0.0
        """TRL's num_tokens of this training, and of those before it in this session."""
        self.nonfinite_evals = 0
        self.resumes = 0
        self.resumed_at = 0
        """The step at which this session went on, 0 for a fresh start."""
        self.steps_redone = 0
        """Steps of earlier sessions that lay behind the checkpoint this one went on from."""
        self.restored: Mapping[str, Any] = {}
        self.nan_filter: bool | None = None
        self._bad_loss_since_log = False
        self._bad_loss_goes_on = False
        self.nan_visibility: str | None = None
        self.samples_generated: int | None = None
        self.hub_failures = 0
        self.hub_last_success: float | None = None
        self.hub_last_failure: float | None = None
        self.step_event: int | None = None
        self.max_steps_event: int | None = None
        self.phase_ratio: float | None = None
        self.phase_name: str | None = None
        self._activity: str | None = None
        self.gpus: dict[int, tuple[str, ...]] = {}
        self.save_seconds: float | None = None
        self.wasted_seconds = 0.0
        self.pace = Pace()
        self.pulses: dict[int, Mapping[str, float]] = {}
        self._detail = ""
        self._tokens_at: dict[int, dict[str, float]] = {}
        """Tokens seen by step, of the logs since the last save and of one log before each save."""
        self._unsaved: deque[int] = deque(maxlen=MAX_UNSAVED)
        self._token_base: dict[str, float] | None = {}
        """Tokens of the run when this training began; None where that is not known."""
        self._last_step: int | None = None
        self._rows_before: tuple[int, float] | None = None
        """The step this training went on from, and the rows of the run up to there; None where nobody knows."""
        self._first_log: tuple[int, float] | None = None
        self._last_log: tuple[int, float] | None = None
        self._paced: tuple[float, float, float] | None = None
        self._paced_pid: float | None = None
        self._eval_keys: set[str] = set()

    # -- events -------------------------------------------------------------------------------------------

    def event(self, event: Mapping[str, Any]) -> None:
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def begin_session(self, last_step: int | None = None) -> None:
        """From the next event on it is the session under way that speaks.

        `last_step` is the step that the session before had reached, when its pulse tells more than its logs.
        """
        self.history = False
        self._detail, self.phase_name, self.phase_ratio, self._activity = "", None, None, None
        self._trl_tokens = self._trl_before = 0.0
        if last_step is not None and self._last_step is not None:
            self._last_step = max(last_step, self._last_step)
        self._forget_logged()

    def _on_session(self, event: Mapping[str, Any]) -> None:
        if self.history or not {"session", "pid"} <= event.keys() or event["session"] in self.sessions:
            return
        self.sessions[event["session"]] = event
        self.attached = True
        if event.get("rank") == 0 and not self.training:
            self._counted, self._counted_before = {}, {}
            self._main(event["session"])

    def _main(self, session: str) -> None:
        """The process whose end is the training's: the last of rank 0 that began a training, or is about to."""
        self.main_session = session
        self.interactive = bool(self.sessions.get(session, {}).get("interactive"))

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        if event.get("rank") == 0:
            self.phase_name = event.get("phase")
            self._detail = str(event.get("detail") or "")
            self._activity = event.get("activity") if event.get("activity") in ACTIVITIES else None
            ratio = as_number(event.get("ratio"))
            self.phase_ratio = None if ratio is None else min(1.0, max(0.0, float(ratio)))

    def _on_state(self, event: Mapping[str, Any]) -> None:
        if not self.history:
            self.job_state = event.get("state")

    def _on_provenance(self, event: Mapping[str, Any]) -> None:
        self.info.update({k: v for k, v in (event.get("info") or {}).items() if v is not None})
        self.arguments = dict(event.get("arguments") or self.arguments)
        self.environment.update(
            {k: str(v) for k, v in (event.get("environment") or {}).items() if v is not None}
        )

    def _on_device(self, event: Mapping[str, Any]) -> None:
        self.gpus[int(event.get("rank", 0))] = tuple(map(str, event.get("gpus") or ()))

    def _on_train_begin(self, event: Mapping[str, Any]) -> None:
        step = int(event.get("step") or 0)
        if not self.history and not event.get("restart"):
            self._redone(step)
        self._first_log = self._last_log = None
        self._last_step = step
        self._rows_before = (step, 0.0) if step == 0 else self._rows_at(step)
        self.step_event, self.max_steps_event = step, event.get("max_steps")
        self.effective = dict(event.get("effective") or {})
        self.requested = dict(event.get("requested") or {})
        self.parameters = {
            kind: int(count)
            for kind in ("trainable", "total")
            if (count := as_number(event.get(f"{kind}_parameters"))) is not None
        }
        self.output_dir = event.get("output_dir") or self.output_dir
        self.save_total_limit, self.saved_step = event.get("save_total_limit"), None
        self.nan_filter, self.nan_visibility = event.get("nan_filter"), event.get("nan_visibility")
        self._bad_loss_since_log = self._bad_loss_goes_on = False
        if not event.get("restart"):  # a search for the batch size goes on counting
            self._token_base = self._known_tokens(step)
            self._counted_before = dict(event.get("tokens") or self._counted)
            self._trl_before, self._trl_tokens = self._trl_before + self._trl_tokens, 0.0
        self.restored = (event.get("restored") or {}) if step else {}
        if not self.history:
            self._begin_training(event)
            if step and not event.get("restart"):
                self.resumes += 1
                self.resumed_at = step
        self._forget_logged()
        self.pace.reset()

    def _begin_training(self, event: Mapping[str, Any]) -> None:
        session = str(event.get("session"))
        self.trained = self.training = True
        self.train_returned = self.requested_stop = self.terminated = False
        self._main(session)
        # An attempt that failed and was tried again (by the script, by torchrun) is no cause of the end. Of other
        # ranks, what they reported since this process started may be.
        since = self.sessions.get(session, {}).get("m", 0.0)
        self.exceptions = [
            error
            for error in self.exceptions
            if error.get("session") != session
            and error.get("m", 0.0) >= since
            and self.sessions.get(str(error.get("session")), {}).get("world_size") != 1
        ]

    def _forget_logged(self) -> None:
        """What an earlier session logged last is not what this one does now."""
        self.loss = self.learning_rate = self.grad_norm = self.train_loss_mean = None
        self.other.clear()

    def _on_resume(self, event: Mapping[str, Any]) -> None:
        """What is to be resumed lies there, should the training die of loading it."""
        self.output_dir = event.get("output_dir") or self.output_dir

    def _on_train_end(self, event: Mapping[str, Any]) -> None:
        self.step_event = event.get("step", self.step_event)
        self._first_log = self._last_log = self._last_step = None  # nothing of it will be done again
        if not self.history:
            self.training = False
            self.requested_stop = bool(event.get("requested_stop"))
            self.terminated = bool(event.get("terminated"))

    def _on_train_return(self, event: Mapping[str, Any]) -> None:
        if not self.history and event.get("rank") == 0:
            self.train_returned, self.training = True, False

    def _on_log(self, event: Mapping[str, Any]) -> None:
        values, nonfinite = dict(event.get("values") or {}), event.get("nonfinite") or {}
        values.update({key: float(text) for key, text in nonfinite.items()})
        step = int(event.get("step") or 0)
        self._last_step = step
        self.step_event = max(step, self.step_event or 0) if not self.training else step
        self._time(step, event)
        self._unfilter(values)
        nothing_done = values.get("train_loss") == 0.0 and not self._steps_this_session()
        if "train_loss" in values and "loss" not in values and not nothing_done:
            self.train_loss_mean = values["train_loss"]
        self.losses += "loss" in values
        for name in ("loss", "learning_rate", "grad_norm"):
            if name in values:
                setattr(self, name, values[name])
        self._evaluation(values, step)
        self._tokens(values, event, step)
        for key, value in values.items():
            if key not in _KNOWN_KEYS and key not in self._eval_keys and not key.endswith(_EVAL_BOOKKEEPING):
                self._other(key, value)

    def _on_save(self, event: Mapping[str, Any]) -> None:
        self.save_seconds = event.get("seconds") or self.save_seconds
        self.saved_step = event.get("step")
        self._count_tokens(event.get("tokens") or {}, int(event.get("step") or 0))
        while len(self._unsaved) > 1:  # a resume from this checkpoint needs the last one only
            self._tokens_at.pop(self._unsaved.popleft(), None)
        self._unsaved.clear()

    def _on_nonfinite(self, event: Mapping[str, Any]) -> None:
        if event.get("loss"):
            self._bad_loss_goes_on = self._bad_loss_since_log = True

    def _on_finite(self, event: Mapping[str, Any]) -> None:
        self._bad_loss_goes_on = False

    def _unfilter(self, values: dict[str, float]) -> None:
        """Take back what logging_nan_inf_filter made up: 0.0 for a dead run, less than the truth for a bad batch."""
        if "loss" not in values:
            return
        if self.nan_filter and self._bad_loss_since_log:
            values["loss"] = math.nan
        self._bad_loss_since_log = self._bad_loss_goes_on

    def _on_exception(self, event: Mapping[str, Any]) -> None:
        if self.history or self._is_of_a_helper(event):
            return
        self.exceptions.append(event)
        self.training = False

    def _is_of_a_helper(self, event: Mapping[str, Any]) -> bool:
        """Whether another Python program below the training raised it: what that means is for the training to say."""
        session = str(event.get("session"))
        facts = self.sessions.get(session)
        if not self.trained or facts is None or session == self.main_session or event.get("type") in _AGENT:
            return False
        return facts.get("world_size", 1) == 1

    def _on_exit(self, event: Mapping[str, Any]) -> None:
        self.exited_sessions.add(str(event.get("session")))

    def _on_hub_push(self, event: Mapping[str, Any]) -> None:
        if self.history:
            return
        if event.get("ok"):
            self.hub_last_success = event.get("t")
        else:
            self._push_failed(event)

    def _push_failed(self, event: Mapping[str, Any]) -> None:
        self.hub_failures += 1
        self.hub_last_failure = event.get("t")

    def _on_samples(self, event: Mapping[str, Any]) -> None:
        self.samples_generated = event.get("generated")

    def _on_package(self, event: Mapping[str, Any]) -> None:
        if self.history:
            return
        self.package = event
        if event.get("push") == "failed":
            self._push_failed(event)
        elif event.get("push") == "done":
            self.hub_last_success = event.get("t")

    # -- parts of a log -----------------------------------------------------------------------------------

    def _evaluation(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            if not (key.startswith("eval_") and key.endswith("loss")):
                continue
            dataset = key[len("eval_") : -len("loss")].rstrip("_") or "eval"
            if dataset not in self.eval_loss and len(self.eval_loss) >= MAX_EVAL_SETS:
                continue
            self._eval_keys.add(key)
            self.eval_loss[dataset] = value
            if not math.isfinite(value) and not self.history:
                self.nonfinite_evals += 1
            if dataset == next(iter(self.eval_loss)):  # "best" follows the first set
                self._best(value, step)

    def _best(self, value: float, step: int) -> None:
        if math.isfinite(value) and (self.best_eval_loss is None or value < self.best_eval_loss):
            self.best_eval_loss, self.best_step, self.evals_since_best = value, step, 0
        elif self.evals_since_best is not None:
            self.evals_since_best += 1

    def _tokens(self, values: Mapping[str, float], event: Mapping[str, Any], step: int) -> None:
        """What the probe counts itself; else TRL's num_tokens, of attended tokens of this training and all ranks."""
        own = values.get("num_tokens")
        if own is not None and math.isfinite(own):
            if own < self._trl_tokens:  # another trainer
                self._trl_before += self._trl_tokens
            self._trl_tokens = own
        else:
            own = None
        counted = self._count_tokens(event.get("tokens") or {}, step, own)
        seen = event.get("tokens_seen")  # transformers' own count, of the whole run
        kind = (
            "all" if self.effective.get("include_num_input_tokens_seen") != "non_padding" else "non_padding"
        )
        if seen and (self._token_base is None or kind not in counted):
            self.tokens_seen[kind] = float(seen)

    def _count_tokens(
        self, tokens: Mapping[str, float], step: int, trl: float | None = None
    ) -> Mapping[str, float]:
        """Take in the counts up to `step`, add them to those of earlier sessions, and return those of this training."""
        self._counted.update({kind: tokens[kind] for kind in TOKEN_KINDS if kind in tokens})
        counted = {} if trl is None else {"non_padding": trl}
        for kind in TOKEN_KINDS:
            if kind in tokens:
                counted[kind] = max(0.0, tokens[kind] - self._counted_before.get(kind, 0.0))
        if not counted or self._token_base is None:
            return counted
        for kind, count in counted.items():
            if not self._token_base or kind in self._token_base:
                self.tokens_seen[kind] = self._token_base.get(kind, 0.0) + count
        if len(self._unsaved) == MAX_UNSAVED:
            self._tokens_at.pop(self._unsaved[0], None)
        if step not in self._tokens_at:
            self._unsaved.append(step)
        self._tokens_at[step] = dict(self.tokens_seen)
        return counted

    def _known_tokens(self, step: int) -> dict[str, float] | None:
        reached = [at for at in self._tokens_at if at <= step]
        self._tokens_at = {at: self._tokens_at[at] for at in reached}  # what came after it is redone
        self._unsaved.clear()
        self.tokens_seen = dict(self._tokens_at[max(reached)]) if reached else {}
        if reached:
            return dict(self.tokens_seen)
        return None if step else {}

    def _other(self, key: str, value: float) -> None:
        if key in self.other or len(self.other) < MAX_METRICS:
            self.other[key] = value
        else:
            self.dropped_total += 0 if self.history else 1

    def _time(self, step: int, event: Mapping[str, Any]) -> None:
        """Remember the first and last log of a training; between processes of one boot `m` tells the time."""
        if step and isinstance(event.get("m"), (int, float)):
            self._last_log = (step, event["m"])
            self._first_log = self._first_log or self._last_log

    def _redone(self, step: int) -> None:
        """A session that begins behind the last step of the one before does the steps between again.

        How long they took is estimated from the pace of that session's logs.
        """
        if self._last_step is None or self._last_step <= step:
            return
        self.steps_redone += self._last_step - step
        if self._first_log is None or self._last_log is None:
            return
        steps, seconds = (last - first for first, last in zip(self._first_log, self._last_log, strict=True))
        if steps > 0 and seconds > 0:
            self.wasted_seconds += (self._last_step - step) * seconds / steps

    # -- pulses -------------------------------------------------------------------------------------------

    def pulse(self, pulses: Mapping[int, Mapping[str, float]]) -> None:
        """Take in the latest pulses of this session's processes."""
        self.pulses = dict(pulses)
        main = self.main
        if main is None:
            return
        self.attached = True
        paused = main["evaluate_seconds"] + main["save_seconds"]
        now = (main["step_seconds_count"], main["step_seconds_sum"], paused)
        if self._paced is None or main["pid"] != self._paced_pid:
            if self._paced is not None:
                self.pace.reset()
            self._paced, self._paced_pid = (0.0, 0.0, 0.0), main["pid"]
        count = int(now[0] - self._paced[0])
        if count > 0:
            self.pace.step((now[1] - self._paced[1]) / count, count)
            self.pace.pause(now[2] - self._paced[2])
            self._paced = now

    @property
    def main(self) -> Mapping[str, float] | None:
        """The pulse of the lowest rank on this node."""
        return self.pulses[min(self.pulses)] if self.pulses else None

    def _steps_this_session(self) -> float:
        return self.main["steps_total"] if self.main else 0.0

    @property
    def step(self) -> int | None:
        main = self.main
        if main is not None and not math.isnan(main["step"]):
            return int(main["step"])
        return self.step_event

    @property
    def max_steps(self) -> int | None:
        main = self.main
        if main is not None and not math.isnan(main["max_steps"]):
            return int(main["max_steps"])
        return int(self.max_steps_event) if self.max_steps_event else None

    @property
    def phase(self) -> str | None:
        main = self.main
        return PHASES[int(main["phase"])] if main is not None else None

    @property
    def phase_detail(self) -> str:
        """A few words on what the phase is busy with; "" once they are out of date."""
        main = self.main
        if main is None:
            return self._detail
        begun = (
            self.phase == "data" and not main["first_step"]
        )  # it was skipping data, or fetching the first batch
        return "" if self.phase != self.phase_name or begun else self._detail

    @property
    def samples_seen(self) -> float | None:
        """Rows of the whole run: steps by rows a step, which may change with each session."""
        rows = None if self.step is None else self._rows_at(self.step)
        return None if rows is None else rows[1]

    def _rows_at(self, step: int) -> tuple[int, float] | None:
        batch = as_number(self.effective.get("batch_size"))
        if self._rows_before is None or batch is None or step < self._rows_before[0]:
            return None
        return step, self._rows_before[1] + (step - self._rows_before[0]) * batch

    @property
    def activity(self) -> str | None:
        """What it prepares (one of ACTIVITIES), or None."""
        return self._activity if self.phase_detail else None

    @property
    def session_tokens(self) -> dict[str, float]:
        """Tokens of this session by kind; one that was never counted is absent."""
        if self.history:
            return {}
        logged = self._trl_before + self._trl_tokens
        tokens = {"non_padding": logged} if logged else {}
        for kind in TOKEN_KINDS if self.pulses else ():
            if not math.isnan(count := self.rank_sum(f"tokens_{kind}_total")):
                tokens[kind] = count
        return tokens

    @property
    def step_buckets(self) -> tuple[float, ...]:
        main = self.main
        return (
            tuple(main[f"step_bucket_{i}"] for i in range(len(STEP_BUCKETS) + 1)) if main is not None else ()
        )

    def rank_sum(self, name: str) -> float:
        """A field summed over the ranks of this node; NaN where one of them does not know it."""
        return sum(pulse[name] for pulse in self.pulses.values())

    def rank_max(self, name: str) -> float:
        return max((pulse[name] for pulse in self.pulses.values()), default=0.0)
