"""The person at the end: what reached the receiver about a run, and what Prometheus held of it."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

from harness import wait_for

from tunewatch.inbox import Alert
from tunewatch.stack import Stack, fetch


class Pager:
    """What reached the receiver, by run."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def received(self, status: str = "firing", **labels: str) -> list[Alert]:
        """The alerts that came with these labels, oldest first; the last word about each comes last."""
        assert self.stack.inbox is not None, "the stack has ended"
        return [
            alert
            for notification in self.stack.inbox.notifications
            for alert in notification.alerts
            if alert.status == status and labels.items() <= alert.labels.items()
        ]

    def alerts(self, run_id: str, status: str = "firing") -> dict[str, Alert]:
        """What came about a run, by the alert's name."""
        return {alert.name: alert for alert in self.received(status, run_id=run_id)}

    def wait_for_alert(
        self, name: str, status: str = "firing", seconds: float = 90.0, **labels: str
    ) -> Alert:
        """The last word of this alert with these labels, once there is one."""
        return wait_for(
            lambda: self.received(status, alertname=name, **labels)[-1:],
            seconds=seconds,
            what=f"{status} {name} with {labels}",
        )[0]

    def wait(self, run_id: str, name: str, *, status: str = "firing", seconds: float = 90.0) -> Alert:
        return self.wait_for_alert(name, status, seconds, run_id=run_id)

    def query(self, promql: str) -> list[dict[str, Any]]:
        """What Prometheus answers now: of each series `metric` (its labels) and `value`."""
        query = urllib.parse.urlencode({"query": promql})
        answer = json.loads(fetch(f"{self.stack.prometheus_url}/api/v1/query?{query}"))
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def scraped(self, run_id: str) -> bool:
        """Whether Prometheus sees the run."""
        return bool(self.query(f'tunewatch_run_state{{run_id="{run_id}"}}'))

    def ever_fired(self, **labels: str) -> set[tuple[str, str]]:
        """Name and signal ("" where the alert is not about one) of all that fired with these labels, told or not."""
        matchers = ", ".join(f'{name}="{value}"' for name, value in labels.items())
        found = self.query(f'max_over_time(ALERTS{{alertstate="firing", {matchers}}}[1d])')
        return {(series["metric"]["alertname"], series["metric"].get("signal", "")) for series in found}
