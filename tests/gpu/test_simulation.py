"""Scenarios of simulated GPUs: what a file means, what is wrong with it, and what a sidecar makes of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from gpu_harness import COMMAND, RunningSidecar, Scrape

from tunewatch_gpu.scenario import ScenarioError, ScenarioFile, parse
from tunewatch_gpu.simulated import SimulatedSource, simulated_uuid
from tunewatch_gpu.snapshot import Request

Start = Callable[..., RunningSidecar]

ROOT = Path(__file__).resolve().parents[2]


def put(path: Path, text: str) -> None:
    """Replace a file in one step, as an editor does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_what_holds_when() -> None:
    scenario = parse(
        """
        events:
          - {at: 10, for: 20, card: 0, lost: true}
          - {at: 10, temperature: 93}
          - {at: 40, card: 1, temperature: 70, power: 90, utilization: 0.5}
          - {at: 5, card: 1, ecc: {corrected: 3, uncorrected: 1}}
          - {at: 50, card: 1, for: 1, ecc: {corrected: 2}}
          - {card: 1, recovery_action: drain_p2p, run_memory: {mine: 30, "": 2.5}}
        """,
        cards=2,
    )
    assert [scenario.state(0, now).lost for now in (9.9, 10, 29.9, 30)] == [False, True, True, False]
    assert not scenario.state(1, 15).lost
    assert [scenario.state(1, now).temperature for now in (0, 10, 40)] == [None, 93, 70]
    assert scenario.state(0, 40).temperature == 93
    assert (scenario.state(1, 41).power, scenario.state(1, 41).utilization) == (90, 0.5)
    assert scenario.state(1, 4).ecc == {}
    assert scenario.state(1, 6).ecc == {"corrected": 3, "uncorrected": 1}
    assert scenario.state(1, 60).ecc == {"corrected": 5, "uncorrected": 1}, "what happened stays"
    assert scenario.state(1, 0).recovery_action == "drain_p2p"
    assert scenario.state(1, 0).run_memory == {"mine": 30, "": 2.5}
    assert scenario.state(0, 0).recovery_action == "none"


def test_throttled_seconds_are_the_share_of_the_time() -> None:
    scenario = parse(
        """
        events:
          - {at: 10, for: 100, throttle: {sw_power_cap: 0.4, hw_slowdown: 1}}
          - {at: 60, for: 10, throttle: {sw_power_cap: 1}}
        """,
        cards=1,
    )
    assert scenario.state(0, 10).throttled == {}
    assert scenario.state(0, 30).throttled == pytest.approx({"sw_power_cap": 8, "hw_slowdown": 20})
    # 50 s of the first, 10 s of the second in its place, 40 s of the first again.
    assert scenario.state(0, 500).throttled == pytest.approx({"sw_power_cap": 46, "hw_slowdown": 90})
    assert scenario.state(0, 65).throttle == {"sw_power_cap": 1}
    assert scenario.state(0, 200).throttle == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("events: [", "line 1: this is no YAML: "),
        ("", "a scenario is `events:` and a list below it, nothing else"),
        ("event: []", "a scenario is `events:` and a list below it"),
        ("events: {}", "a scenario is `events:` and a list below it"),
        ("events: [lost]", "event 1: 'lost' is no mapping such as {at: 60, card: 0, lost: true}"),
        ("events: [{lost: true}, {throttel: 1}]", "event 2: 'throttel' is not known; allowed are at, for, card, lost"),
        ("events: [{at: 5, card: 0}]", "event 1: nothing happens in it; give one of lost, reset_required, xid"),
        ("events: [{card: 2, lost: true}]", "event 1: card is 2; a whole number from 0 to 1 is allowed"),
        ("events: [{at: -1, lost: true}]", "event 1: at is -1; a number from 0 to inf is allowed"),
        ("events: [{at: true, lost: true}]", "event 1: at is True; a number from 0"),
        ("events: [{at: .nan, lost: true}]", "event 1: at is nan; a number from 0"),
        ("events: [{lost: 1}]", "event 1: lost is 1; true and false are allowed"),
        ("events: [{xid: 1000}]", "event 1: xid is 1000; a whole number from 1 to 999 is allowed"),
        ("events: [{temperature: hot}]", "event 1: temperature is 'hot'; a number from 1 to 150 is allowed"),
        ("events: [{throttle: heat}]", "event 1: throttle is 'heat'; a mapping of applications_clocks_setting,"),
        ("events: [{throttle: {gpu_idle: 1}}]", "event 1: throttle has 'gpu_idle'; allowed are app"),
        ("events: [{throttle: {sync_boost: 2}}]", "event 1: throttle of 'sync_boost' is 2; a number from 0 to 1"),
        ("events: [{recovery_action: pray}]", "event 1: recovery_action is 'pray'; allowed are none, reset,"),
        ("events: [{run_memory: {'a b': 1}}]", "event 1: run_memory has 'a b'; allowed are run ids"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(complaint)):
        parse(text, cards=2)


