"""Processes of a run: real ones that do not want to end, and made-up cgroup trees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from harness import wait_for

from tunewatch.probe.writer import process_start
from tunewatch.supervisor.process import Adopted, Child, OomKills, resident_bytes

ENGINES = ("SLURM_JOB_ID", "RAY_JOB_ID", "KUBERNETES_SERVICE_HOST")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_python(program):
    """Run a program in an interpreter of its own: it becomes a subreaper and ends what is below it."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


class TestChild:
    def test_code_session_and_log(self, tmp_path):
        log = tmp_path / "child.log"
        program = "import os, sys; print(os.getpid() == os.getsid(0), os.environ['A']); sys.exit(7)"
        child = Child([sys.executable, "-c", program], {**os.environ, "A": "b"}, log)
        wait_for(child.poll, seconds=20)
        assert child.returncode == 7
        assert log.read_text() == "True b\n"

    def test_signals(self):
        child = Child(["sleep", "300"], os.environ)
        assert not child.poll()
        assert child.returncode is None
        child.send(signal.SIGTERM)
        wait_for(child.poll, seconds=20)
        assert child.returncode == -15
        child.send(signal.SIGTERM)  # gone: no error
        child.send(signal.SIGINT, group=True)

    def test_a_group_gets_it_all(self, tmp_path):
        child = Child(["sh", "-c", f"sleep 300 & echo $! > {tmp_path}/pid; wait"], os.environ)
        inner = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()))
        child.send(signal.SIGKILL, group=True)
        wait_for(lambda: child.poll() and not alive(inner), seconds=20)

    def test_what_can_not_be_run(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            Child([str(tmp_path / "nothing")], os.environ)
        (tmp_path / "file").write_text("")
        with pytest.raises(PermissionError):
            Child([str(tmp_path / "file")], os.environ)


class TestAdopted:
    def test_its_death_is_seen_and_its_code_is_not(self):
        process = subprocess.Popen(["sleep", "300"])
        adopted = Adopted(process.pid, process_start(process.pid))
        assert not adopted.poll()
        adopted.send(signal.SIGTERM)
        wait_for(adopted.poll, seconds=20, what="a zombie counts as dead")
        process.wait()
        assert adopted.poll()
        assert adopted.returncode is None
        adopted.send(signal.SIGTERM)

    def test_a_pid_that_was_used_again_is_another_process(self):
        process = subprocess.Popen(["sleep", "300"])
        try:
            other = Adopted(process.pid, process_start(process.pid) - 1)
            assert other.poll()
            other.send(signal.SIGKILL)
            time.sleep(0.1)
            assert process.poll() is None, "the stranger was not signalled"
        finally:
            process.kill()
            process.wait()

    def test_a_pid_that_nobody_has(self):
        process = subprocess.Popen(["true"])
        process.wait()
        assert Adopted(process.pid, None).poll()


def test_descendants_in_sessions_of_their_own_are_ended():
    """As torchrun starts its ranks: each in its own session, and these do not react to SIGTERM."""
    program = f"""
import subprocess, sys, time, os
from tunewatch.supervisor.process import become_subreaper, descendants, end_descendants
become_subreaper()
launcher = '''
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True, stdout=subprocess.PIPE)
         for _ in range(2)]
for rank in ranks:
    rank.stdout.readline()
print(*(rank.pid for rank in ranks), flush=True)
sys.stdin.read()
'''
parent = subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
ranks = [int(pid) for pid in parent.stdout.readline().split()]
parent.kill()
parent.wait()
assert {{process.pid for process in descendants()}} == set(ranks), descendants()
print(*ranks, end_descendants(0.5), len(descendants()))
"""
    *ranks, ended, left = map(int, run_python(program).stdout.split())
    assert (ended, left) == (2, 0)
    assert not any(alive(pid) for pid in ranks)


def test_what_reacts_to_sigterm_is_given_the_time_to():
    program = """
import subprocess, sys, time
from tunewatch.supervisor.process import end_descendants
polite = '''
import signal, sys, time
def leave(*_):
    time.sleep(0.3); print("saved", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, leave); print("ready", flush=True); time.sleep(300)
'''
child = subprocess.Popen([sys.executable, "-c", polite], stdout=subprocess.PIPE, text=True, start_new_session=True)
child.stdout.readline()
end_descendants(20.0)
print(child.stdout.readline())
"""
    assert run_python(program).stdout.strip() == "saved"


def test_orphans_are_collected_and_the_childs_code_is_kept():
    program = """
import subprocess, sys, time, os
import psutil
from tunewatch.supervisor.process import Child, become_subreaper, reap_orphans
become_subreaper()
child = Child(["sh", "-c", "(sh -c 'exit 3' &) ; (sh -c 'exit 4' &) ; sleep 0.3; exit 7"], os.environ)
give_up = time.monotonic() + 20
while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
    reap_orphans(keep=child.pid)
    assert time.monotonic() < give_up
    time.sleep(0.02)
reap_orphans(keep=child.pid)
assert child.poll()
reap_orphans()
print(child.returncode, len(psutil.Process().children(recursive=True)))
"""
    assert run_python(program).stdout.split() == ["7", "0"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
@pytest.mark.parametrize(("engine", "outlives"), [({}, True), ({"SLURM_JOB_ID": "7"}, False)])
def test_inside_an_allocation_nothing_outlives_a_killed_supervisor(engine, outlives):
    program = """
import os, signal, sys
from tunewatch.supervisor.process import Child
child = Child(["sleep", "300"], os.environ)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    outside = {name: value for name, value in os.environ.items() if name not in ENGINES}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**outside, **engine}
    )
    pid = int(process.stdout.readline())
    process.wait()
    process.stdout.close()
    try:
        if outlives:
            time.sleep(0.3)
            assert alive(pid)
        else:
            wait_for(lambda: not alive(pid), seconds=20)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_memory():
    assert resident_bytes(os.getpid()) > 5_000_000
    process = subprocess.Popen(["true"])
    process.wait()
    assert resident_bytes(process.pid) is None


class Tree:
    """A made-up /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, folder):
        self.root = folder / "cgroup"
        self.proc = folder / "proc"
        self.root.mkdir()

    def v2(self, group, kills, *, base=""):
        path = self.root / base / group / "memory.events"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"low 0\nhigh 0\nmax 12\noom 3\noom_kill {kills}\noom_group_kill 9\n")

    def v1(self, group, kills):
        path = self.root / "memory" / group / "memory.oom_control"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")

    def watch(self, membership):
        self.proc.write_text(membership)
        return OomKills(self.proc, self.root)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


