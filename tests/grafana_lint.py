"""Checks a provisioned Grafana dashboard without a Grafana: its shape, its queries, what a person reads.

The rules are those of Grafana's dashboard-linter as far as they fit a file that is provisioned, and some of our own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import promql_parser as promql
from grafana_foundation_sdk.models import units

Json = Mapping[str, Any]

UNITS = {get_args(literal)[0] for literal in units.__annotations__.values()}
UNIT_PREFIXES = ("suffix:", "prefix:", "time:")
PANEL_TYPES = {"row", "stat", "timeseries", "state-timeline", "heatmap", "table"}
BUILT_IN = {"__rate_interval", "__range", "__interval"}
OVER_COUNTERS = {"rate", "irate", "increase", "resets", "changes"}
GRID_WIDTH = 24


@dataclass(frozen=True)
class Query:
    """One PromQL expression of a dashboard; `where` names its place for a person."""

    where: str
    expr: str
    instant: bool
    panel_id: int | None = None


@dataclass(frozen=True)
class Selector:
    """A series selector within an expression: `inside` are the functions and aggregations around it."""

    metric: str
    inside: tuple[str, ...]


def panels(board: Json) -> Iterator[Json]:
    """All panels, those inside folded rows too."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def panel_queries(board: Json) -> Iterator[Query]:
    for panel in panels(board):
        for target in panel.get("targets") or ():
            where = f"panel {panel['title']!r} {target['refId']}"
            yield Query(where, target["expr"], bool(target.get("instant")), panel["id"])


def annotation_queries(board: Json) -> Iterator[Query]:
    for annotation in board["annotations"]["list"]:
        yield Query(f"annotation {annotation['name']!r}", annotation["expr"], instant=False)


def variable_queries(board: Json) -> Iterator[Query]:
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"query_result\((.+)\)", variable["query"])
            assert found, f"variable {variable['name']} is no query_result()"
            yield Query(f"variable {variable['name']!r}", found[1], instant=True)


def queries(board: Json) -> list[Query]:
    return [*panel_queries(board), *annotation_queries(board), *variable_queries(board)]


def variables_in(expr: str) -> set[str]:
    """Names of the Grafana variables in an expression ($1 of a label_replace is none)."""
    return {a or b for a, b in re.findall(r"\$(?:\{([a-z_]\w*)[^}]*\}|([a-z_]\w*))", expr)}


def expand(expr: str, values: Mapping[str, str]) -> str:
    """Replace the variables as Grafana does; a KeyError names an unknown one."""
    return re.sub(r"\$(?:\{([a-z_]\w*)[^}]*\}|([a-z_]\w*))", lambda found: values[found[1] or found[2]], expr)


def selectors(expr: str) -> list[Selector]:
    """All selectors of an expression without variables; a ValueError says why it is not PromQL."""
    return list(_selectors(promql.parse(expr), ()))


def _selectors(node: Any, inside: tuple[str, ...]) -> Iterator[Selector]:
    match node:
        case promql.VectorSelector():
            yield Selector(node.name or "", inside)
        case promql.MatrixSelector():
            yield from _selectors(node.vector_selector, inside)
        case promql.Call():
            for argument in node.args:
                yield from _selectors(argument, (*inside, node.func.name))
        case promql.AggregateExpr():
            yield from _selectors(node.expr, (*inside, "aggregation"))
        case promql.BinaryExpr():
            yield from _selectors(node.lhs, inside)
            yield from _selectors(node.rhs, inside)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from _selectors(node.expr, inside)
        case promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            raise TypeError(f"{type(node).__name__} in an expression: teach the walk about it")


def lint(board: Json) -> list[str]:
    """What is wrong with a dashboard, one sentence each."""
    return [*_shape(board), *_grid(board), *_readable(board), *_promql(board)]


