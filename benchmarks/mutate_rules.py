"""Breaks each Prometheus rule in small ways and looks whether its promtool cases notice.

    python benchmarks/mutate_rules.py [RULE ...]

Prints the mutants that no case noticed. Exits with 1 when one of them is not in EQUIVALENT, which names the
mutants that behave like the rule itself, with the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROMETHEUS = Path(__file__).resolve().parents[1] / "prometheus"

# (rule, mutation) -> why no case can tell it from the rule.
_FILTERED = "the comparison before `and`/`unless on (...)` has the same effect on each series"
_ONE_SERIES = "the recorded series is already one per run (and reason)"
_SAME_TIME = "the other side sees that state at the same time, and only a later sight counts"
_ALL_ONES = "all that is left after `== 1` is 1, and the alerts aggregate again"
_JOINED = "`and on (job, instance)` restricts the job, too"
_INFO = "an info metric is always 1"
_AGAIN = "the maximum around it takes both together"
_THERE = "only whether it is there counts"
_LIVE = '(state=~"preparing|training|validating|packaging")'
EQUIVALENT: dict[tuple[str, str], str] = {
    ("run_state:tunewatch_run_state:last_seen", "max 1 to min"): _ALL_ONES,
    ("run_state:tunewatch_run_state:last_seen", "max 1 dropped"): _ALL_ONES,
    ("run_state_reason:tunewatch_run_end_info:last_seen", "max 1 to min"): _ALL_ONES,
    ("run_state_reason:tunewatch_run_end_info:last_seen", "max 1 dropped"): _ALL_ONES,
    ("TunewatchRunNonFinite", "max 2 dropped"): _FILTERED,
    ("TunewatchRunStalled", "max 2 dropped"): _FILTERED,
    ("TunewatchResumeLost", "max 2 dropped"): _FILTERED,
    ("TunewatchRunNotLearning", "max 2 dropped"): _FILTERED,
    ("TunewatchRunNeedsAttention", "max 2 dropped"): _FILTERED,
    ("TunewatchNonFiniteIsolated", "max 2 dropped"): _FILTERED,
    ("TunewatchNonFiniteIsolated", "max 3 dropped"): _FILTERED,
    ("TunewatchRunFailed", 'drop matcher 1 (state="failed")'): _SAME_TIME,
    ("TunewatchRunFailed", "max 1 to min"): _ONE_SERIES,
    ("TunewatchRunPreempted", 'drop matcher 1 (state="failed")'): _SAME_TIME,
    ("TunewatchRunPreempted", "max 1 to min"): _ONE_SERIES,
    ("TunewatchRunPreempted", "max 1 dropped"): _ONE_SERIES,
    ("TunewatchRunFinished", 'drop matcher 1 (state="completed")'): _SAME_TIME,
    ("TunewatchRunFinished", 'drop matcher 3 (state="completed")'): "it stands for 0 only",
    ("TunewatchRunFinished", "max 1 to min"): _ONE_SERIES,
    ("TunewatchRunFinished", "max 1 dropped"): _ONE_SERIES,
    ("TunewatchRunVanished", f"drop matcher 1 {_LIVE}"): _SAME_TIME,
    ("TunewatchRunVanished", f"drop matcher 3 {_LIVE}"): "it stands for 0 only",
    ("TunewatchRunVanished", 'drop matcher 4 (job="tunewatch-serve")'): _JOINED,
    ("TunewatchRunVanished", 'drop matcher 6 (job="tunewatch-serve")'): _JOINED,
    ("TunewatchRunVanished", "max 3 dropped"): _FILTERED,
    ("TunewatchGpuLost", "max 6 to min"): "it stands for 0 only",
    ("TunewatchGpuSidecarBlind", "max 2 dropped"): _FILTERED,
    ("TunewatchGpuIdleWhileTraining", "max 1 to min"): _INFO,
    ("TunewatchGpuIdleWhileTraining", "max 3 dropped"): _FILTERED,
    ("TunewatchGpuIdleWhileTraining", "max 4 dropped"): _FILTERED,
    ("TunewatchGpuHang", "max 2 to min"): _INFO,
    ("TunewatchGpuHang", "max 3 dropped"): _FILTERED,
    ("TunewatchGpuHang", "max 10 dropped"): _FILTERED,
    ("TunewatchGpuBusyWithStrangers", "max 1 to min"): _INFO,
    ("TunewatchGpuBusyWithStrangers", "max 3 to min"): _THERE,
    ("TunewatchGpuBusyWithStrangers", "max 3 dropped"): _THERE,
    ("TunewatchGpuMemoryNearEnd", "max 2 to min"): _INFO,
    ("TunewatchGpuMemoryNearEnd", "max 2 dropped"): _AGAIN,
    ("TunewatchGpuMemoryNearEnd", "max 6 to min"): _INFO,
    ("TunewatchGpuReadingsStale", "max 2 dropped"): _FILTERED,
    ("run_reason:tunewatch_badput_seconds:increase24h", "max 1 to min"): _ONE_SERIES,
    ("run:tunewatch_gpu_power_watts:sum", "max 2 to min"): _INFO,
    ("run:tunewatch_gpu_energy_joules_per_token:rate5m", "max 2 to min"): _INFO,
}

_COMPARISON = re.compile(r"(?<![=!~<>{,])\s(==|!=|>=|<=|>|<)\s")
_FLIPPED = {"==": "!=", "!=": "==", ">": "<=", "<": ">=", ">=": "<", "<=": ">"}
_MATCHER = re.compile(r'(?P<label>\w+)(?P<operator>=~|!~|!=|=)"(?P<value>[^"]*)"(?P<separator>,\s*)?')
_NEGATED = {"=": "!=", "!=": "=", "=~": "!~", "!~": "=~"}
_SET_OPERATOR = re.compile(r"^(?P<indent> *)(?P<operator>and|unless|or)\b.*$", re.MULTILINE)
_RANGE = re.compile(r"\[(\d+)([smh])\]")
_AGGREGATION = re.compile(r"\b(max|min|sum|count) (by \([^)]*\))")
_OTHER_AGGREGATION = {"max": "min", "min": "max", "sum": "max", "count": "max"}
_OVER_TIME = re.compile(r"(last|avg|max|min)_over_time(\((?:[^\[\]])*?)\[\w+\]")
# Thresholds and factors. Not in matchers and ranges; a verdict (== 1) has no neighbours, and 0 no fifth.
_NUMBER = re.compile(r""""[^"]*"|\[\w+\]|(?<![=!]=\s)(?<![\w.])(?P<number>[1-9]\d*|0\.\d+)\b""")