@pytest.mark.parametrize(
    ("content", "arguments", "complaint"),
    [
        (b"events: [{lost: 1}]", (), "f.yml: event 1: lost is 1"),
        (b"\xff", (), "f.yml: is no UTF-8 text"),
        (None, (), "f.yml: can not be read: No such file or directory"),
        (b"events: []", ("--backend", "nvml"), "--scenario is for simulated GPUs only; the backend is nvml"),
    ],
)
def test_a_wrong_scenario_is_an_error_at_the_start(
    tmp_path: Path, content: bytes | None, arguments: tuple[str, ...], complaint: str
) -> None:
    path = tmp_path / "f.yml"
    if content is not None:
        path.write_bytes(content)
    command = [*COMMAND, "--backend", "simulated", "--scenario", str(path), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 2
    assert complaint in ended.stderr


def test_examples_of_the_page_are_scenarios() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "simulation.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    assert all(parse(example, cards=2).events for example in examples)


def test_each_key_is_in_the_page() -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    with pytest.raises(ScenarioError) as refused:
        parse(yaml.safe_dump({"events": [{"?": 1}]}), cards=1)
    keys = str(refused.value).partition("allowed are ")[2].split(", ")
    assert len(keys) == 13
    assert set(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == set(keys)


class Cards:
    """A simulated source with a clock that is set by hand, and what it has told."""

    def __init__(self, path: Path, began: float) -> None:
        self.now = began
        self.told: list[tuple[str, str, int, float]] = []
        self._source = SimulatedSource(
            lambda *_: None,
            lambda *told: self.told.append(told),
            2,
            clock=lambda: self.now,
            scenario=ScenarioFile(path, 2, began),
        )

    def read(self, after: float | None) -> list[int]:
        """The codes that one collection tells, the last good one having been at `after`."""
        before = len(self.told)
        self._source.read(Request(1.0, after=after))
        return [code for _, _, code, _ in self.told[before:]]


def test_each_error_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "f.yml"
    path.write_text("events: [{card: 0, xid: 31}, {at: 60, card: 1, xid: 79}, {at: 60, xid: 48}]")
    os.utime(path, (1e9, 1e9))  # older than the sidecar: its start is second 0
    began = 2e9
    cards = Cards(path, began)
    assert cards.read(None) == [31]
    cards.now = began + 59
    assert cards.read(began) == []
    cards.now = began + 61
    assert cards.read(began + 59) == [79, 48, 48]
    assert cards.told[1] == ("simulated", simulated_uuid(1), 79, began + 60)
    assert cards.read(began + 61) == []

    # A reader that was started anew tells what its predecessor did not live to tell.
    successor = Cards(path, began)
    successor.now = began + 61
    assert successor.read(began + 59) == [79, 48, 48]
    heir = Cards(path, began)
    heir.now = began + 70
    assert heir.read(began + 61) == []

    # Changed: its clock starts anew with the change.
    path.write_text("events: [{at: 5, card: 0, xid: 13}]")
    os.utime(path, (began + 100, began + 100))
    cards.now = began + 104
    assert cards.read(began + 103) == []
    cards.now = began + 106
    assert cards.read(began + 104) == [13]


def test_a_rehearsal(start_sidecar: Start, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yml"
    put(
        path,
        """events:
        - {card: 0, xid: 79, lost: true}
        - {card: 1, throttle: {sw_power_cap: 1}, temperature: 93, ecc: {uncorrected: 2},
           run_memory: {mine: 30, "": 4}}
        """,
    )
    sidecar = start_sidecar({}, "--backend", "simulated", "--interval", "0.2", "--scenario", str(path))
    lost, hot = simulated_uuid(0), simulated_uuid(1)
    scrape = sidecar.wait_success()
    assert scrape.value("up", uuid=lost) == 0
    assert scrape.readings(lost) == {"xid_errors_total", "xid_last_timestamp_seconds"}
    assert scrape.value("xid_errors_total", uuid=lost, xid="79") == 1
    assert scrape.value("temperature_celsius", uuid=hot, sensor="gpu") == 93
    assert scrape.value("ecc_errors_total", uuid=hot, kind="uncorrected") == 2
    assert scrape.value("throttle_active", uuid=hot, reason="sw_power_cap") == 1
    assert scrape.value("run_memory_bytes", uuid=hot, run_id="mine") == 30 * 2**30
    assert scrape.value("run_memory_bytes", uuid=hot, run_id="") == 4 * 2**30
    assert scrape.value("memory_used_bytes", uuid=hot) == 34 * 2**30

    def throttled(scrape: Scrape) -> float:
        return scrape.value("throttle_seconds_total", uuid=hot, reason="sw_power_cap") or 0.0

    sidecar.wait(lambda scrape: throttled(scrape) > 1)
    sidecar.reader().send_signal(signal.SIGKILL)
    sidecar.wait(lambda scrape: scrape.value("reader_restarts_total") == 1)
    scrape = sidecar.wait_success()
    assert scrape.value("xid_errors_total", uuid=lost, xid="79") == 1, "not told again by the next reader"

    put(path, "events: [{card: 7, lost: true}]")
    sidecar.wait(lambda _: "event 1: card is 7" in sidecar.log())
    assert sidecar.scrape().value("up", uuid=lost) == 0, "the scenario before it stays in force"
    put(path, "events: [{card: 1, reset_required: true}]")
    scrape = sidecar.wait(lambda scrape: scrape.value("up", uuid=lost) == 1)
    assert scrape.value("up", uuid=hot) == 0
    assert scrape.value("recovery_action", uuid=hot, action="reset") == 1
    assert scrape.value("recovery_action", uuid=lost, action="none") == 1
    assert scrape.value("xid_errors_total", uuid=lost, xid="79") == 1