def _shape(board: Json) -> Iterator[str]:
    for key in ("__inputs", "__requires", "__elements", "dashboard"):
        if key in board:
            yield f"{key} is only for the import dialog or the HTTP API"
    if board.get("id") is not None:
        yield "id must be absent: it belongs to one database"
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", board.get("uid") or ""):
        yield "uid is missing or not a stable name"
    if board.get("editable") is not False:
        yield "editable must be false: what a person saves would be overwritten"
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    if variables.get("datasource", {}).get("type") != "datasource":
        yield "no variable `datasource` of type datasource"
    for name, variable in variables.items():
        if variable["type"] == "query" and variable.get("refresh") != 2:
            yield f"variable {name} must refresh when the time range changes"
    for thing in [*board["annotations"]["list"], *variables.values(), *panels(board)]:
        if thing.get("type") in ("row", "datasource"):
            continue
        places = [thing, *(thing.get("targets") or ())]
        if any((place.get("datasource") or {}).get("uid") != "${datasource}" for place in places):
            yield f"{thing.get('title') or thing['name']!r}: datasource is not the variable"


def _grid(board: Json) -> Iterator[str]:
    ids: dict[int, str] = {}
    placed: list[tuple[Json, str]] = []
    for panel in panels(board):
        title, box = panel["title"], panel["gridPos"]
        if not panel.get("id"):
            yield f"panel {title!r} has no id"
        elif panel["id"] in ids:
            yield f"panel {title!r} has the id of {ids[panel['id']]!r}"
        ids[panel.get("id", 0)] = title
        if box.get("x", 0) + box["w"] > GRID_WIDTH:
            yield f"panel {title!r} is wider than the grid"
        for other, other_title in placed:
            if _overlap(box, other):
                yield f"panel {title!r} overlaps {other_title!r}"
        placed.append((box, title))


def _overlap(a: Json, b: Json) -> bool:
    return all(
        a.get(axis, 0) < b.get(axis, 0) + b[size] and b.get(axis, 0) < a.get(axis, 0) + a[size]
        for axis, size in (("x", "w"), ("y", "h"))
    )


def _readable(board: Json) -> Iterator[str]:
    for panel in panels(board):
        where = f"panel {panel.get('title')!r}"
        if panel["type"] not in PANEL_TYPES:
            yield f"{where}: type {panel['type']} is none of {sorted(PANEL_TYPES)}"
        if panel["type"] == "row":
            continue
        if not panel.get("title") or len(panel.get("description") or "") < 20:
            yield f"{where}: no title, or no sentence that describes it"
        defaults = panel["fieldConfig"]["defaults"]
        if not (defaults.get("noValue") or "").startswith("no "):
            yield f"{where}: noValue must say that there is no data"
        if panel["type"] in ("stat", "timeseries") and "unit" not in defaults:
            yield f"{where}: no unit"
        for unit in _units(panel):
            if unit not in UNITS and not unit.startswith(UNIT_PREFIXES):
                yield f"{where}: Grafana knows no unit {unit!r}"
        targets = panel.get("targets") or []
        if not targets:
            yield f"{where}: no query"
        if len({target["refId"] for target in targets}) < len(targets):
            yield f"{where}: two queries have the same refId"


def _units(panel: Json) -> Iterator[str]:
    config = panel["fieldConfig"]
    yield from (config["defaults"][key] for key in ("unit",) if key in config["defaults"])
    for override in config.get("overrides") or ():
        yield from (each["value"] for each in override["properties"] if each["id"] == "unit")
    yield from (axis["unit"] for axis in [panel.get("options", {}).get("yAxis") or {}] if "unit" in axis)


def _promql(board: Json) -> Iterator[str]:
    known = {variable["name"] for variable in board["templating"]["list"]} | BUILT_IN
    for query in queries(board):
        unknown = variables_in(query.expr) - known
        if unknown:
            yield f"{query.where}: unknown variables {sorted(unknown)}"
            continue
        try:
            found = selectors(expand(query.expr, dict.fromkeys(known, "1m")))
        except ValueError as error:
            yield f"{query.where}: {error}"
            continue
        fixed = set(re.findall(r"\[(\d\w*)\]", query.expr))
        if fixed:
            yield f"{query.where}: fixed range {sorted(fixed)}; use $__rate_interval or $__range"
        for selector in found:
            if selector.metric.endswith(("_total", "_bucket")) and not OVER_COUNTERS & set(selector.inside):
                yield f"{query.where}: counter {selector.metric} outside rate() or increase()"
            if selector.metric != "ALERTS" and "aggregation" not in selector.inside:
                yield f"{query.where}: {selector.metric} is not aggregated; a run may be seen at two endpoints"