class TestOomKills:
    def test_v2_what_happened_before_does_not_count(self, tree):
        tree.v2("job/step", 4)
        kills = tree.watch("0::/job/step\n")
        assert kills.count() == 0
        tree.v2("job/step", 6)
        assert kills.count() == 2

    def test_v2_groups_above_tell_of_other_people(self, tree):
        """A kill is added to every group above that of its victim: user.slice counts everybody's."""
        tree.v2("user.slice", 0)
        tree.v2("user.slice/mine", 0)
        kills = tree.watch("0::/user.slice/mine\n")
        tree.v2("user.slice", 5)
        assert kills.count() == 0
        tree.v2("user.slice/mine", 1)
        assert kills.count() == 1

    def test_v2_without_a_memory_controller_of_its_own_the_group_above_counts(self, tree):
        tree.v2("slice", 0)
        (tree.root / "slice" / "scope").mkdir()
        kills = tree.watch("0::/slice/scope\n")
        tree.v2("slice", 1)
        assert kills.count() == 1

    @pytest.mark.parametrize("membership", ["0::/\n", "0::/docker/4f1a\n"])
    def test_v2_in_a_container_the_own_group_is_the_root(self, tree, membership):
        tree.v2("", 0)
        kills = tree.watch(membership)
        tree.v2("", 1)
        assert kills.count() == 1

    def test_v1_slurm_counts_in_the_leaf(self, tree):
        """The limit sits on step_batch, the kill is counted in task_0."""
        for group in ("slurm/job_7", "slurm/job_7/step_batch", "slurm/job_7/step_batch/task_0"):
            tree.v1(group, 0)
        kills = tree.watch("9:cpu,cpuacct:/x\n4:memory:/slurm/job_7/step_batch/task_0\n0::/system.slice\n")
        tree.v1("slurm/job_7", 3)
        assert kills.count() == 0
        tree.v1("slurm/job_7/step_batch/task_0", 1)
        assert kills.count() == 1

    @pytest.mark.parametrize("membership", ["4:memory:/\n0::/\n", "4:memory:/docker/4f1a\n0::/docker/4f1a\n"])
    def test_v1_in_a_container(self, tree, membership):
        tree.v1("", 2)
        kills = tree.watch(membership)
        tree.v1("", 3)
        assert kills.count() == 1

    def test_hybrid_with_memory_in_v2(self, tree):
        tree.v2("scope", 0, base="unified")
        kills = tree.watch("3:freezer:/\n0::/scope\n")
        tree.v2("scope", 1, base="unified")
        assert kills.count() == 1

    def test_nothing_to_read(self, tree):
        assert tree.watch("0::/gone\n").count() == 0
        assert tree.watch("").count() == 0
        assert OomKills(tree.root / "nowhere", tree.root).count() == 0

    def test_a_group_that_is_removed(self, tree):
        tree.v2("job", 0)
        kills = tree.watch("0::/job\n")
        (tree.root / "job" / "memory.events").unlink()
        assert kills.count() == 0

    def test_this_machine(self):
        assert OomKills().count() == 0
