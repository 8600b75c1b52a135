"""Feeds scripted events to a Health, the way the run folder would."""

from __future__ import annotations

from typing import Any

from tunewatch.health import Health, Moment


def begin(
    health: Health, *, precision: str | None = "bf16", each_step: bool = False, step: int = 0, **fields: Any
) -> None:
    effective = {"precision": precision} if precision else {}
    effective.update(fields.pop("effective", {}))
    health.event(
        {
            "event": "train_begin",
            "step": step,
            "effective": effective,
            "nan_visibility": "each step" if each_step else "logs only",
            **fields,
        }
    )


def log(health: Health, step: int | None, nonfinite: dict[str, str] | None = None, **values: Any) -> None:
    """One log; `tokens` and `skipped` are fields of the event, everything else is a logged value."""
    extra = {name: values.pop(name) for name in ("tokens", "skipped") if name in values}
    health.event({"event": "log", "step": step, "values": values, "nonfinite": nonfinite or {}, **extra})


def logs(health: Health, losses: list[float], *, first: int = 1, every: int = 1, **values: Any) -> None:
    for index, loss in enumerate(losses):
        log(health, first + index * every, loss=loss, **values)


def active(health: Health) -> set[str]:
    return {verdict.signal for verdict in health.verdicts}


def alarms(health: Health) -> set[str]:
    """What is active beyond notes."""
    return {verdict.signal for verdict in health.verdicts if verdict.level != "info"}


def verdict(health: Health, signal: str) -> Any:
    (found,) = [item for item in health.verdicts if item.signal == signal]
    return found


def moment(
    now: float = 1000.0, *, silent: float = 0.0, phase: str = "compute", detail: str = "", step: int | None = 100,
    first: bool = False, pace: float | None = 1.0, **disk: Any,
) -> Moment:  # fmt: skip
    return Moment(now, phase, detail, now - silent, step, first, pace, **disk)
