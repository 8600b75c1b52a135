"""How long an ended run is still served: until its end has been seen."""

from __future__ import annotations

from dataclasses import dataclass

from tunewatch.states import COMPLETED
from tunewatch.supervisor.endpoint import Scrapes

LONGEST = 300.0
UNSEEN_FAILURE = 60.0


@dataclass(frozen=True)
class Linger:
    """Decides when an endpoint may close. `state` is the run's terminal state, `ended` its monotonic time.

    Every known scraper gets the terminal state twice (one scrape may be lost), or three of its intervals to
    fetch it; five minutes at most. Nobody ever scraped: a completed run leaves at once, any other waits a minute
    for somebody to come.
    """

    state: str
    ended: float

    def over(self, now: float, scrapes: Scrapes) -> bool:
        waited = now - self.ended
        if waited >= LONGEST:
            return True
        if not scrapes.any:
            return self.state == COMPLETED or waited >= UNSEEN_FAILURE
        if scrapes.all_saw_the_end():
            return True
        interval = scrapes.interval
        return interval is not None and waited >= 3 * interval and waited >= 2.0
