"""The text of `nvidia-smi --query-gpu=... --format=csv`: which columns we ask for and what an answer means.

An answer counts only where its header repeats the question: as many columns, and each under its name.
Anything else (a table of another shape, a renamed column, XML, a warning, a ragged row) is no reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tunewatch_gpu.fields import RECOVERY_ACTIONS
from tunewatch_gpu.readings import (
    ERROR,
    GPU_LOST,
    MALFORMED,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN_VALUE,
    Readings,
)
from tunewatch_gpu.run_memory import Process
from tunewatch_gpu.units import from_mebi, from_mega, from_micro, from_percent

_ABSENCE = {
    "": MALFORMED,
    "n/a": NOT_SUPPORTED,
    "not supported": NOT_SUPPORTED,
    "not available": NOT_SUPPORTED,
    "function not found": NOT_SUPPORTED,
    "requested functionality has been deprecated": NOT_SUPPORTED,
    "insufficient permissions": NO_PERMISSION,
    "unknown": UNKNOWN_VALUE,
    "unknown error": UNKNOWN_VALUE,
    "err!": ERROR,
    "gpu requires reset": RESET_REQUIRED,
    "gpu is lost": GPU_LOST,
}
"""What nvidia-smi writes in place of a value, without brackets, in lower case."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(?: ?([A-Za-z%]+))?")
_HEADER = re.compile(r"([\w.]+)(?: \[(\S+)\])?")
_MASK = re.compile(r"0x[0-9A-Fa-f]{1,16}")
_STATE = re.compile(r"P(\d{1,2})")

_CONVERT: dict[str, Callable[[float], float]] = {
    "": float,
    "C": float,
    "W": float,
    "%": from_percent,
    "MiB": from_mebi,
    "MHz": from_mega,
    "us": from_micro,
}

IDENTITY_COLUMNS = ("uuid", "index", "name", "driver_version", "pci.bus_id", "mig.mode.current")

_NUMBERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("utilization", "%", ("utilization.gpu",)),
    ("memory_used", "MiB", ("memory.used",)),
    ("memory_reserved", "MiB", ("memory.reserved",)),
    ("memory_total", "MiB", ("memory.total",)),
    # Some drivers know only the instant value and answer N/A to the others.
    ("power", "W", ("power.draw", "power.draw.average", "power.draw.instant")),
    ("power_limit", "W", ("enforced.power.limit", "power.limit")),
    ("temperature_gpu", "C", ("temperature.gpu",)),
    ("temperature_memory", "C", ("temperature.memory",)),
    ("fan", "%", ("fan.speed",)),
    ("clock_graphics", "MHz", ("clocks.current.graphics",)),
    ("clock_sm", "MHz", ("clocks.current.sm",)),
    ("clock_memory", "MHz", ("clocks.current.memory",)),
    ("clock_video", "MHz", ("clocks.current.video",)),
    ("ecc_corrected", "", ("ecc.errors.corrected.volatile.total",)),
    ("ecc_uncorrected", "", ("ecc.errors.uncorrected.volatile.total",)),
    ("rows_correctable", "", ("remapped_rows.correctable",)),
    ("rows_uncorrectable", "", ("remapped_rows.uncorrectable",)),
    ("throttled_sw_power_cap", "us", ("clocks_event_reasons_counters.sw_power_cap",)),
    ("throttled_sync_boost", "us", ("clocks_event_reasons_counters.sync_boost",)),
    ("throttled_sw_thermal_slowdown", "us", ("clocks_event_reasons_counters.sw_thermal_slowdown",)),
    ("throttled_hw_thermal_slowdown", "us", ("clocks_event_reasons_counters.hw_thermal_slowdown",)),
    (
        "throttled_hw_power_brake_slowdown",
        "us",
        ("clocks_event_reasons_counters.hw_power_brake_slowdown",),
    ),
)
"""Reading, its unit in nvidia-smi, and the columns that may hold it, the first with a value wins."""

