"""`tunewatch exec` is transparent: other interpreters, programs that train nothing, terminals and signals."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import sysconfig
import termios
from pathlib import Path

import psutil
import pytest
from harness import wait_for

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = SCRIPTS / "plain_train.py"
BARE = sys._base_executable  # the interpreter below our venv: it has neither tunewatch nor torch
OURS = ("tunewatch", "_editable_impl_tunewatch", "prometheus_client", "pynvml", "nvidia_ml_py")
"""What only tunewatch brings along; the rest of its requirements is the training stack's, too."""


def ending(machine):
    (path,) = machine.home.glob("runs/*/verdict.json")
    verdict = json.loads(path.read_text())
    return verdict["state"], verdict["ending"]["reason"]


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- another interpreter ----------------------------------------------------------------------------------


@pytest.fixture
def other_python(tmp_path):
    """A venv of the user's own, with the training stack and without tunewatch and what it needs."""
    venv = tmp_path / "venv"
    subprocess.run([BARE, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    folder = next((venv / "lib").glob("python*/site-packages"))
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(OURS) and path.suffix != ".pth" and path.name != "__pycache__":
            (folder / path.name).symlink_to(path)
    return venv / "bin" / "python"


@pytest.mark.parametrize(
    ("script", "steps"),
    [("plain_train.py", 6), pytest.param("dpo_train.py", 4, marks=pytest.mark.slow)],
)
def test_a_training_in_an_environment_that_has_no_tunewatch(machine, other_python, script, steps):
    looked = subprocess.run(
        [other_python, "-c", "import torch, trl, importlib.util as u; print([m for m in ('tunewatch', "
         "'prometheus_client', 'pynvml') if u.find_spec(m)])"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert looked.stdout == "[]\n"
    code, output = machine.run(
        "exec", "--no-linger", "--", str(other_python), str(SCRIPTS / script), str(machine.folder / "out")
    )
    assert code == 0, output[-3000:]
    assert f"trained to {steps}\n" in output
    assert ending(machine) == ("completed", "")
    assert machine.verdict()["step"] == steps
    assert isinstance(machine.verdict()["loss"], float)
    (begin,) = machine.events("train_begin")
    assert begin["trainer"] == ("Trainer" if script == "plain_train.py" else "DPOTrainer")
    assert "outside only" not in output


def test_the_childs_interpreter_is_as_without_us(machine, tmp_path):
    """What it can import, where it looks, what it is called, and the customizations of its own that it runs."""
    library, script = tmp_path / "library", tmp_path / "deep" / "script.py"
    library.mkdir()
    script.parent.mkdir()
    (library / "yaml.py").write_text("HERE = 'theirs'\n")
    (library / "sitecustomize.py").write_text("import sys; sys.ours = ['site']\n")
    (library / "usercustomize.py").write_text("import sys; sys.ours.append('user')\n")
    script.write_text(
        "import __main__, importlib.util, json, os, sys, yaml\n"
        "path = [p for p in sys.path if not p.endswith(os.sep + 'attach')]\n"
        "print(json.dumps([path, __main__.__file__, sys.argv, sys.ours, yaml.HERE, sys.flags[:], sys.orig_argv,\n"
        "    importlib.util.find_spec('tunewatch') is None, os.environ['PYTHONPATH'].split(os.pathsep)[-1]]))\n"
    )
    environment = {"PYTHONPATH": str(library)}
    command = [BARE, str(script), "--name", "a b", "--", "-x"]
    without = subprocess.run(
        command,
        env={**machine.environment, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    code, output = machine.run("exec", "--no-linger", "--", *command, **environment)
    assert code == 0
    assert next(line for line in output.splitlines() if line.startswith("[")) + "\n" == without.stdout
    expected = json.loads(without.stdout)
    assert expected[0][:2] == [str(script.parent), str(library)]
    assert expected[3:5] == [["site", "user"], "theirs"]


LOST = {
    "isolated": (sys.executable, "-I", "SCRIPT"),
    "no_site": (sys.executable, "-S", "SCRIPT"),
    "no_environment": ("env", "-i", "HOME=/nowhere", sys.executable, "SCRIPT"),
}


@pytest.mark.parametrize("command", LOST.values(), ids=LOST)
@pytest.mark.parametrize("code", [0, 3])
def test_where_the_hook_can_not_reach_the_end_is_right_all_the_same(machine, tmp_path, command, code):
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.exit({code})\n")
    found, output = machine.run(
        "exec", "--no-linger", "--", *[str(script) if part == "SCRIPT" else part for part in command]
    )
    assert found == code
    assert ending(machine) == (("completed", "") if code == 0 else ("failed", "unknown"))
    assert output.count("watched from outside only") == 1
    assert "python -I, -E, -S" in output
    assert machine.verdict()["health"] == ("unknown" if code == 0 else "bad")
    assert not (machine.run_folder() / "events.jsonl").exists()


# -- programs that are no trainer -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        (("/bin/true",), 0, ("completed", "")),
        (("/bin/false",), 1, ("failed", "unknown")),
        (("sleep", "0"), 0, ("completed", "")),
        (("sh", "-c", "exit 3"), 3, ("failed", "unknown")),
        (("bash", "-c", "exit 77"), 77, ("failed", "unknown")),
        (("sh", "-c", "exit 255"), 255, ("failed", "unknown")),
        (("sh", "-c", "kill -9 $$"), 137, ("failed", "killed_signal_9")),
        (("sh", "-c", "kill -SEGV $$"), 139, ("failed", "killed_signal_11")),
        (("sh", "-c", "sh -c 'kill -USR1 $$'"), 138, ("failed", "killed_signal_10")),
        (("/no/such/program",), 127, ("failed", "missing_file")),
        (("/etc/hostname",), 126, ("failed", "config")),
        (("/tmp",), 126, ("failed", "config")),
        (("/etc/hostname/x",), 126, ("failed", "config")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and len(value) < 4 else str(value),
)  # fmt: skip
def test_exit_codes_are_the_commands_own(machine, command, code, expected):
    found, output = machine.run("exec", "--no-linger", "--", *command)
    assert found == code, output
    assert ending(machine) == expected
    assert "Traceback" not in output


def test_a_file_that_no_kernel_runs(machine, tmp_path):
    (tmp_path / "text").write_text("no program\n")
    (tmp_path / "text").chmod(0o755)
    code, output = machine.run("exec", "--no-linger", "--", str(tmp_path / "text"))
    assert code == 126
    assert "can not be executed (Exec format error)" in output


def test_a_reader_that_leaves_early(machine):
    """`tunewatch exec -- cmd 2>&1 | head -1`: the command dies of its own broken pipe, and its exit code is told."""
    line = f"{sys.executable} -m tunewatch exec --no-linger -- yes 2>&1 | head -2; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], env=machine.environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "141"  # 128 + SIGPIPE, as without us
    assert done.stderr == ""
    assert ending(machine) == ("failed", "killed_signal_13")


@pytest.mark.parametrize("code", [0, 5])
def test_a_closed_stderr_changes_no_exit_code(machine, code):
    command = f"{sys.executable} -m tunewatch exec --no-linger -- sh -c 'sleep 1; exit {code}'"
    line = f"{command} 2>&1 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], env=machine.environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{code}\n"


NESTED = {
    "script": "{python} {plain} out --steps 4\nsleep 0.5\necho after\n",
    "make": "printf 'all:\\n\\t@{python} {plain} out --steps 4\\n\\t@echo after\\n' > Makefile && make -s\n",
    "subprocess": "{python} -c \"import subprocess, sys; subprocess.run([sys.executable, '{plain}', 'out', "
    "'--steps', '4'], check=True); print('after')\"\n",
}


@pytest.mark.parametrize(
    "kind", ["script", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("make", "subprocess"))]
)
def test_a_training_below_another_program(machine, tmp_path, kind):
    (tmp_path / "run.sh").write_text(NESTED[kind].format(python=sys.executable, plain=PLAIN))
    code, output = machine.run("exec", "--no-linger", "--", "bash", str(tmp_path / "run.sh"))
    assert code == 0, output[-3000:]
    assert output.index("trained to 4") < output.index("after")
    assert ending(machine) == ("completed", "")
    assert machine.verdict()["step"] == 4
    assert "outside only" not in output


# -- terminals --------------------------------------------------------------------------------------------


class Terminal:
    """`tunewatch exec` as the foreground job of a terminal of its own, which we are the user of."""

    def __init__(self, machine, *command, options=("--no-linger",), shell=False):
        self.machine = machine
        arguments = [sys.executable, "-m", "tunewatch", "exec", *options, "--", *command]
        if shell:
            arguments = ["bash", "--norc", "--noprofile", "-i"]
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(machine.folder)
            os.execve(
                arguments[0] if not shell else "/bin/bash", arguments, {**machine.environment, "PS1": "$ "}
            )
        self.text = ""

    def read(self):
        with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
            while select.select([self.master], [], [], 0)[0]:
                more = os.read(self.master, 65536).decode(errors="replace")
                if not more:
                    break
                self.text += more
        return self.text

    def wait_text(self, words, seconds=60.0):
        wait_for(
            lambda: words in self.read(), seconds=seconds, what=f"{words!r}; so far {self.text[-2000:]!r}"
        )

    def type(self, text):
        os.write(self.master, text.encode())

    def wait(self, seconds=60.0):
        """The exit code, as a shell gives it."""
        found = []

        def ended():
            self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                found.append(os.waitstatus_to_exitcode(status))
            return pid

        wait_for(ended, seconds=seconds, what=f"its end; so far {self.text[-2000:]!r}")
        self.read()
        self.pid = 0
        return found[0] if found[0] >= 0 else 128 - found[0]

    def close(self):
        with contextlib.suppress(OSError):
            os.close(self.master)
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def terminal(machine):
    opened = []

    def open_terminal(*command, **more):
        opened.append(Terminal(machine, *command, **more))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_questions_and_the_debugger_work_on_a_terminal(terminal, machine, tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(
        "import os, sys\n"
        "print('tty', [os.isatty(n) for n in range(3)], os.get_terminal_size())\n"
        "name = input('your name? ')\n"
        "print('hello', name)\n"
        "breakpoint()\n"
        "print('goes on')\n"
    )
    one = terminal(sys.executable, str(script))
    one.wait_text("your name? ")
    one.type("Ada\r")
    one.wait_text("hello Ada")
    one.wait_text("(Pdb)")
    one.type("p 6 * 7\r")
    one.wait_text("42")
    one.type("c\r")
    assert one.wait() == 0
    assert "tty [True, True, True]" in one.text
    assert "goes on" in one.text
    assert ending(machine) == ("completed", "")


COUNTS = """
import signal, sys, time
got = []
signal.signal(signal.{name}, lambda number, frame: (got.append(number), print("came", flush=True)))
print("ready", flush=True)
until = time.monotonic() + 60
while not got and time.monotonic() < until:
    time.sleep(0.05)
time.sleep(1.0)
print("got", len(got), flush=True)
"""


def test_ctrl_c_on_a_terminal_reaches_the_training_once(terminal, machine):
    one = terminal(sys.executable, "-c", COUNTS.format(name="SIGINT") + "raise KeyboardInterrupt\n")
    one.wait_text("ready")
    one.type("\x03")
    assert one.wait() == 130
    assert "got 1\r\n" in one.text
    assert ending(machine) == ("cancelled", "cancelled")


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_cancels_a_training(terminal, machine):
    one = terminal(sys.executable, str(PLAIN), "out", "--steps", "5000", "--step-seconds", "0.02")
    machine.wait_step(3)
    one.type("\x03")
    assert one.wait() == 130
    assert ending(machine) == ("cancelled", "cancelled")


def test_ctrl_backslash_ends_the_training_and_not_its_supervisor(terminal, machine):
    one = terminal("sh", "-c", "ulimit -c 0; echo ready; sleep 300 & wait")
    one.wait_text("ready")
    one.type("\x1c")
    assert one.wait() == 131
    assert ending(machine) == ("failed", "killed_signal_3")


def test_a_new_window_size_is_passed_on(terminal):
    program = COUNTS.format(name="SIGWINCH") + "import os; print(tuple(os.get_terminal_size()), flush=True)\n"
    one = terminal(sys.executable, "-c", program)
    one.wait_text("ready")
    fcntl.ioctl(one.master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
    assert one.wait() == 0
    assert "(111, 33)" in one.text


def test_ctrl_z_stops_the_training_and_fg_continues_it(terminal, machine):
    """And its ranks, which are in sessions of their own."""
    one = terminal(shell=True)
    program = "import subprocess; subprocess.run(['sleep', '300'], start_new_session=True)"
    one.type(f'{sys.executable} -m tunewatch exec --no-linger -- {sys.executable} -c "{program}"\r')
    child = psutil.Process(wait_for(lambda: machine.json("supervisor.json"), what="the run")["child_pid"])
    inner = wait_for(child.children, what="the inner process")[0]

    def stopped(count):
        return [p.status() for p in (child, inner)].count(psutil.STATUS_STOPPED) == count

    one.type("\x1a")
    one.wait_text("Stopped")
    wait_for(lambda: stopped(2), what="both stopped")
    one.type("fg\r")
    wait_for(lambda: stopped(0), what="both going on")
    one.type("\x03")
    wait_for(lambda: machine.verdict()["state"] == "cancelled", what="cancelled")
    one.type("exit\r")
    one.wait()


def test_stdout_is_the_commands_alone(machine):
    done = subprocess.run(
        [sys.executable, "-m", "tunewatch", "exec", "--no-linger", "--", "printf", "\\033[31mred\\033[0m"],
        env=machine.environment, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == b"\x1b[31mred\x1b[0m"
    assert all(line.startswith(b"tunewatch: ") for line in done.stderr.splitlines())


# -- signals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sent"), [("SIGTERM", 3), ("SIGUSR1", 1), ("SIGUSR2", 1), ("SIGHUP", 2)])
def test_a_signal_is_passed_on(machine, name, sent):
    """SIGTERM and SIGHUP once, however often they come: a second one would disturb the clean-up."""
    command = machine.start("exec", "--no-linger", "--", sys.executable, "-c", COUNTS.format(name=name))
    wait_for(lambda: "ready" in command.output, what="ready")
    command.send(getattr(signal, name))
    wait_for(lambda: "came" in command.output, what="the first one")
    for _ in range(sent - 1):
        command.send(getattr(signal, name))
    assert command.wait() == 0
    assert "got 1\n" in command.output


@pytest.mark.slow
def test_a_training_below_a_shell_has_the_whole_grace_after_sigterm(machine):
    """The shell dies at once; the training, which it did not tell, saves for 3 s."""
    command = machine.start(
        "exec", "--no-linger", "--grace", "60s", "--", "bash", "-c",
        f"{sys.executable} {PLAIN} out --steps 5000 --step-seconds 0.02 --save-on-term; echo never",
    )  # fmt: skip
    machine.wait_step(2)
    command.send(signal.SIGTERM)
    assert command.wait() == 143
    assert (machine.folder / "out" / "saved").read_text() == "whole"
    assert ending(machine) == ("failed", "preempted")


@pytest.mark.parametrize("nohup", [False, True], ids=["plain", "nohup"])
def test_a_closed_terminal(terminal, machine, nohup):
    """It ends what runs in it, as without us; under nohup both go on."""
    one = terminal(shell=True)
    program = f"{sys.executable} {PLAIN} out --steps 5000 --step-seconds 0.02"
    prefix, suffix = ("nohup ", " > log 2>&1") if nohup else ("", "")
    one.type(f"{prefix}{sys.executable} -m tunewatch exec --no-linger -- {program}{suffix}\r")
    machine.wait_step(2)
    os.close(one.master)
    if not nohup:
        wait_for(lambda: machine.verdict()["state"] == "failed", what="the end")
        assert ending(machine) == ("failed", "hangup")
        assert "nohup" in machine.verdict()["ending"]["advice"]
        wait_for(lambda: not alive(machine.json("supervisor.json")["pid"]), what="the supervisor's end")
        return
    step = machine.verdict()["step"]
    wait_for(lambda: not alive(one.pid), what="the shell's end")
    machine.wait_step(step + 20)
    supervisor = machine.json("supervisor.json")
    os.kill(supervisor["pid"], signal.SIGTERM)
    wait_for(lambda: not alive(supervisor["pid"]), what="the supervisor's end")
    assert ending(machine) == ("failed", "preempted")


def test_what_was_ignored_before_stays_ignored(machine):
    """Whoever starts it with SIGHUP or SIGINT ignored (nohup, a script's background job) wants the training so."""
    program = "import signal; print([signal.getsignal(n) == signal.SIG_IGN for n in (1, 2, 3, 15)])"
    line = f"trap '' HUP INT; exec {sys.executable} -m tunewatch exec --no-linger -- {sys.executable} -c '{program}'"
    done = subprocess.run(
        ["bash", "-c", line], env=machine.environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[True, True, False, False]\n"


@pytest.mark.slow
def test_an_adopted_training_has_right_counters(machine):
    """SIGKILL of the supervisor leaves the training; the next one has its counters, and its end."""
    command = machine.exec_tiny("--steps", "60", "--step-seconds", "0.1")
    machine.wait_step(5)
    command.send(signal.SIGKILL)
    command.process.wait()
    assert alive(machine.json("supervisor.json")["child_pid"])
    adopted = machine.start("adopt", machine.run_folder().name, "--no-linger")
    wait_for(lambda: machine.json("supervisor.json")["pid"] == adopted.process.pid, what="the new supervisor")
    wait_for(lambda: machine.scrape().get("step"), what="a scrape that has read the pulse")
    samples = machine.scrape()
    assert samples.get("steps_total") == samples.get("step") >= 5
    assert samples.get("samples_total") == pytest.approx(4 * samples.get("step"), abs=4)
    assert adopted.wait() == 0, adopted.output[-3000:]
    assert ending(machine) == ("completed", "")
