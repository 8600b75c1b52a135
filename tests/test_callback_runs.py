"""Our callback in scripts and notebooks: which training is of which run, and that each is watched to its end.

All with real processes: the cells are run by a Python of their own, and each run has the supervisor that the callback
started.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap

import psutil
import pytest
from harness import TESTS, Samples, scrape, wait_for

from tunewatch.probe.writer import process_start

SCRIPTS = TESTS / "scripts"


class Session:
    """One Python process that is fed with code."""

    def __init__(self, machine):
        self.machine = machine
        self.environment = {
            **machine.environment, "OUT": str(machine.folder), "PYTHONPATH": str(SCRIPTS), "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        self.log = machine.folder / "notebook.log"
        self.notebook: subprocess.Popen | None = None

    def script(self, code, **environment):
        """Run code as a script; returns what it said, one object a line."""
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "own_runs.py")], input=textwrap.dedent(code), text=True,
            capture_output=True, env={**self.environment, **environment}, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        return said(done.stdout)

    def open_notebook(self):
        with self.log.open("wb") as log:
            self.notebook = subprocess.Popen(
                [sys.executable, "-u", "-i", "-c", "from own_runs import *"], stdin=subprocess.PIPE, stdout=log,
                stderr=log, env=self.environment, text=True,
            )  # fmt: skip

    def cell(self, code):
        """Run code in the notebook; returns what it said. An exception is shown by it and survived."""
        before = len(said(self.log.read_text()))
        self.notebook.stdin.write(f"exec({textwrap.dedent(code)!r})\nsay(done=True)\n")
        self.notebook.stdin.flush()

        def answer():
            new = said(self.log.read_text())[before:]
            return new if new and new[-1] == {"done": True} else None

        return wait_for(answer, seconds=180, what=f"the end of {code}")[:-1]

    def close(self):
        if self.notebook is not None:
            self.notebook.kill()
            self.notebook.wait()

    # -- what came of it ----------------------------------------------------------------------------------

    def runs(self):
        return sorted(path.name for path in (self.machine.home / "runs").glob("*"))

    def json(self, run, name):
        return json.loads((self.machine.home / "runs" / run / name).read_text())

    def events(self, run, kind=None):
        lines = (self.machine.home / "runs" / run / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if kind in (None, event["event"])]

    def ended(self, run):
        """The verdict on a run, once its supervisor has given the last word and is gone."""
        path = self.machine.home / "runs" / run

        def last_word():
            if not (path / "verdict.json").exists() or not (path / "supervisor.json").exists():
                return None
            return self.json(run, "verdict.json")["ending"] and not self.supervised(run)

        wait_for(last_word, seconds=180, what=f"the end of {run}")
        return self.json(run, "verdict.json")

    def supervised(self, run):
        known = self.json(run, "supervisor.json")
        return process_start(known["pid"]) == known["process_start"] and not is_zombie(known["pid"])

    def curve(self, run):
        return [event["values"]["loss"] for event in self.events(run, "log") if "loss" in event["values"]]


def is_zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def said(text):
    found = [line[line.index('{"') :] for line in text.splitlines() if '{"' in line]
    return [json.loads(line) for line in found]


@pytest.fixture
def session(machine):
    session = Session(machine)
    yield session
    session.close()
    for path in machine.home.glob("runs/*/supervisor.json"):
        known = json.loads(path.read_text())
        if process_start(known["pid"]) == known["process_start"]:
            os.kill(known["pid"], 9)


def test_a_script_that_trains_twice_has_two_runs(session):
    told = session.script("""
        trainer = build(TunewatchCallback("twice", run_id="mine"))
        trainer.train()
        say(losses=losses(trainer))
        trainer.train()
        say(losses=losses(trainer))
    """)
    assert session.runs() == ["mine", "mine-2"]
    first, second = session.ended("mine"), session.ended("mine-2")
    for verdict, name in ((first, "mine"), (second, "mine-2")):
        assert (verdict["state"], verdict["step"], verdict["max_steps"]) == ("completed", 4, 4)
        assert verdict["name"] == "twice"
        assert session.json(name, "run.json")["sessions"] == 1
        assert len(session.events(name, "session")) == len(session.events(name, "exit")) == 1
    assert [session.curve("mine"), session.curve("mine-2")] == [one["losses"] for one in told]
    assert session.curve("mine") != session.curve("mine-2")
    assert first["loss"] == told[0]["losses"][-1]
    assert list((session.machine.home / "targets").iterdir()) == []


def test_a_training_that_resumes_goes_on_in_its_run(session):
    told = session.script("""
        trainer = build(TunewatchCallback(run_id="mine"))
        trainer.train()
        trainer.args.max_steps = 8
        trainer.train(resume_from_checkpoint=True)
        say(losses=losses(trainer))
        # The cell again, with the trainer built anew, and the checkpoint by name.
        again = build(TunewatchCallback(run_id="mine"), max_steps=10)
        again.train(resume_from_checkpoint=str(OUT / "out" / "checkpoint-8"))
        say(losses=losses(again)[8:])
    """)
    assert session.runs() == ["mine"]
    verdict = session.ended("mine")
    assert (verdict["state"], verdict["step"], verdict["max_steps"]) == ("completed", 10, 10)
    assert session.json("mine", "run.json")["sessions"] == 3
    assert [event["step"] for event in session.events("mine", "train_begin")] == [0, 4, 8]
    sessions = [event["session"] for event in session.events("mine", "session")]
    assert len(set(sessions)) == 3
    assert [event["session"] for event in session.events("mine", "train_begin")] == sessions
    assert session.json("mine", "supervisor.json")["session"] == sessions[-1]
    assert session.curve("mine") == told[0]["losses"] + told[1]["losses"]


@pytest.mark.slow
def test_the_supervisor_of_a_resumed_training_counts_one_resume(session):
    session.open_notebook()
    session.cell('t = build(TunewatchCallback(run_id="mine")); t.train()')
    session.ended("mine")
    session.cell("t.args.max_steps = 8")
    session.cell("t.add_callback(type('Wait', (TrainerCallback,), {'on_step_begin': wait_for_file})())")
    session.notebook.stdin.write("t.train(resume_from_checkpoint=True)\n")
    session.notebook.stdin.flush()

    def resumed():
        known = session.json("mine", "supervisor.json")
        try:
            samples = Samples(scrape(known["address"]))
        except OSError:
            return None
        return samples if samples.get("resumes_total") == 1.0 else None

    samples = wait_for(resumed, what="the resume in a scrape")
    assert samples.get("steps_total") == 0
    assert samples.get("run_state", state="training") == 1.0
    (session.machine.folder / "go").touch()
    wait_for(lambda: session.json("mine", "verdict.json")["ending"], seconds=120, what="the end of mine")
    with contextlib.suppress(OSError):  # who has scraped once is waited for
        for _ in range(3):
            scrape(session.json("mine", "supervisor.json")["address"])
    assert session.ended("mine")["state"] == "completed"
    assert session.json("mine", "verdict.json")["step"] == 8


@pytest.mark.slow
def test_a_cell_that_is_run_again(session):
    session.open_notebook()
    cell = """
        trainer = build(TunewatchCallback(run_id="cell"))
        trainer.train()
        say(losses=losses(trainer), run=trainer.callback_handler.callbacks[-2].run_id)
    """
    first = session.cell(cell)
    assert session.ended("cell")["state"] == "completed"  # the notebook lives on, its run has ended
    session.cell("import importlib, tunewatch.probe.callback as module; importlib.reload(module)")
    session.cell("TunewatchCallback = module.TunewatchCallback")
    second = session.cell(cell)
    third = session.cell("trainer.train(); say(losses=losses(trainer))")
    assert session.runs() == ["cell", "cell-2", "cell-3"]
    for name, told in (("cell", first), ("cell-2", second), ("cell-3", third)):
        verdict = session.ended(name)
        assert (verdict["state"], verdict["step"]) == ("completed", 4)
        assert session.curve(name) == told[0]["losses"]
        assert session.json(name, "run.json")["sessions"] == 1
    assert session.notebook.poll() is None


def test_a_training_that_failed_does_not_taint_the_next(session):
    session.open_notebook()
    session.cell('t = build(Stop(), TunewatchCallback(run_id="a")); session = None')
    session.notebook.stdin.write("t.train()\n")  # raises, and the notebook goes on
    session.notebook.stdin.flush()
    wait_for(lambda: (session.machine.home / "runs/a/verdict.json").exists(), what="a run")
    wait_for(lambda: session.json("a", "verdict.json")["ending"], what="its end")
    session.cell("t.remove_callback(Stop); t.train()")
    assert session.ended("a-2")["state"] == "completed"
    verdict = session.json("a", "verdict.json")
    assert (verdict["state"], verdict["ending"]["reason"]) == ("failed", "unknown")
    assert "ZeroDivisionError" in verdict["ending"]["message"]


@pytest.mark.parametrize("what", ["evaluate()", "predict(Rows())"])
def test_an_evaluation_alone_is_no_failed_run(session, what):
    session.script(f'build(TunewatchCallback(run_id="only")).{what}')
    verdict = session.ended("only")
    assert (verdict["state"], verdict["ending"]["reason"]) == ("completed", "")
    assert "nothing was trained" in verdict["ending"]["message"]


def test_an_evaluation_after_the_training_begins_no_run(session):
    session.script("""
        build(TunewatchCallback(run_id="a")).train()
        build(TunewatchCallback(run_id="a")).evaluate()
    """)
    assert session.runs() == ["a"]
    assert session.ended("a")["state"] == "completed"


@pytest.mark.slow
def test_a_search_makes_a_run_of_each_trial(session):
    """As `Trainer.hyperparameter_search` does it: the same trainer trains anew, from a model that is made anew."""
    told = session.script("""
        trainer = build(TunewatchCallback(run_id="trial"), model=Net, save_strategy="no")
        for rate in (0.1, 0.01, 0.001):
            trainer.args.learning_rate = rate
            trainer.train()
            say(losses=losses(trainer))
    """)
    assert session.runs() == ["trial", "trial-2", "trial-3"]
    for run, one in zip(session.runs(), told, strict=True):
        assert session.ended(run)["state"] == "completed"
        assert session.curve(run) == one["losses"]
    rates = [session.json(run, "run.json")["info"]["learning_rate"] for run in session.runs()]
    assert [float(rate) for rate in rates] == [0.1, 0.01, 0.001]


@pytest.mark.slow
def test_trainers_one_after_the_other_and_one_within_another(session):
    session.script("""
        class Reward(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 2:
                    build(TunewatchCallback(run_id="reward"), folder="reward", max_steps=3).train()

        first = build(TunewatchCallback(run_id="first"), folder="first")
        second = build(Reward(), TunewatchCallback(run_id="second"), folder="second", max_steps=6)
        first.train()
        second.train()
        first.evaluate()
    """)
    assert session.runs() == ["first", "second"]  # what trains within another training is part of that
    assert [session.ended(run)["step"] for run in session.runs()] == [4, 6]
    assert {session.json(run, "verdict.json")["state"] for run in session.runs()} == {"completed"}
    assert session.events("first", "evaluate") == []  # its run was over


@pytest.mark.parametrize("how", ["TunewatchCallback", "TunewatchCallback(), TunewatchCallback()"])
def test_as_a_class_and_twice_on_one_trainer(session, how):
    session.script(f"build({how}).train()", TUNEWATCH_RUN_ID="env")
    assert session.runs() == ["env"]
    assert session.ended("env")["state"] == "completed"
    assert len(session.curve("env")) == 4


def test_workers_and_restored_callback_states(session):
    session.script("""
        options = dict(dataloader_num_workers=2, dataloader_persistent_workers=True,
                       restore_callback_states_from_checkpoint=True)
        build(TunewatchCallback(run_id="w"), **options).train()
        build(TunewatchCallback(run_id="w"), max_steps=8, **options).train(resume_from_checkpoint=True)
    """)
    assert session.runs() == ["w"]
    verdict = session.ended("w")
    assert (verdict["state"], verdict["step"]) == ("completed", 8)
    assert len({event["pid"] for event in session.events("w", "session")}) == 1
    assert len(session.curve("w")) == 8


@pytest.mark.slow
def test_a_train_of_the_users_own(session):
    """One that calls transformers' is watched as ever; one that does not is known by the callback's events alone."""
    session.script("""
        class Calls(Trainer):
            def train(self, *args, **kwargs):
                return super().train(*args, **kwargs)

        class Own(Trainer):
            def train(self):
                for name in ("train_begin", "step_begin", "step_end", "train_end"):
                    self.state.global_step += name == "step_end"
                    self.state.max_steps = 1
                    getattr(self.callback_handler, f"on_{name}")(self.args, self.state, self.control)
                self.state.global_step = 0

        build(TunewatchCallback(run_id="calls"), cls=Calls, folder="calls").train()
        own = build(TunewatchCallback(run_id="own"), cls=Own, folder="own")
        own.train()
        own.train()
    """)
    assert session.runs() == ["calls", "own", "own-2"]
    assert [session.ended(run)["state"] for run in session.runs()] == ["completed"] * 3
    visible = [session.events(run, "train_begin")[0]["nan_visibility"] for run in session.runs()]
    assert visible == ["each step", "logs only", "logs only"]


def test_nothing_changes_below_a_supervisor(session, machine):
    """`exec` watches the whole command: one run, whatever it trains."""
    code = "t = build(TunewatchCallback(run_id='no')); t.train(); t.train(); build(folder='b', max_steps=3).train()"
    (machine.folder / "go.py").write_text(f"from own_runs import *\n{code}\n")
    status, output = machine.run(
        "exec", "--no-linger", "--", sys.executable, str(machine.folder / "go.py"), OUT=str(machine.folder),
        PYTHONPATH=str(SCRIPTS),
    )  # fmt: skip
    assert status == 0, output[-3000:]
    assert len(session.runs()) == 1
    assert [event["max_steps"] for event in machine.events("train_begin")] == [4, 4, 3]
    assert len(machine.events("session")) == 1
    assert machine.verdict()["state"] == "completed"