_PROGRESS_EVERY = 20


@dataclass(frozen=True)
class Mutant:
    """One rule with one change; `position` is the rule's file, group and place."""

    name: str
    mutation: str
    position: tuple[str, int, int]
    rule: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}: {self.mutation}"


def mutate_expression(expression: str) -> Iterator[tuple[str, str]]:
    """What was changed, and the changed expression. The n-th match of a kind is numbered from 1."""

    def replaced(match: re.Match[str], text: str, group: int | str = 0) -> str:
        return expression[: match.start(group)] + text + expression[match.end(group) :]

    for number, match in enumerate(_COMPARISON.finditer(expression), 1):
        yield f"flip comparison {number} ({match[1]})", replaced(match, _FLIPPED[match[1]], 1)
    for number, match in enumerate(_MATCHER.finditer(expression), 1):
        yield f"drop matcher {number} ({match[0].rstrip(', ')})", replaced(match, "")
        yield (
            f"negate matcher {number} ({match[0].rstrip(', ')})",
            replaced(match, _NEGATED[match["operator"]], "operator"),
        )
        for value in match["value"].split("|") if "|" in match["value"] else ():
            rest = "|".join(other for other in match["value"].split("|") if other != value)
            yield f"drop {value} of matcher {number}", replaced(match, rest, "value")
    for number, match in enumerate(_SET_OPERATOR.finditer(expression), 1):
        end = match.end() + 1
        for line in expression[end:].splitlines(keepends=True):
            if len(line) - len(line.lstrip()) <= len(match["indent"]):
                break
            end += len(line)
        yield f"drop branch {number} ({match['operator']})", expression[: match.start()] + expression[end:]
    for number, match in enumerate(_RANGE.finditer(expression), 1):
        # Just long enough for one sample every 15 s, so that failed scrapes show.
        yield f"range {number} shorter ({match[0]})", replaced(match, f"[{int(match[1]) * 15}s]")
    # Where two sides are compared the shorter range decides: longer ones differ only all together.
    for text in sorted(set(_RANGE.findall(expression))):
        longer = f"[{int(text[0]) * 4}{text[1]}]"
        yield f"ranges longer ([{text[0]}{text[1]}])", expression.replace(f"[{text[0]}{text[1]}]", longer)
    for number, match in enumerate(_AGGREGATION.finditer(expression), 1):
        other = _OTHER_AGGREGATION[match[1]]
        yield f"{match[1]} {number} to {other}", replaced(match, f"{other} {match[2]}")
        yield f"{match[1]} {number} dropped", replaced(match, "")
    for number, match in enumerate(_OVER_TIME.finditer(expression), 1):
        yield f"{match[1]}_over_time {number} dropped", replaced(match, match[2])
    numbers = [match for match in _NUMBER.finditer(expression) if match["number"]]
    for number, match in enumerate(numbers, 1):
        yield f"number {number} raised by 20 % ({match[0]})", replaced(match, f"{float(match[0]) * 1.2:g}")
        yield f"number {number} lowered by 20 % ({match[0]})", replaced(match, f"{float(match[0]) * 0.8:g}")