_FLAGS = {"rows_pending": "remapped_rows.pending", "rows_failed": "remapped_rows.failure"}
_RECOVERY_ACTION = "gpu_recovery_action"
_HIGHEST_POWER_LIMIT = "power.max_limit"
_PSTATE = "pstate"
_THROTTLE = "clocks_event_reasons.active"
_THROTTLE_BEFORE_535 = "clocks_throttle_reasons.active"

COLUMNS: tuple[str, ...] = (
    *IDENTITY_COLUMNS,
    *(column for _, _, columns in _NUMBERS for column in columns),
    *_FLAGS.values(),
    _RECOVERY_ACTION,
    _HIGHEST_POWER_LIMIT,
    _PSTATE,
    _THROTTLE,
)
"""All columns of the question."""

SECTIONS = ("ecc.errors.", "remapped_rows.", "clocks_event_reasons_counters.")
"""Columns that a driver knows all or none of, by how they begin."""

OLDER_NAMES = {_THROTTLE: _THROTTLE_BEFORE_535}
"""What to ask for instead where a driver does not know a column."""


@dataclass(frozen=True, slots=True)
class Row:
    """One GPU's cells by column name, and the unit each column's header states."""

    cells: dict[str, str]
    units: dict[str, str]

    def text(self, column: str) -> str:
        """The cell, or "" where it holds no value."""
        cell = self.cells.get(column, "")
        return "" if _absence(cell) else cell


@dataclass(slots=True)
class Table:
    """The rows that answer the question, and the lines that look like rows but do not."""

    rows: list[Row] = field(default_factory=list)
    ragged: list[str] = field(default_factory=list)


