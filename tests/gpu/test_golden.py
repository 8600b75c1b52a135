"""The whole page of three machines, byte for byte but for clocks: tests/gpu/golden/*.prom.

To write them anew: TUNEWATCH_UPDATE_GOLDEN=1 pytest tests/gpu/test_golden.py
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_harness import FakeDriver, RunningSidecar, card

GOLDEN = Path(__file__).parent / "golden"
PART = "MIG-aaaaaaaa-0000-0000-0000-000000000001"

# An 80 GB card with ECC and spare rows, beside one that wants a reset.
DATA_CENTER = {**card(0, processes="4194000:1073741824", field230=0), **card(1, **{"!*": 16})}
# A card for games: no ECC, no spare rows, no memory sensor, no counter of its energy, limits of its temperature.
CONSUMER = card(
    0,
    name="NVIDIA GeForce Test",
    energy=None,
    field82=None,
    limit2=None,
    **{f"field{number}": None for number in (3, 4, 142, 143, 144, 145)},
)
# A card cut into slices that tells its limits only as a distance (as Hopper does).
MIG = {
    **card(0, mig=1, utilization=None, **{f"limit{number}": None for number in range(4)}),
    "gpu0.mig2.uuid": PART,
    "gpu0.mig2.name": "NVIDIA Test 40GB MIG 1g.5gb",
    "gpu0.mig2.memory_total": 5 * 1024**3,
    "gpu0.mig2.memory_reserved": 0,
    "gpu0.mig2.memory_used": 1024**3,
    "gpu0.mig2.processes": "4194000:1073741824",
}
HOSTS = {"data_center": DATA_CENTER, "consumer": CONSUMER, "mig": MIG}

CLOCKS = re.compile(
    r"^(tunewatch_gpu_(?:time|collector_duration|collector_last_success_timestamp)_seconds"
    r"|tunewatch_gpu_build_info\{version=)(.*)$",
    re.MULTILINE,
)


@pytest.mark.parametrize("host", HOSTS)
def test_page(
    driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar], host: str, tmp_path: Path
) -> None:
    driver.play(HOSTS[host])
    arguments = ("--backend", "nvml", "--interval", "300", "--kernel-log", str(tmp_path / "none"))
    page = start_sidecar(driver.environment, *arguments).wait_success().text
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, text=True, capture_output=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")

    page = CLOCKS.sub(r"\1 ...", page)
    path = GOLDEN / f"{host}.prom"
    if os.environ.get("TUNEWATCH_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(page)
    assert page == path.read_text()
