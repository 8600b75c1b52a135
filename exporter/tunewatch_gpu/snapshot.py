"""What one collection found: the type that every source fills and the endpoint renders.

A snapshot crosses a pipe between the reader process and the sidecar as one line of JSON.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

UNKNOWN = "unknown"
_LABEL_LIMIT = 128
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")


def clean_label(text: str) -> str:
    """`text` without control characters, cut to a length that is safe as a label value."""
    return "".join(character for character in text if character.isprintable()).strip()[:_LABEL_LIMIT]


def bus_key(pci_bus_id: str) -> str:
    """A PCI bus id in one spelling: the domain has four digits or eight, and the function may be left out."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    return f"{domain.lstrip('0')}:{rest.partition('.')[0]}"


def choose_uuid(uuid: str, pci_bus_id: str, index: int) -> str:
    """The key of a GPU: its uuid in NVML's spelling if that is one, else its PCI bus id or its index.

    Virtual machines report all-zero uuids, and a driver under WSL2 reported garbage bytes; two GPUs must
    not collide because of it.
    """
    digits = uuid.partition("-")[2]
    if _UUID.fullmatch(uuid) and digits.strip("0-/"):
        return uuid
    return f"PCI-{pci_bus_id}" if pci_bus_id else f"INDEX-{index}"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a GPU is. `index` is the driver's and may change; `uuid` is the key."""

    uuid: str
    index: int
    name: str = UNKNOWN
    driver_version: str = ""
    pci_bus_id: str = ""
    parent_uuid: str = ""
    mig_profile: str = ""
    simulated: bool = False

    @property
    def physical(self) -> bool:
        """Whether this is a card and not a MIG slice of one."""
        return not self.parent_uuid


@dataclass(slots=True)
class Gpu:
    """One GPU or MIG slice in one collection.

    `readings` are in base units by the keys of `fields.FIELDS`; `absent` says why the other fields have
    none. `run_memory` is in bytes by run, "" being everybody else. A GPU that is down has no readings,
    but for the recovery action where the driver still tells that one, and `down_reason` says why.
    """

    identity: Identity
    readings: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    run_memory: dict[str, float] = field(default_factory=dict)
    down_reason: str = ""


def _shallow(item: Gpu | Identity | Snapshot) -> dict[str, Any]:
    return {part.name: getattr(item, part.name) for part in fields(item)}


@dataclass(slots=True)
class Snapshot:
    """One collection: `count` is how many GPUs the driver claims, also those that did not answer.

    `lost` names, by index or PCI bus id, GPUs that did not even tell who they are, with the reason; `time` is
    the Unix time of the collection.
    """

    source: str
    count: int
    gpus: list[Gpu]
    lost: dict[str, str] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain types for the pipe. Not by asdict, which copies every number and takes ten times as long."""
        gpus = [_shallow(gpu) | {"identity": _shallow(gpu.identity)} for gpu in self.gpus]
        return _shallow(self) | {"gpus": gpus}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Snapshot:
        """The inverse of `to_json`."""
        gpus = [Gpu(**{**gpu, "identity": Identity(**gpu["identity"])}) for gpu in data["gpus"]]
        return cls(**{**data, "gpus": gpus})


@dataclass(frozen=True, slots=True)
class Request:
    """What the sidecar asks of the reader for one collection.

    `deadline` is when the reader should give up by itself, on the monotonic clock that all processes of a machine
    share; `skip` holds the indices of GPUs not to touch; `avoid` the names of sources (or parts of one) not to
    use; `known` the (uuid, PCI bus id) pairs of earlier collections; `after` the Unix time of the last snapshot
    that arrived, None before the first.
    """

    deadline: float
    skip: tuple[int, ...] = ()
    avoid: tuple[str, ...] = ()
    known: tuple[tuple[str, str], ...] = ()
    after: float | None = None

    def dump(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, line: str) -> Request:
        """The inverse of `dump`."""
        data = json.loads(line)
        known = tuple((uuid, pci_bus_id) for uuid, pci_bus_id in data["known"])
        return cls(data["deadline"], tuple(data["skip"]), tuple(data["avoid"]), known, data["after"])