def parse_table(text: str, asked: Sequence[str]) -> Table:
    """The table in `text` whose header repeats `asked`; lines before and after it are passed over."""
    table = Table()
    units: dict[str, str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if units is None:
            units = _header_units(cells, asked)
        elif len(cells) == len(asked):
            named = zip(asked, cells, strict=True)
            table.rows.append(Row({column: cell for column, cell in named if column in units}, units))
        elif len(cells) > 1:
            table.ragged.append(line)
    return table


def _header_units(cells: list[str], asked: Sequence[str]) -> dict[str, str] | None:
    """Units of the columns that stand under their name; None if `cells` is not the header to the question."""
    if len(cells) != len(asked):
        return None
    units = {}
    for cell, column in zip(cells, asked, strict=True):
        match = _HEADER.fullmatch(cell)
        if match is not None and _one_name(match[1]) == _one_name(column):
            units[column] = match[2] or ""
    return units if {"uuid", "index"} <= units.keys() else None


def _one_name(column: str) -> str:
    """Drivers around 535 answer a question for throttle reasons under their new name."""
    return column.replace("clocks_throttle_reasons", "clocks_event_reasons")


def _absence(cell: str) -> str | None:
    """Why `cell` holds no value, None if it does."""
    word = cell[1:-1] if cell.startswith("[") and cell.endswith("]") else cell
    return _ABSENCE.get(word.strip().lower())


def read_row(row: Row) -> tuple[Readings, str]:
    """The readings of one GPU, and why it is down ("" if it is not)."""
    readings = Readings()
    for name, unit, columns in _NUMBERS:
        _read_number(row, name, unit, columns, readings)
    _read_state(row, readings)
    _read_throttling(row, readings)
    for name, column in _FLAGS.items():
        _read_flag(row, name, column, readings)
    _read_recovery_action(row, readings)
    readings.reject("energy", NOT_SUPPORTED)  # nvidia-smi has no column for the counter
    limits = Readings()
    _read_number(row, "power_limit", "W", (_HIGHEST_POWER_LIMIT,), limits)
    readings.check(limits.values.get("power_limit"))
    reasons = {_absence(cell) for cell in row.cells.values()}
    for reason in (GPU_LOST, RESET_REQUIRED):
        if reason in reasons:
            return readings, reason
    is_silent = all(name.startswith("recovery_") for name in readings.values)
    if is_silent and {UNKNOWN_VALUE, ERROR} & set(readings.absent.values()):
        return readings, ERROR
    return readings, ""


def _read_number(row: Row, name: str, unit: str, columns: Sequence[str], readings: Readings) -> None:
    """Take the first of `columns` that has a value; where none has, the first one says why."""
    reason = None
    for column in columns:
        cell = row.cells.get(column)
        if cell is None:
            continue  # a column this driver does not know
        absence = _absence(cell)
        match = _NUMBER.fullmatch(cell)
        if absence is None and match is not None and {row.units[column], match[2] or ""} <= {"", unit}:
            readings.accept(name, float(match[1]), _CONVERT[unit])
            return
        reason = reason or absence or MALFORMED
    readings.reject(name, reason or NOT_SUPPORTED)


def _read_state(row: Row, readings: Readings) -> None:
    cell = row.cells.get(_PSTATE, "N/A")
    match = _STATE.fullmatch(cell)
    if match:
        readings.accept("performance_state", int(match[1]))
    else:
        readings.reject("performance_state", _absence(cell) or MALFORMED)


def _read_throttling(row: Row, readings: Readings) -> None:
    cell = row.cells.get(_THROTTLE) or row.cells.get(_THROTTLE_BEFORE_535) or "N/A"
    if _MASK.fullmatch(cell):
        readings.accept_throttle_mask(int(cell, 16))
    else:
        readings.reject("throttle", _absence(cell) or MALFORMED)


def _read_flag(row: Row, name: str, column: str, readings: Readings) -> None:
    cell = row.cells.get(column, "N/A")
    if cell in ("Yes", "No"):
        readings.accept(name, cell == "Yes")
    else:
        readings.reject(name, _absence(cell) or MALFORMED)


def _read_recovery_action(row: Row, readings: Readings) -> None:
    """The action in words, such as "None" or "Drain and Reset"."""
    cell = row.cells.get(_RECOVERY_ACTION, "N/A")
    action = cell.lower().replace(" ", "_")
    if action in RECOVERY_ACTIONS:
        readings.accept_recovery_action(action)
    elif absence := _absence(cell):
        readings.reject("recovery_action", absence)
    else:
        readings.reject("recovery_action", UNKNOWN_VALUE)
        readings.remarks.append(f"the driver asks for recovery action {cell!r}, which is not known here")


PROCESS_COLUMNS = ("gpu_uuid", "pid", "used_gpu_memory")


def parse_processes(text: str) -> dict[str, list[Process]] | None:
    """The processes of each GPU in the answer to a question for `PROCESS_COLUMNS`; None if it is no answer."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    header = [*PROCESS_COLUMNS[:-1], f"{PROCESS_COLUMNS[-1]} [MiB]"]
    if header not in lines:
        return None
    processes: dict[str, list[Process]] = {}
    for cells in lines[lines.index(header) + 1 :]:
        if len(cells) == len(header) and cells[1].isascii() and cells[1].isdecimal():
            memory = _NUMBER.fullmatch(cells[2])
            known = memory is not None and memory[2] in (None, "MiB")
            used = int(from_mebi(float(memory[1]))) if memory is not None and known else None
            processes.setdefault(cells[0], []).append((int(cells[1]), used))
    return processes


_LISTED_CARD = re.compile(r"GPU (\d+): .*\(UUID: (\S+)\)\s*")
_LISTED_SLICE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-\S+)\)\s*")


@dataclass(frozen=True, slots=True)
class ListedSlice:
    """A MIG slice in `nvidia-smi -L`: nvidia-smi's CSV knows nothing of slices."""

    card_index: int
    uuid: str
    profile: str


def parse_listing(text: str) -> list[ListedSlice]:
    """The MIG slices in the output of `nvidia-smi -L`."""
    slices = []
    card_index = None
    for line in text.splitlines():
        card, part = _LISTED_CARD.fullmatch(line), _LISTED_SLICE.fullmatch(line)
        if card:
            card_index = int(card[1])
        elif part and card_index is not None:
            slices.append(ListedSlice(card_index, part[2], part[1]))
        else:
            card_index = None
    return slices
