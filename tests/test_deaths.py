"""How trainings die: what the word about their end says, and what to do. Real runs where a CPU can die that way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TESTS
from test_ending import DIED, error, of

from tunewatch.probe.failure import classify, describe
from tunewatch.supervisor.ending import judge


@pytest.mark.parametrize(
    ("code", "reason"),
    [(-9, "killed_signal_9"), (137, "killed_signal_9"), (-15, "killed_signal_15"), (1, "unknown")],
)
def test_a_launcher_tells_of_the_signal(code, reason):
    """accelerate launch and the like: CalledProcessError, whose text names the command."""
    died = subprocess.CalledProcessError(code, ["python", "train.py", "--token", "CANARY"])
    assert classify(died) == reason
    assert "CANARY" not in str(describe(died))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("DataLoader worker (pid(s) 77) exited unexpectedly", "shm"),
        ("CUDA error: unspecified launch failure", "gpu_lost"),
        ("Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error", "gpu_lost"),
        ("CUDA error: an illegal instruction was encountered", "unknown"),  # as well a fault of the program
        ("No modules were targeted for adaptation.", "config"),
        ("Current device: bfloat16 is not supported", "config"),
        ("CUDA error: no kernel image is available for execution on the device", "config"),
        ("CUDA error: invalid device ordinal", "config"),
        ("Access to model a/b is restricted and you are not in the authorized list.", "auth"),
        ("CUDA error: device-side assert triggered", "data"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "oom_gpu"),
    ],
)
def test_texts(text, reason):
    assert classify(RuntimeError(text)) == reason


def test_the_kernels_killer_behind_a_launcher():
    died = of(DIED, returncode=1, exceptions=[error("killed_signal_9", "CalledProcessError")])
    assert judge(died).reason == "killed_signal_9"
    assert "most often the machine ran out of memory" in judge(died).message
    assert judge(of(died, oom_kills=1)).reason == "oom_host"


def test_a_lost_gpu_is_not_tried_again():
    ending = judge(of(DIED, returncode=1, exceptions=[error("gpu_lost")], last_resumable="checkpoint-10"))
    assert "Do not retry on this GPU: go on elsewhere, from checkpoint-10." in ending.advice


def test_a_damaged_checkpoint_names_the_one_to_take():
    corrupt = of(DIED, returncode=1, exceptions=[error("checkpoint_corrupt")], resume_pick="checkpoint-30")
    assert judge(of(corrupt, newest_complete="checkpoint-20")).advice == (
        "A resume would pick checkpoint-30 (incomplete); newest complete is checkpoint-20: "
        "resume from checkpoint-20 by name."
    )
    assert judge(corrupt).advice == "A resume would pick checkpoint-30 (incomplete); none is complete."


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ("checkpoint-19", " 1 step after checkpoint-19 is lost."),
        ("checkpoint-10", " 10 steps after checkpoint-10 are lost."),
    ],
)
def test_what_is_lost_is_counted(saved, words):
    assert judge(of(DIED, last_resumable=saved)).message.endswith(words)
    assert "lost" not in judge(of(DIED, last_resumable="checkpoint-20")).message


PROGRAM = f"""
import sys, time
sys.path.insert(0, {str(TESTS)!r})
import smalltrain
from pathlib import Path
from transformers import Trainer, TrainerCallback
class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep({{pause}})
one = Trainer(
    model=smalltrain.model(), args=smalltrain.arguments(Path({{output!r}}), **{{settings!r}}),
    train_dataset=smalltrain.Rows(), callbacks=[Slow()],
)
one.train(resume_from_checkpoint={{resume!r}})
"""


def run(machine, *, pause=0.0, resume=None, **settings):
    program = PROGRAM.format(
        pause=pause, output=str(machine.folder / "out"), settings=settings, resume=resume
    )
    script = machine.folder / "train.py"
    script.write_text(program)
    return machine.start("exec", "--no-linger", "--", sys.executable, str(script))


def ending(machine):
    return machine.verdict()["ending"]


@pytest.mark.slow
@pytest.mark.parametrize("through", ["past it", pytest.param("through it", marks=pytest.mark.slow)])
def test_a_checkpoint_on_sigterm_past_the_supervisor_and_through_it(machine, through):
    """train() returns, the exit code of the training is 0, and the run is far from done."""
    command = run(machine, pause=0.2, max_steps=200, enable_jit_checkpoint=True, save_strategy="no")
    machine.wait_step(3)
    child = machine.json("supervisor.json")["child_pid"]
    os.kill(child if through == "past it" else command.process.pid, signal.SIGTERM)
    assert command.wait() == 0
    end = ending(machine)
    assert (end["state"], end["reason"]) == ("failed", "preempted"), end
    saved = next((machine.folder / "out").glob("checkpoint-*")).name
    assert end["advice"].endswith(f"Resume from {saved}.")
    state = json.loads((machine.folder / "out" / saved / "trainer_state.json").read_text())
    step = machine.verdict()["step"]
    assert f"at step {step} of 200" in end["message"]
    lost = step - state["global_step"]
    assert lost in (0, 1)
    assert ("1 step after" in end["message"]) == (lost == 1)


@pytest.mark.slow
def test_a_resume_from_what_a_kill_left(machine):
    """The newest folder has no trainer_state.json; one before it is whole."""
    assert run(machine, save_steps=2).wait() == 0
    shutil.rmtree(machine.home)
    newest = machine.folder / "out" / "checkpoint-8"
    (newest / "trainer_state.json").unlink()
    command = run(machine, resume=True, max_steps=12)
    assert command.wait() == 1
    assert ending(machine)["reason"] == "checkpoint_corrupt"
    assert ending(machine)["advice"].startswith(
        "A resume would pick checkpoint-8 (incomplete); newest complete is checkpoint-6"
    )
    assert Path(machine.events("resume")[0]["output_dir"]) == machine.folder / "out"
