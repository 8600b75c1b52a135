"""`tunewatch doctor`: would an alert about a run of mine reach me? Every link of the chain is tried.

The chain: a run's endpoint is scraped, the shipped rules are loaded, Prometheus' alerts arrive at
Alertmanager, and a test alert that takes the route of a run's critical alert is delivered. The last line says
yes or no.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.text import Text

from tunewatch.inbox import read_notifications
from tunewatch.rules import render_rules
from tunewatch.stack import ALERTMANAGER_PORT, PROMETHEUS_PORT, StackInfo, fetch, running_stack

TEST_ALERT = "TunewatchTest"
VERDICT = "Will it wake me?"
_WATCHDOG = "TunewatchWatchdog"
_POLL = 0.5
# Prometheus bundles changes of its targets and Alertmanagers for 5 s; a first scrape takes an interval more.
_SETTLE_SECONDS = 25.0
_CLOCK_TOLERANCE_SECONDS = 30.0  # as TunewatchClockSkew
_FAILURES_THAT_SETTLE_IT = 3
# The test alert ends by itself, should the doctor be killed before it ends it.
_TEST_ALERT_MARGIN = timedelta(minutes=2)

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One link of the chain. `ok` is None when it could not be judged; `advice` says what to do then."""

    name: str
    ok: bool | None
    message: str
    advice: str = ""


class _NoAnswer(Exception):
    """A server does not answer, or not as Prometheus or Alertmanager would."""


def diagnose(
    home: Path,
    prometheus_url: str | None = None,
    alertmanager_url: str | None = None,
    *,
    send_test_alert: bool = True,
    timeout: float = 120.0,
) -> list[Check]:
    """Tries the chain for the runs under `home` and returns one check per link, the verdict last.

    The addresses default to those of the stack running for `home`, then to the Alertmanager that Prometheus
    itself names, then to the usual local ports. `timeout` (seconds) bounds the wait for each alert; it must
    exceed a minute (Prometheus repeats an alert that often) and the route's group_wait.
    """
    stack = running_stack(home)
    prometheus = _base(prometheus_url or (stack and stack.prometheus_url) or _local(PROMETHEUS_PORT))
    settle = min(timeout, _SETTLE_SECONDS)
    checks = [_judge("Prometheus", lambda: _check_prometheus(prometheus))]
    known: list[str] = []
    if checks[0].ok:
        checks += [
            _judge("Scrape targets", lambda: _check_targets(prometheus, home / "targets", settle)),
            _judge("Alert rules", lambda: _check_rules(prometheus, settle)),
            _judge("Clocks", lambda: _check_clocks(prometheus)),
        ]
        with_alertmanager = _judge(
            "Prometheus' Alertmanager", lambda: _check_known(prometheus, known, settle)
        )
        checks.append(with_alertmanager)
    alertmanager = _base(
        alertmanager_url
        or (stack.alertmanager_url if stack and prometheus == stack.prometheus_url else None)
        or next(iter(known), _local(ALERTMANAGER_PORT))
    )
    checks.append(_judge("Alertmanager", lambda: _check_alertmanager(alertmanager)))
    if checks[-1].ok:
        if checks[0].ok:
            checks.append(_judge("Alerts arrive", lambda: _check_watchdog(alertmanager, timeout)))
        if send_test_alert:
            ours = stack if stack and stack.alertmanager_url == alertmanager else None
            checks.append(_judge("Test alert", lambda: _check_delivery(alertmanager, home, ours, timeout)))
    to_inbox = (
        stack is not None and stack.alertmanager_url == alertmanager and stack.notifications_file is not None
    )
    return [*checks, _verdict(checks, tried=send_test_alert, to_inbox=to_inbox)]


def exit_code(checks: Iterable[Check]) -> int:
    """0 when no check failed (those that could not be judged do not fail), else 1."""
    return 1 if any(check.ok is False for check in checks) else 0


def print_report(checks: Iterable[Check], console: Console) -> None:
    """One line a check, and beneath a fault what to do about it."""
    for check in checks:
        mark, style = {True: ("ok", "green"), False: ("FAIL", "bold red"), None: ("-", "yellow")}[check.ok]
        console.print(
            Text.assemble(
                (f"{mark:<5}", style),
                (f"{check.name}{'' if check.name.endswith('?') else ':'} ", "bold"),
                check.message,
            ),
            soft_wrap=True,
        )
        if check.advice:
            console.print(Text(f"     {check.advice}", style="dim"), soft_wrap=True)


