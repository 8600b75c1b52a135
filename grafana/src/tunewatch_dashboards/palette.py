"""The colours of all dashboards, each with one meaning. Red means failure and nothing else.

Names are Grafana's own, so they fit the light and the dark theme.
"""

from __future__ import annotations

FAILURE = "red"
FAILURE_DARK = "dark-red"
FAILURE_LIGHT = "light-red"
ATTENTION = "orange"
GOOD = "green"
NEUTRAL = "blue"
QUIET = "#6e7079"
"""Neither good nor bad: waiting, cancelled, unknown."""

LEVELS = {"bad": FAILURE, "attention": ATTENTION, "info": NEUTRAL}
SEVERITIES = {"critical": FAILURE, "warning": ATTENTION, "info": NEUTRAL}
# A state says what a run does, not whether it does it well: green is left to a good end.
STATES = {
    "queued": QUIET,
    "preparing": "super-light-blue",
    "training": NEUTRAL,
    "validating": "light-purple",
    "packaging": "dark-blue",
    "completed": GOOD,
    "failed": FAILURE,
    "cancelled": QUIET,
}
PHASES = {
    "prepare": "super-light-blue",
    "data": "yellow",
    "compute": GOOD,
    "evaluate": "light-purple",
    "save": NEUTRAL,
    "package": "dark-blue",
    "stalled": FAILURE,
}

FIRST = NEUTRAL
SECOND = "purple"
THIRD = "yellow"
LIMIT = QUIET