def mutants(rules: dict[str, Any]) -> Iterator[Mutant]:
    """All mutants of the rule files, given parsed by file name."""
    for file, document in rules.items():
        for group_number, group in enumerate(document["groups"]):
            for rule_number, rule in enumerate(group["rules"]):
                name = rule.get("alert") or rule["record"]
                position = (file, group_number, rule_number)
                if "for" in rule:
                    without = {key: value for key, value in rule.items() if key != "for"}
                    yield Mutant(name, "drop for", position, without)
                    yield Mutant(name, "for 15s longer", position, {**rule, "for": _longer(rule["for"])})
                for mutation, expression in mutate_expression(rule["expr"]):
                    yield Mutant(name, mutation, position, {**rule, "expr": expression})


def _longer(duration: str) -> str:
    return f"{duration}15s"  # whole minutes in the shipped files: 2m15s


def is_noticed(mutant: Mutant, rules: dict[str, Any], promtool: str) -> bool:
    """Whether a promtool case that concerns the rule fails (a rule that does not load fails, too)."""
    file, group_number, rule_number = mutant.position
    group = rules[file]["groups"][group_number]
    changed_rules = [mutant.rule if n == rule_number else rule for n, rule in enumerate(group["rules"])]
    changed_groups = [
        {**other, "rules": changed_rules} if n == group_number else other
        for n, other in enumerate(rules[file]["groups"])
    ]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(PROMETHEUS / "rules", work / "rules")
        shutil.copytree(PROMETHEUS / "tests", work / "tests")
        (work / "rules" / file).write_text(yaml.safe_dump({"groups": changed_groups}), encoding="utf-8")
        for path in _tests_of(mutant.name, file, work / "tests"):
            run = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, check=False)
            if run.returncode != 0:
                return True
    return False


def _tests_of(name: str, file: str, folder: Path) -> list[Path]:
    """The test files that load the rule file and name the rule; for what alerts are built on, all of them."""
    loading = [path for path in sorted(folder.glob("*.yml")) if file in path.read_text(encoding="utf-8")]
    naming = [path for path in loading if name in path.read_text(encoding="utf-8")]
    return naming or loading


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rule", nargs="*", help="only these alerts or recording rules")
    chosen = parser.parse_args().rule
    promtool = shutil.which("promtool")
    if promtool is None:
        parser.error("promtool is not on PATH")
    rules = {
        path.name: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted((PROMETHEUS / "rules").glob("*.yml"))
    }
    todo = [mutant for mutant in mutants(rules) if not chosen or mutant.name in chosen]

    survivors = unexplained = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        noticed = pool.map(lambda mutant: is_noticed(mutant, rules, promtool), todo)
        for number, (mutant, was_noticed) in enumerate(zip(todo, noticed, strict=True), 1):
            if not was_noticed:
                reason = EQUIVALENT.get((mutant.name, mutant.mutation))
                survivors += 1
                unexplained += reason is None
                print(f"  {mutant}  [{reason or 'NOT NOTICED'}]", flush=True)
            if number % _PROGRESS_EVERY == 0:
                print(f"{number} of {len(todo)} mutants tried", file=sys.stderr, flush=True)
    print(f"{len(todo)} mutants, {survivors} survived, {unexplained} of them unexplained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
