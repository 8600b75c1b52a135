"""Fixtures of the sidecar's tests: a compiled fake driver, a fake nvidia-smi, a way to start the sidecar."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from gpu_harness import FakeDriver, FakeSmi, RunningSidecar, build_fake_nvml

StartSidecar = Callable[..., RunningSidecar]


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("the fake NVML library needs gcc")
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> FakeDriver:
    return FakeDriver(nvml_library, tmp_path)


@pytest.fixture
def smi(tmp_path: Path) -> FakeSmi:
    folder = tmp_path / "smi"
    folder.mkdir()
    return FakeSmi(folder)


@pytest.fixture
def start_sidecar(tmp_path: Path) -> Iterator[StartSidecar]:
    with ExitStack() as stack:

        def start(environment: Mapping[str, str], *arguments: str) -> RunningSidecar:
            sidecar = RunningSidecar(environment, arguments, tmp_path / "sidecar.log")
            return stack.enter_context(sidecar)

        yield start
