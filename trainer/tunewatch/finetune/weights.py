"""Are all weights of a safetensors file finite? Read as a stream, without torch.

A run whose loss became NaN ends in an orderly way and writes a file full of NaN: only the file itself tells.
The format: 8 bytes of header length (little endian), a JSON header with `dtype` and `data_offsets` per
tensor, the data (https://huggingface.co/docs/safetensors/index#format).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 24

# A number is NaN or infinite when all its exponent bits are set; E4M3 "fn" has no infinity and one NaN.
_EXPONENT_MASKS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
}


@dataclass(frozen=True)
class WeightsReport:
    """What is in the weights: `nonfinite` counts NaN and infinite values by tensor, where there are any."""

    tensors: int = 0
    values: int = 0
    nonfinite: dict[str, int] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return not self.nonfinite

    def __add__(self, other: WeightsReport) -> WeightsReport:
        return WeightsReport(
            self.tensors + other.tensors, self.values + other.values, {**self.nonfinite, **other.nonfinite}
        )


def check_weights(folder: Path) -> WeightsReport:
    """Look at every safetensors file of a folder. Raises ValueError for one that is cut short."""
    report = WeightsReport()
    for file in sorted(folder.glob("*.safetensors")):
        report += check_file(file)
    return report


def check_file(path: Path) -> WeightsReport:
    """Count the values of one safetensors file that are not finite. Integer tensors count as finite."""
    import numpy

    nonfinite: dict[str, int] = {}
    values = 0
    with path.open("rb") as file:
        header, start = _read_header(path, file)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            width, mask = _EXPONENT_MASKS.get(tensor["dtype"], (None, 0))
            if width is None:
                continue
            file.seek(start + begin)
            left = end - begin
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise ValueError(f"{path.name} is cut short")
                left -= len(chunk)
                bits = numpy.frombuffer(chunk, dtype=width)
                values += bits.size
                bad = int(numpy.count_nonzero((bits & bits.dtype.type(mask)) == mask))
                if bad:
                    nonfinite[name] = nonfinite.get(name, 0) + bad
    return WeightsReport(len(header), values, nonfinite)


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    try:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(size))
    except (struct.error, ValueError):
        raise ValueError(f"{path.name} is not a whole safetensors file") from None
    header.pop("__metadata__", None)
    return header, 8 + size
