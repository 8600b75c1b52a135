"""Verdicts about one run: computed online on its events and pulses, with constant memory.

Every verdict about a single run comes from here: the supervisor, the replay and the tests feed the same detectors. A
signal has one fixed level, so an alert is a thin rule on `tunewatch_health{signal}`.
"""

from tunewatch.health.core import Health
from tunewatch.health.duration import human_duration
from tunewatch.health.life import Moment, Patience
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.verdict import CLEAN_LOGS, LEVELS, SIGNALS, Verdict

__all__ = [
    "CLEAN_LOGS",
    "LEVELS",
    "SIGNALS",
    "Health",
    "Moment",
    "Patience",
    "Thresholds",
    "Verdict",
    "human_duration",
]
