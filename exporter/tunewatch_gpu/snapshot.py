"""What one collection found: the type that every source fills and the endpoint renders.

A snapshot crosses a pipe between the reader process and the sidecar as one line of JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

UNKNOWN = "unknown"
_LABEL_LIMIT = 128
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")


def clean_label(text: str) -> str:
    """`text` without control characters, cut to a length that is safe as a label value."""
    return "".join(character for character in text if character.isprintable()).strip()[:_LABEL_LIMIT]


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
    none. A GPU that is down has no readings, and `down_reason` says why.
    """

    identity: Identity
    readings: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    down_reason: str = ""


@dataclass(slots=True)
class Snapshot:
    """One collection: `count` is how many GPUs the driver claims, also those that did not answer.

    `lost` names, by index or PCI bus id, GPUs that did not even tell who they are, with the reason.
    """

    source: str
    count: int
    gpus: list[Gpu]
    lost: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain types for the pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Snapshot:
        """The inverse of `to_json`."""
        gpus = [Gpu(**{**gpu, "identity": Identity(**gpu["identity"])}) for gpu in data["gpus"]]
        return cls(**{**data, "gpus": gpus})


@dataclass(frozen=True, slots=True)
class Request:
    """What the sidecar asks of the reader for one collection.

    `timeout` in seconds is the reader's share of the deadline; `skip` holds the indices of GPUs not to touch;
    `avoid` the names of sources not to use; `known` the (uuid, PCI bus id) pairs of earlier collections.
    """

    timeout: float
    skip: tuple[int, ...] = ()
    avoid: tuple[str, ...] = ()
    known: tuple[tuple[str, str], ...] = ()

    def dump(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, line: str) -> Request:
        """The inverse of `dump`."""
        data = json.loads(line)
        known = tuple((uuid, pci_bus_id) for uuid, pci_bus_id in data["known"])
        return cls(data["timeout"], tuple(data["skip"]), tuple(data["avoid"]), known)
