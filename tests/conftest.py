"""Fixtures of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Machine

from tunewatch.binaries import find_binary

# A shell that starts the tests in the background has them ignore SIGINT, and they would pass that on to every program
# that they start and interrupt. A handler of our own is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests call promtool and the others by name: where they are only unpacked beside the venv, PATH has to know.
for _name in ("prometheus", "promtool", "alertmanager", "amtool"):
    _folder = str(find_binary(_name).parent)
    if _folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + _folder


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine of the test's own: a home, and what runs in it; whatever is left is ended."""
    machine = Machine(tmp_path)
    yield machine
    machine.close()
