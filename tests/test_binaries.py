"""Finding the stack's programs, and fetching them without root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunewatch.binaries import BinaryMissing, find_binary, install_tools, installed_binary, tools_folder

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")


def write_script(path: Path, body: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on PATH but what a test puts into `bare / "bin"`, and empty tools."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TUNEWATCH_TOOLS", str(tmp_path / "tools"))
    return tmp_path


@pytest.fixture
def debian(bare: Path) -> Path:
    """A machine with an apt-get (its calls go to `bare / "calls"`) and a dpkg-deb of the test.

    Every program in the packages is a copy of `bare / "program"`. apt-get downloads only
    from private package lists and after an update, as where the machine's own lists are empty.
    """
    mkdir, cp = (shutil.which(name, path="/usr/bin:/bin") for name in ("mkdir", "cp"))
    write_script(
        bare / "bin" / "apt-get",
        f"""
        echo "apt-get $*" >> {bare}/calls
        case "$*" in
          *Dir::State=*update) : > {bare}/updated ;;
          *Dir::State=*download*) [ -e {bare}/updated ] || exit 100
              : > prometheus_1_all.deb; : > prometheus-alertmanager_1_all.deb ;;
          *) echo "E: no such package" >&2; exit 100 ;;
        esac""",
    )
    program = write_script(bare / "program")
    names = {
        "prometheus_": "prometheus promtool",
        "prometheus-alertmanager_": "prometheus-alertmanager amtool",
    }
    unpack = "\n".join(
        f"*/{start}*) for n in {programs}; do {cp} {program} $3/usr/bin/$n; done ;;"
        for start, programs in names.items()
    )
    write_script(bare / "bin" / "dpkg-deb", f"{mkdir} -p $3/usr/bin\ncase $2 in {unpack}\nesac")
    return bare


def test_path_comes_before_the_tools_folder(bare: Path) -> None:
    theirs = write_script(bare / "bin" / "prometheus")
    write_script(bare / "tools" / "bin" / "prometheus")
    assert find_binary("prometheus") == theirs

    theirs.unlink()
    assert find_binary("prometheus") == bare / "tools" / "bin" / "prometheus"


def test_debians_name_of_alertmanager_is_known(bare: Path) -> None:
    debians = write_script(bare / "bin" / "prometheus-alertmanager")
    assert find_binary("alertmanager") == debians


def test_tools_lie_beside_the_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNEWATCH_TOOLS", raising=False)
    assert tools_folder() == Path(sys.prefix) / "share" / "tunewatch" / "tools"


def test_an_unknown_program_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match=r"'promethues'.*promtool"):
        installed_binary("promethues")


def test_another_system_is_told_what_to_get(bare: Path) -> None:
    with pytest.raises(BinaryMissing) as failure:
        find_binary("alertmanager")
    for part in (
        "no apt-get",
        "https://prometheus.io/download",
        "prometheus-alertmanager",
        str(bare / "tools"),
    ):
        assert part in str(failure.value)


def test_grafana_is_never_fetched(debian: Path) -> None:
    with pytest.raises(BinaryMissing, match=r"grafana\.com"):
        find_binary("grafana")
    assert not (debian / "calls").exists()


def test_empty_package_lists_are_fetched_into_private_ones(debian: Path) -> None:
    said: list[str] = []
    assert find_binary("promtool", said.append) == debian / "tools" / "debian" / "usr" / "bin" / "promtool"

    calls = (debian / "calls").read_text().splitlines()
    downloads = ["update" if call.endswith(" update") else "download" for call in calls]
    assert downloads == ["download", "update", "download"]
    assert len(said) == 1
    assert {path.name for path in (debian / "tools").iterdir()} == {".lock", "debian"}

    for name in ("prometheus", "promtool", "alertmanager", "amtool"):
        find_binary(name, said.append)
    assert len(said) == 1, "fetched once"


def test_a_failing_download_shows_apts_words_and_leaves_nothing(debian: Path) -> None:
    write_script(debian / "bin" / "apt-get", 'echo "E: Could not resolve the archive" >&2; exit 100')
    with pytest.raises(BinaryMissing, match="exit code 100:\nE: Could not resolve the archive"):
        find_binary("prometheus")
    assert {path.name for path in (debian / "tools").iterdir()} == {".lock"}


def test_a_program_that_does_not_run_is_not_installed(debian: Path) -> None:
    write_script(debian / "program", "echo 'GLIBC_2.99 not found' >&2; exit 1")
    with pytest.raises(BinaryMissing, match=r"GLIBC_2\.99"):
        find_binary("prometheus")
    assert installed_binary("prometheus") is None


def test_a_damaged_installation_is_replaced(debian: Path) -> None:
    install_tools()
    (debian / "tools" / "debian" / "usr" / "bin" / "amtool").unlink()
    assert find_binary("amtool").exists()


def test_an_unwritable_tools_folder_is_named(debian: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (debian / "file").touch()
    monkeypatch.setenv("TUNEWATCH_TOOLS", str(debian / "file" / "tools"))
    with pytest.raises(BinaryMissing, match=r"file/tools can not be used .*TUNEWATCH_TOOLS"):
        find_binary("prometheus")


def install_in_a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from tunewatch.binaries import install_tools; install_tools()"]
    )


def test_several_at_once_download_once(debian: Path) -> None:
    slow = (debian / "bin" / "apt-get").read_text()
    sleep = shutil.which("sleep", path="/usr/bin:/bin")
    write_script(debian / "bin" / "apt-get", f"{slow}\n{sleep} 0.5")
    processes = [install_in_a_process() for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (debian / "calls").read_text().count("update") == 1


def test_a_kill_half_way_leaves_nothing_that_looks_finished(debian: Path) -> None:
    dpkg = (debian / "bin" / "dpkg-deb").read_text()
    sleep = shutil.which("sleep", path="/usr/bin:/bin")
    write_script(debian / "bin" / "dpkg-deb", f": > {debian}/unpacking; exec {sleep} 60")
    process = install_in_a_process()
    deadline = time.monotonic() + 30
    while not (debian / "unpacking").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert installed_binary("prometheus") is None

    write_script(debian / "bin" / "dpkg-deb", dpkg)
    install_tools()
    assert {path.name for path in (debian / "tools").iterdir()} == {".lock", "debian"}


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("apt-get") is None, reason="needs Debian or Ubuntu, and their package archive"
)
def test_the_real_packages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for folder in ("/usr/bin", "/usr/sbin"):
        for program in Path(folder).iterdir():
            if program.name not in (*PROGRAMS, "alertmanager"):
                (bin_folder / program.name).unlink(missing_ok=True)
                (bin_folder / program.name).symlink_to(program)
    monkeypatch.setenv("PATH", str(bin_folder))
    monkeypatch.setenv("TUNEWATCH_TOOLS", str(tmp_path / "tools"))

    for name in ("prometheus", "promtool", "alertmanager", "amtool"):
        program = find_binary(name)
        assert program.is_relative_to(tmp_path / "tools")
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        assert f"{name}, version" in said.stdout + said.stderr
