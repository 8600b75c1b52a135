"""Verdicts about one run: computed online on its events and pulses, with constant memory.

Every verdict about a single run comes from here: the supervisor, the replay and the tests feed the same detectors. A
signal has one fixed level, so an alert is a thin rule on `tunewatch_health{signal}`.
"""

from tunewatch.health.core import Health
from tunewatch.health.duration import human_duration
from tunewatch.health.glance import ACTS, Glance, Standing, at_a_glance
from tunewatch.health.life import Patience
from tunewatch.health.moment import Disk, Moment, Saves, Work
from tunewatch.health.thresholds import ThresholdError, Thresholds
from tunewatch.health.verdict import CLEAN_LOGS, LEVELS, SIGNALS, Verdict

__all__ = [
    "ACTS",
    "CLEAN_LOGS",
    "LEVELS",
    "SIGNALS",
    "Disk",
    "Glance",
    "Health",
    "Moment",
    "Patience",
    "Saves",
    "Standing",
    "ThresholdError",
    "Thresholds",
    "Verdict",
    "Work",
    "at_a_glance",
    "human_duration",
]
