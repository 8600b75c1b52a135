"""Readings from the nvidia-smi program, for machines where NVML can not be loaded or crashes.

One nvidia-smi at a time, with a deadline; a column that this driver does not know is left out of the next
question. A collection is one start of the program, which costs some hundred milliseconds of a core; every sixth
one (or after 30 s) is a second start, for the processes.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

from tunewatch_gpu import smi_csv
from tunewatch_gpu.pace import Pace
from tunewatch_gpu.process import Completed, run
from tunewatch_gpu.readings import ERROR, GPU_LOST
from tunewatch_gpu.run_memory import Impossible, RunFinder, memory_by_run
from tunewatch_gpu.snapshot import (
    UNKNOWN,
    Gpu,
    Identity,
    Request,
    Snapshot,
    bus_key,
    choose_uuid,
    clean_label,
)
from tunewatch_gpu.source import Announce, SourceUnavailable

_WSL_PROGRAM = "/usr/lib/wsl/lib/nvidia-smi"
_INVALID_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_LOST_CARD = re.compile(r"Unable to determine the device handle for GPU\d*:? ?([0-9A-Fa-f:]+\.[0-9A-Fa-f])")
_LISTING_LIFETIME = 60.0  # seconds between two looks at the MIG slices

# What the program says (exit codes from its manual), first match wins.
_MESSAGES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"version mismatch", re.I), "driver_library_mismatch"),
    (re.compile(r"No devices were found", re.I), "no_devices"),
    (
        re.compile(r"couldn't communicate with the NVIDIA driver|driver not loaded", re.I),
        "driver_not_loaded",
    ),
    (re.compile(r"Insufficient Permissions", re.I), "no_permission"),
    (re.compile(r"GPU is lost|Unable to determine the device handle", re.I), GPU_LOST),
)
_EXIT_CODES = {
    4: "no_permission",
    6: "no_devices",
    9: "driver_not_loaded",
    12: "library_not_found",
    15: GPU_LOST,
    18: "driver_library_mismatch",
}


class NvidiaSmiSource:
    """The nvidia-smi program: `program` is a path or a name on PATH."""

    name = "nvidia-smi"

    def __init__(self, announce: Announce, program: str = "nvidia-smi") -> None:
        self._announce = announce
        self._program = program
        self._columns = list(smi_csv.COLUMNS)
        self._pace = Pace()
        self._runs = RunFinder()
        self._run_memory: dict[str, dict[str, float]] = {}
        self._no_run_memory: dict[str, str] = {}
        self._slices: list[smi_csv.ListedSlice] = []
        self._slices_until = 0.0

    def read(self, request: Request) -> Snapshot:
        """One collection; see `Source`."""
        self._announce(self.name, None)
        deadline = request.deadline
        completed, table = self._ask(deadline)
        silent = {bus_key(match[1]): match[1] for match in _LOST_CARD.finditer(_all_text(completed))}
        lost = [pci_bus_id for _, pci_bus_id in request.known if bus_key(pci_bus_id) in silent]
        lost = lost or list(silent.values())
        if lost and not table.rows:
            # One card that fell off the bus silences the whole program: ask for the others by name.
            others = [uuid for uuid, pci_bus_id in request.known if pci_bus_id not in lost]
            if others:
                completed, table = self._ask(deadline, only=others)
        if completed.code < 0 or not table.rows:
            raise _explain(completed, table)
        snapshot = Snapshot(self.name, len(table.rows) + len(lost), [], dict.fromkeys(lost, GPU_LOST))
        for row in table.rows:
            snapshot.gpus += self._read_row(row, snapshot, deadline)
        self._add_run_memory(snapshot, deadline)
        if completed.code != 0:
            snapshot.warnings.append(
                f"nvidia-smi left with exit code {completed.code} after a complete table"
            )
        snapshot.warnings += [
            clean_label(line)
            for line in _all_text(completed).splitlines()
            if line.strip().upper().startswith("WARNING")
        ]
        snapshot.warnings += [f"row of another shape left out: {clean_label(line)}" for line in table.ragged]
        return snapshot

    def close(self) -> None:
        """Nothing is held between collections."""

    def _ask(self, deadline: float, only: list[str] | None = None) -> tuple[Completed, smi_csv.Table]:
        """The answer to the question, asked anew without each column that this driver does not know."""
        selection = ["-i", ",".join(only)] if only else []
        while True:
            completed = self._run(
                [f"--query-gpu={','.join(self._columns)}", "--format=csv", *selection], deadline
            )
            invalid = _INVALID_FIELD.search(_all_text(completed))
            if invalid is None or invalid[1] not in self._columns or invalid[1] in ("uuid", "index"):
                return completed, smi_csv.parse_table(completed.stdout, self._columns)
            older = smi_csv.OLDER_NAMES.get(invalid[1])
            place = self._columns.index(invalid[1])
            self._columns[place : place + 1] = [older] if older else []
            for section in smi_csv.SECTIONS:
                if invalid[1].startswith(section):
                    self._columns = [column for column in self._columns if not column.startswith(section)]

    def _run(self, arguments: list[str], deadline: float) -> Completed:
        timeout = deadline - time.monotonic()
        if timeout <= 0:
            raise SourceUnavailable("timeout", "nvidia-smi took too long")
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            completed = run([self._find(), *arguments], timeout, environment)
        except OSError as error:
            raise SourceUnavailable(
                "nvidia_smi_not_found", f"{self._program} can not be started: {error.strerror}"
            ) from None
        if completed.timed_out:
            raise SourceUnavailable("timeout", f"nvidia-smi gave no answer in {timeout:.1f} s and was killed")
        return completed

    def _find(self) -> str:
        found = shutil.which(self._program) or (
            _WSL_PROGRAM if self._program == "nvidia-smi" and Path(_WSL_PROGRAM).exists() else None
        )
        if found is None:
            raise SourceUnavailable("nvidia_smi_not_found", f"there is no program {self._program}")
        return found

    def _read_row(self, row: smi_csv.Row, snapshot: Snapshot, deadline: float) -> list[Gpu]:
        """The card of one row and its MIG slices."""
        index_text = row.text("index")
        if not index_text.isascii() or not index_text.isdecimal():
            snapshot.warnings.append("a row without a GPU index was left out")
            return []
        pci_bus_id = clean_label(row.text("pci.bus_id"))
        identity = Identity(
            uuid=choose_uuid(row.text("uuid"), pci_bus_id, int(index_text)),
            index=int(index_text),
            name=clean_label(row.text("name")) or UNKNOWN,
            driver_version=clean_label(row.text("driver_version")),
            pci_bus_id=pci_bus_id,
        )
        readings, down_reason = smi_csv.read_row(row)
        snapshot.warnings += [f"GPU {identity.index}: {clean_label(remark)}" for remark in readings.remarks]
        if down_reason:
            told = {key: value for key, value in readings.values.items() if key.startswith("recovery_")}
            kept = told if down_reason == ERROR else {}
            return [Gpu(identity, kept, readings.absent, down_reason=down_reason)]
        card = Gpu(identity, readings.values, readings.absent)
        if row.text("mig.mode.current") != "Enabled":
            return [card]
        slices = [
            Gpu(
                replace(
                    identity,
                    uuid=part.uuid,
                    name=f"{identity.name} MIG {part.profile}",
                    parent_uuid=identity.uuid,
                    mig_profile=part.profile,
                )
            )
            for part in self._list_slices(deadline)
            if part.card_index == identity.index
        ]
        return [card, *slices]

    def _add_run_memory(self, snapshot: Snapshot, deadline: float) -> None:
        """Whose memory it is, asked anew where it is time."""
        if self._pace.due():
            self._runs.begin_round()
            self._ask_for_processes(snapshot.gpus, deadline)
        for gpu in snapshot.gpus:
            uuid = gpu.identity.uuid
            if not gpu.down_reason:
                gpu.run_memory = self._run_memory.get(uuid, {})
                if uuid in self._no_run_memory:
                    gpu.absent["run_memory"] = self._no_run_memory[uuid]

    def _ask_for_processes(self, gpus: list[Gpu], deadline: float) -> None:
        """A question that goes wrong costs what it asks for, and not the collection."""
        self._run_memory, self._no_run_memory = {}, {}
        question = f"--query-compute-apps={','.join(smi_csv.PROCESS_COLUMNS)}"
        try:
            completed = self._run([question, "--format=csv"], deadline)
            processes = smi_csv.parse_processes(completed.stdout) if completed.code == 0 else None
        except SourceUnavailable:
            processes = None
        parents = {gpu.identity.parent_uuid for gpu in gpus}
        for gpu in gpus:
            uuid = gpu.identity.uuid
            if processes is None:
                self._no_run_memory[uuid] = ERROR
            elif uuid not in parents:
                try:
                    total = gpu.readings.get("memory_total")
                    self._run_memory[uuid] = memory_by_run(processes.get(uuid, []), total, self._runs)
                except Impossible as impossible:
                    self._no_run_memory[uuid] = impossible.reason

    def _list_slices(self, deadline: float) -> list[smi_csv.ListedSlice]:
        if time.monotonic() >= self._slices_until:
            self._slices = smi_csv.parse_listing(self._run(["-L"], deadline).stdout)
            self._slices_until = time.monotonic() + _LISTING_LIFETIME
        return self._slices


def _all_text(completed: Completed) -> str:
    return f"{completed.stdout}\n{completed.stderr}"


def _explain(completed: Completed, table: smi_csv.Table) -> SourceUnavailable:
    """Why there is no table."""
    text = _all_text(completed).strip()
    first_line = clean_label(text.splitlines()[0]) if text else "no output"
    message = f"nvidia-smi: {first_line} (exit code {completed.code})"
    for pattern, reason in _MESSAGES:
        if pattern.search(text):
            return SourceUnavailable(reason, message)
    if completed.code in _EXIT_CODES:
        return SourceUnavailable(_EXIT_CODES[completed.code], message)
    if completed.code:
        return SourceUnavailable("nvidia_smi_failed", message)
    what = "rows of another shape than asked for" if table.ragged else "no answer to the question asked"
    return SourceUnavailable("malformed_output", f"nvidia-smi gave {what}: {first_line}")
