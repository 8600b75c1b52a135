"""Finds the programs the one-machine stack starts, and fetches them where that needs no root.

The order is: PATH, then the tools folder, then Debian's packages unpacked into the tools folder. The packages
are not *installed*: that would need root and would start a system service on 0.0.0.0:9090.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TOOLS_VARIABLE = "TUNEWATCH_TOOLS"

_NAMES = {
    "prometheus": ("prometheus",),
    "promtool": ("promtool",),
    # Debian names the server prometheus-alertmanager; the project's own release names it alertmanager.
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
    "amtool": ("amtool",),
    # Grafana 10 and later start as `grafana server`; the old name is kept as a wrapper.
    "grafana": ("grafana", "grafana-server"),
}
_PACKAGES = ("prometheus", "prometheus-alertmanager")
_PACKAGED = ("prometheus", "promtool", "alertmanager", "amtool")
_UNPACKED = "debian"
_APT_TIMEOUT = 600.0
_DOWNLOADS = {
    "prometheus": "https://prometheus.io/download/",
    "promtool": "https://prometheus.io/download/ (in Prometheus' archive)",
    "alertmanager": "https://prometheus.io/download/#alertmanager",
    "amtool": "https://prometheus.io/download/#alertmanager (in Alertmanager's archive)",
    "grafana": "https://grafana.com/grafana/download",
}


class BinaryMissing(RuntimeError):
    """A program is neither installed nor could it be fetched; the message says how to get it."""


def tools_folder() -> Path:
    """Where tunewatch keeps programs of its own: `$TUNEWATCH_TOOLS`, else a folder of the environment.

    Programs are looked for in it, in its `bin/`, and in what `install_tools` unpacked.
    """
    named = os.environ.get(TOOLS_VARIABLE)
    return Path(named) if named else Path(sys.prefix) / "share" / "tunewatch" / "tools"


def installed_binary(name: str) -> Path | None:
    """The program called `name` from PATH or the tools folder; None when it is in neither.

    `name` is one of prometheus, promtool, alertmanager, amtool, grafana.
    """
    if name not in _NAMES:
        raise ValueError(f"no program is called {name!r} here; allowed are {', '.join(_NAMES)}")
    tools = tools_folder()
    for path in (None, os.pathsep.join(map(str, (tools, tools / "bin", tools / _UNPACKED / "usr" / "bin")))):
        for spelling in _NAMES[name]:
            if found := shutil.which(spelling, path=path):
                return Path(found)
    return None


def find_binary(name: str, report: Callable[[str], None] = lambda _line: None) -> Path:
    """The program called `name`, fetched by `install_tools` when this machine has none.

    `report` is told before something is downloaded. Raises `BinaryMissing`. Grafana is never fetched: Debian
    has no package of it.
    """
    if found := installed_binary(name):
        return found
    if name not in _PACKAGED:
        raise BinaryMissing(_advice(name, "it is not on PATH"))
    try:
        install_tools(report)
    except BinaryMissing as error:
        raise BinaryMissing(_advice(name, str(error))) from error
    found = installed_binary(name)
    assert found is not None, "install_tools checks that every packaged program runs"
    return found


def install_tools(report: Callable[[str], None] = lambda _line: None) -> Path:
    """Unpacks Debian's Prometheus and Alertmanager into the tools folder and returns where they lie.

    Needs neither root nor a running service, and checks that each program runs. Two calls at once do the work
    once; a call that is killed half way leaves nothing that looks finished. Raises `BinaryMissing`.
    """
    for command in ("apt-get", "dpkg-deb"):
        if shutil.which(command) is None:
            raise BinaryMissing(f"this system has no {command} (only Debian and Ubuntu packages are fetched)")
    tools = tools_folder()
    try:
        tools.mkdir(parents=True, exist_ok=True)
        with _locked(tools / ".lock"), _scratch_folder(tools) as scratch:
            target = tools / _UNPACKED
            if not _problem_with(target):
                return target
            report(f"fetching Prometheus and Alertmanager (30 MB, once) into {target}")
            unpacked = _unpack(scratch)
            if problem := _problem_with(unpacked):
                raise BinaryMissing(problem)
            if target.exists():
                target.rename(scratch / "broken")
            unpacked.rename(target)
            return target
    except OSError as error:
        raise BinaryMissing(
            f"the tools folder {tools} can not be used ({error}); name another one in {TOOLS_VARIABLE}"
        ) from error


def _unpack(scratch: Path) -> Path:
    downloads = scratch / "downloads"
    downloads.mkdir()
    _download(downloads, scratch / "apt")
    unpacked = scratch / "unpacked"
    for package in sorted(downloads.glob("*.deb")):
        _call(["dpkg-deb", "-x", str(package), str(unpacked)], cwd=scratch)
    return unpacked


def _download(folder: Path, apt: Path) -> None:
    """Downloads the packages, refreshing *private* package lists when the machine's own do not do.

    The lists of a fresh container are empty, old ones name packages that are gone, and only root may renew
    them. apt checks the archive's signature either way.
    """
    # Run by root, apt downloads as a user that may not enter the 0700 scratch folder.
    own_files = ["-o", f"Dir::Cache={apt / 'cache'}", "-o", "APT::Sandbox::User=root"]
    own_lists = [*own_files, "-o", f"Dir::State={apt / 'state'}"]
    (apt / "cache" / "archives" / "partial").mkdir(parents=True)
    (apt / "state" / "lists" / "partial").mkdir(parents=True)
    try:
        _call(["apt-get", *own_files, "-q", "download", *_PACKAGES], cwd=folder)
    except BinaryMissing:
        # Without the option, apt calls an update that reached no server a success.
        _call(["apt-get", *own_lists, "-q", "-o", "APT::Update::Error-Mode=any", "update"], cwd=folder)
        _call(["apt-get", *own_lists, "-q", "download", *_PACKAGES], cwd=folder)


def _call(command: Sequence[str], cwd: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_APT_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise BinaryMissing(f"{command[0]} did not end within {_APT_TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise BinaryMissing(f"{command[0]} failed with exit code {done.returncode}:\n{last}")


def _problem_with(root: Path) -> str | None:
    """Why the programs unpacked under `root` can not be used; None when all of them run."""
    for name in _PACKAGED:
        found = next(
            (path for spelling in _NAMES[name] if (path := root / "usr" / "bin" / spelling).exists()), None
        )
        if found is None:
            return f"{name} is not in the packages {', '.join(_PACKAGES)}"
        try:
            done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{found} does not run here: {error}"
        if done.returncode != 0:
            return f"{found} --version failed: {(done.stdout + done.stderr).strip()[-300:]}"
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch_folder(tools: Path) -> Iterator[Path]:
    for left_by_a_kill in tools.glob(".unpack-*"):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=tools) as scratch:
        yield Path(scratch)


def _advice(name: str, reason: str) -> str:
    spellings = " or ".join(_NAMES[name])
    return (
        f"{name} is missing: {reason.rstrip('.')}.\n"
        f"Get it from {_DOWNLOADS[name]} and put {spellings} on PATH or into {tools_folder()} "
        f"({TOOLS_VARIABLE} names another folder)."
    )


def main() -> int:
    """`python -m tunewatch.binaries`: find or install what the stack needs, and say where it is."""
    try:
        for name in ("prometheus", "promtool", "alertmanager", "amtool"):
            print(f"{name:13} {find_binary(name, report=print)}")
    except BinaryMissing as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