def _judge(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except _NoAnswer as error:
        return Check(name, False, str(error), "Start it (`tunewatch stack`), or name its address.")


def _verdict(checks: Iterable[Check], *, tried: bool, to_inbox: bool) -> Check:
    faults = [check.name for check in checks if check.ok is False]
    if faults:
        return Check(VERDICT, False, f"No. Not in order: {', '.join(faults)}.")
    if not tried:
        return Check(VERDICT, None, "Not proven: no test alert was sent.")
    if to_inbox:
        return Check(
            VERDICT,
            True,
            "Only while you look: alerts get through to the inbox of `tunewatch stack`, which shows them.",
            "To be called, give the stack a receiver of yours.",
        )
    return Check(VERDICT, True, "Yes: an alert about a run gets through to your receiver.")


def _check_prometheus(url: str) -> Check:
    version = _data(f"{url}/api/v1/status/buildinfo")["version"]
    return Check("Prometheus", True, f"version {version} answers at {url}")


def _check_targets(prometheus: str, folder: Path, settle: float) -> Check:
    name = "Scrape targets"
    expected = _announced_targets(folder)
    if not expected:
        return Check(
            name, None, f"nothing is announced in {folder}: no run is live", "Start a run to try it."
        )

    def look() -> dict[str, tuple[str, str]]:
        active = _data(f"{prometheus}/api/v1/targets?state=active")["activeTargets"]
        seen = {t["discoveredLabels"].get("__address__"): (t["health"], t["lastError"]) for t in active}
        return {address: seen.get(address, ("missing", "")) for address in expected}

    # One failed scrape is no fault yet: the alerts, too, wait for a second one.
    states = _wait(look, lambda found: all(health == "up" for health, _ in found.values()), settle)
    faults = []
    for address, (health, error) in states.items():
        if health == "down":
            faults.append(f"{address} is down: {error}")
        elif health == "missing":
            faults.append(f"{address} ({expected[address]}) is not known to Prometheus")
        elif health != "up":
            faults.append(f"{address} was not scraped within {settle:.0f} s")
    if faults:
        return Check(
            name,
            False,
            "; ".join(faults),
            f"Prometheus must read {folder}/*.json by file_sd and reach these addresses.",
        )
    return Check(name, True, f"all {len(states)} announced in {folder} are scraped")


def _announced_targets(folder: Path) -> dict[str, str]:
    """Address to the file that announces it."""
    announced = {}
    for file in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        try:
            groups = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:  # its run has just ended
            continue
        announced.update({address: file.name for group in groups for address in group["targets"]})
    return announced


def _check_rules(prometheus: str, settle: float) -> Check:
    name = "Alert rules"
    shipped = _shipped_alerts()

    def look() -> dict[str, tuple[str, str]]:
        groups = _data(f"{prometheus}/api/v1/rules?type=alert")["groups"]
        loaded = {r["name"]: (r["health"], r.get("lastError", "")) for g in groups for r in g["rules"]}
        return {alert: loaded[alert] for alert in shipped if alert in loaded}

    loaded = _wait(look, lambda found: all(health != "unknown" for health, _ in found.values()), settle)
    missing = [alert for alert in shipped if alert not in loaded]
    if missing:
        return Check(
            name,
            False,
            f"{len(missing)} of {len(shipped)} shipped alerts are not loaded: {_some(missing)}",
            "Load the shipped rule files (rule_files in prometheus.yml) and reload Prometheus.",
        )
    faults = [f"{alert}: {error or health}" for alert, (health, error) in loaded.items() if health != "ok"]
    if faults:
        return Check(name, False, f"not evaluated: {'; '.join(faults)}", "See Prometheus' log.")
    return Check(name, True, f"all {len(shipped)} shipped alerts are loaded and evaluated")


def _shipped_alerts() -> list[str]:
    texts = render_rules().values()
    groups = [group for text in texts for group in yaml.safe_load(text)["groups"]]
    return [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]


def _check_clocks(prometheus: str) -> Check:
    name = "Clocks"
    before = time.time()
    theirs = float(_query(prometheus, "vector(time())")[0]["value"][1])
    after = time.time()
    skews = {"this machine": max(before - theirs, theirs - after, 0.0)}
    for series in _query(prometheus, "abs(tunewatch_time_seconds - timestamp(tunewatch_time_seconds))"):
        skews[series["metric"].get("instance", "?")] = float(series["value"][1])
    worst = max(skews, key=lambda place: skews[place])
    message = f"{worst} and Prometheus differ by {skews[worst]:.1f} s"
    if skews[worst] > _CLOCK_TOLERANCE_SECONDS:
        return Check(name, False, message, "Synchronise the clocks (chrony, systemd-timesyncd).")
    return Check(name, True, f"{message} at most")


def _check_known(prometheus: str, known: list[str], settle: float) -> Check:
    """Also puts the addresses of the Alertmanagers into `known`."""
    name = "Prometheus' Alertmanager"

    def look() -> list[str]:
        active = _data(f"{prometheus}/api/v1/alertmanagers")["activeAlertmanagers"]
        return [re.sub(r"/api/v\d/alerts$", "", entry["url"]) for entry in active]

    known += _wait(look, bool, settle)
    if not known:
        return Check(
            name, False, "Prometheus knows no Alertmanager", "Add it under `alerting:` in prometheus.yml."
        )
    return Check(name, True, f"Prometheus sends alerts to {', '.join(known)}")


def _check_alertmanager(url: str) -> Check:
    version = _json(f"{url}/api/v2/status")["versionInfo"]["version"]
    return Check("Alertmanager", True, f"version {version} answers at {url}")


def _check_watchdog(alertmanager: str, timeout: float) -> Check:
    """The shipped watchdog always fires: when it is at Alertmanager, Prometheus' alerts do arrive there."""
    name = "Alerts arrive"
    if _wait(lambda: _alerts(alertmanager, f'alertname="{_WATCHDOG}"'), bool, timeout):
        return Check(name, True, f"{_WATCHDOG}, which always fires, is at Alertmanager")
    return Check(
        name,
        False,
        f"{_WATCHDOG}, which always fires, did not come to {alertmanager} within {timeout:.0f} s",
        "Is this the Alertmanager that Prometheus sends to? Are the shipped rules loaded?",
    )


def _check_delivery(alertmanager: str, home: Path, ours: StackInfo | None, timeout: float) -> Check:
    """Sends the test alert, watches for its delivery and ends it again."""
    run_id = f"doctor-{secrets.token_hex(4)}"
    # The labels a run's critical alert carries, and no others: they choose the route.
    labels = {"alertname": TEST_ALERT, "severity": "critical", "run_id": run_id}
    begin = datetime.now(UTC)
    before = _Sent.read(alertmanager)
    _post_alert(alertmanager, labels, begin, begin + timedelta(seconds=timeout) + _TEST_ALERT_MARGIN)
    try:
        if ours and ours.notifications_file:
            return _delivered_to_inbox(alertmanager, run_id, ours.notifications_file, timeout)
        return _delivered_by_counters(alertmanager, run_id, before, home, ours, timeout)
    finally:
        _post_alert(alertmanager, labels, begin, datetime.now(UTC))


def _delivered_to_inbox(alertmanager: str, run_id: str, file: Path, timeout: float) -> Check:
    begin = time.monotonic()

    def look() -> tuple[bool, str | None]:
        arrived = any(
            alert.labels.get("run_id") == run_id
            for notification in read_notifications(file)
            for alert in notification.alerts
        )
        return arrived, _suppression(alertmanager, run_id)

    arrived, suppressed = _wait(look, any, timeout)
    if arrived:
        return Check(
            "Test alert",
            True,
            f"A test alert reached the inbox of `tunewatch stack` after {time.monotonic() - begin:.0f} s "
            f"(proof: it is in {file}).",
        )
    return _undelivered(suppressed or f"it was not in {file} within {timeout:.0f} s")


def _delivered_by_counters(
    alertmanager: str,
    run_id: str,
    before: Mapping[str, _Sent],
    home: Path,
    ours: StackInfo | None,
    timeout: float,
) -> Check:
    def look() -> tuple[_Sent, str | None]:
        # A heartbeat that is delivered elsewhere is no proof: only the alert's own ways count.
        ways = _integrations(alertmanager, run_id)
        sent = {way: now.since(before[way]) for way, now in _Sent.read(alertmanager).items() if way in ways}
        total = _Sent(sum(one.delivered for one in sent.values()), sum(one.failed for one in sent.values()))
        return total, _suppression(alertmanager, run_id)

    def settled(state: tuple[_Sent, str | None]) -> bool:
        sent, suppressed = state
        return sent.delivered > 0 or sent.failed >= _FAILURES_THAT_SETTLE_IT or suppressed is not None

    sent, suppressed = _wait(look, settled, timeout)
    if suppressed:
        return _undelivered(suppressed)
    if sent.delivered > 0:
        receivers = ", ".join(
            r["name"] for a in _alerts(alertmanager, f'run_id="{run_id}"') for r in a["receivers"]
        )
        return Check(
            "Test alert",
            True,
            f"A test alert was accepted by the receiver {receivers or '(already ended)'} (proof: "
            "Alertmanager's counter of delivered notifications rose; it does not tell which alert it was).",
        )
    if sent.failed > 0:
        reason = _logged_reason(home / "stack" / "alertmanager.log") if ours else "see Alertmanager's log"
        return _undelivered(f"the receiver refused {sent.failed:.0f} attempts ({reason})")
    return _undelivered(f"Alertmanager sent nothing within {timeout:.0f} s")


def _undelivered(reason: str) -> Check:
    return Check(
        "Test alert",
        False,
        f"A test alert was not delivered: {reason}",
        "Check the receiver's address and Alertmanager's routes, silences and log.",
    )


@dataclass(frozen=True)
class _Sent:
    """Alertmanager's counters of single attempts: those of whole notifications count a failure only after
    every retry has failed, which takes minutes."""

    delivered: float
    failed: float

    @classmethod
    def read(cls, alertmanager: str) -> dict[str, _Sent]:
        """By integration: webhook, slack, email, ... Alertmanager shows each it knows from its start on."""
        text = _fetch(f"{alertmanager}/metrics").decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        attempts, failed = (
            {sample.labels["integration"]: sample.value for sample in samples if sample.name == name}
            for name in (
                "alertmanager_notification_requests_total",
                "alertmanager_notification_requests_failed_total",
            )
        )
        return {way: cls(delivered=attempts[way] - failed[way], failed=failed[way]) for way in attempts}

    def since(self, before: _Sent) -> _Sent:
        return _Sent(self.delivered - before.delivered, self.failed - before.failed)


def _integrations(alertmanager: str, run_id: str) -> set[str]:
    """The ways (webhook, slack, email, ...) on which the test alert's receivers tell of it, by the configuration."""
    names = {
        one["name"] for alert in _alerts(alertmanager, f'run_id="{run_id}"') for one in alert["receivers"]
    }
    config = yaml.safe_load(_json(f"{alertmanager}/api/v2/status")["config"]["original"])
    return {
        key.removesuffix("_configs")
        for receiver in config["receivers"]
        if receiver["name"] in names
        for key in receiver
        if key != "name"
    }


def _suppression(alertmanager: str, run_id: str) -> str | None:
    """Why Alertmanager keeps the test alert to itself; None when it does not."""
    for alert in _alerts(alertmanager, f'run_id="{run_id}"'):
        if silences := alert["status"]["silencedBy"]:
            return f"a silence swallows it ({', '.join(silences)})"
        if alert["status"]["inhibitedBy"]:
            return "another alert inhibits it"
    return None


def _logged_reason(log: Path) -> str:
    """The last error of the stack's own Alertmanager."""
    errors = re.findall(r'\berr="((?:[^"\\]|\\.)*)"', log.read_text(encoding="utf-8", errors="replace"))
    return errors[-1][:300] if errors else f"see {log}"


def _post_alert(alertmanager: str, labels: Mapping[str, str], begin: datetime, end: datetime) -> None:
    alert = {
        "labels": labels,
        "annotations": {
            "summary": "A test by `tunewatch doctor`: nothing is wrong.",
            "description": "You see this because an alert about a training run would reach you, too.",
        },
        "startsAt": begin.isoformat(),
        "endsAt": end.isoformat(),
    }
    _fetch(f"{alertmanager}/api/v2/alerts", body=json.dumps([alert]).encode())


def _alerts(alertmanager: str, matcher: str) -> list[dict[str, Any]]:
    alerts: list[dict[str, Any]] = _json(
        f"{alertmanager}/api/v2/alerts?{urllib.parse.urlencode({'filter': matcher})}"
    )
    return alerts


def _query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    answer = _data(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    series: list[dict[str, Any]] = answer["result"]
    return series


def _data(url: str) -> dict[str, Any]:
    """The `data` of an answer of Prometheus' API."""
    answer = _json(url)
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
        raise _NoAnswer(f"{url} does not answer like Prometheus")
    data: dict[str, Any] = answer["data"]
    return data


def _json(url: str) -> Any:
    try:
        return json.loads(_fetch(url))
    except ValueError:
        raise _NoAnswer(f"{url} does not answer in JSON: another program listens there") from None


def _fetch(url: str, body: bytes | None = None) -> bytes:
    try:
        return fetch(url, body=body)
    except urllib.error.HTTPError as error:
        raise _NoAnswer(f"{url} answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _NoAnswer(f"{url} does not answer: {error.reason}") from error
    except OSError as error:
        raise _NoAnswer(f"{url} does not answer: {error}") from error


def _wait(look: Callable[[], T], done: Callable[[T], bool], timeout: float) -> T:
    """What `look` sees once it is `done`, or at the end of `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        seen = look()
        if done(seen) or time.monotonic() > deadline:
            return seen
        time.sleep(_POLL)


def _base(url: str) -> str:
    return url.rstrip("/")


def _local(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _some(names: list[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
