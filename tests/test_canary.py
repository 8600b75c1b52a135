"""Text of the data stays with its owner: a word from it must turn up nowhere in what tunewatch tells."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Command, Machine, scrape, wait_for

from tunewatch.finetune.tiny import CHAT_TEMPLATE, build_tiny_model

CANARY = "canary-9be27f"


def chat(question: object, answer: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def start_job(machine: Machine, model: Path, rows: list[dict[str, Any]]) -> Command:
    """`tunewatch train` on rows of which the last four are for evaluation."""
    config = {
        "name": "sums",
        "model": str(model),
        "dataset": {
            "path": write_rows(machine.folder / "train.jsonl", rows[:-4]),
            "eval_path": write_rows(machine.folder / "eval.jsonl", rows[-4:]),
        },
        "output_dir": str(machine.folder / "out"),
        "training": {
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "eval_steps": 3,
            "save_steps": 3,
            "gradient_checkpointing": False,
        },
        "samples": {"number": 3, "max_new_tokens": 4},
    }
    path = machine.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return machine.start("train", str(path), HF_DATASETS_CACHE=str(machine.folder / "cache"))


def told_by(machine: Machine, command: Command) -> str:
    """Everything that a run tells until it is over: each scrape, what the command prints, the files it leaves.

    Left out is what belongs to the user: rows, samples, checkpoints, the output of the training.
    """
    address = wait_for(lambda: machine.json("supervisor.json").get("address"), what="an endpoint")
    told = []
    while command.process.poll() is None:
        try:
            told.append(scrape(address))
        except OSError:  # not yet, or no longer
            continue
        finally:
            wait_for_a_moment(command)
    assert told, "the run was over before it was scraped"
    home = [path for path in machine.home.rglob("*") if path.is_file() and path.name != "child.log"]
    names = {path.name for path in home}
    assert {"events.jsonl", "run.json", "verdict.json", "supervisor.json"} <= names
    copy = machine.folder / "out" / "run.json"
    files = [*home, *([copy] if copy.exists() else [])]
    return "".join([*told, command.output, *(path.read_bytes().decode("latin-1") for path in files)])


def wait_for_a_moment(command: Command) -> None:
    """Up to a fifth of a second, for the next scrape; less when the command ends."""
    try:
        command.process.wait(0.2)
    except Exception:  # noqa: BLE001
        return


@pytest.mark.slow
def test_a_chat_training_that_completes(machine: Machine, tiny: Path):
    rows = [chat(f"What is {i} plus one? {CANARY}", f"It is {i + 1}, {CANARY}.") for i in range(24)]
    command = start_job(machine, tiny, rows)
    told = told_by(machine, command)
    assert command.wait() == 0, command.output
    samples = (machine.folder / "out" / "samples.jsonl").read_text()
    assert samples.count(CANARY) >= 3, "the samples do hold it"
    assert CANARY not in told
    assert "3 samples, none reviewed" in command.output
    for arguments in (("runs",), ("runs", machine.run_folder().name)):
        assert CANARY not in machine.run(*arguments)[1]
    machine.run("samples", "review", machine.run_folder().name, "--all")
    assert CANARY not in (machine.run_folder() / "review.json").read_text()
    for name in ("README.md", "checksums.json"):
        assert CANARY not in (machine.folder / "out" / "final" / name).read_text()


def test_an_exception_that_quotes_a_row(machine: Machine, tiny: Path):
    from transformers import AutoTokenizer

    model = machine.folder / "strict"
    shutil.copytree(tiny, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    quoting = "{% if 'What is 7' in messages[0]['content'] %}{{ raise_exception(messages[0]['content']) }}{% endif %}"
    tokenizer.chat_template = quoting + CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    command = start_job(machine, model, [chat(f"What is {i}? {CANARY}", "x") for i in range(12)])
    told = told_by(machine, command)
    assert command.wait() == 1
    assert CANARY in (machine.run_folder() / "child.log").read_text(), "the exception does quote the row"
    assert machine.verdict()["ending"]["reason"] == "data"
    assert CANARY not in told


@pytest.mark.slow
def test_a_row_of_a_bad_type(machine: Machine, tiny: Path):
    rows = [chat(f"What is {i}? {CANARY}", "x") for i in range(12)]
    rows[5] = {"messages": CANARY}
    command = start_job(machine, tiny, rows)
    told = told_by(machine, command)
    assert command.wait() == 1
    assert machine.verdict()["ending"]["reason"] == "data"
    assert CANARY not in told


SCRIPT = """
import sys
from datasets import Dataset
from datasets.utils import tqdm as datasets_tqdm
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

model, out, canary = sys.argv[1:]
rows = Dataset.from_list([{"text": f"the sum of {i} and one, {canary}"} for i in range(16)])
rows = rows.map(lambda row: row, desc=f"Map of {canary}")
for _ in datasets_tqdm(range(3), desc=canary):
    pass
for _ in tqdm(range(3), desc=canary):
    pass


class Trainer(SFTTrainer):
    def log(self, logs, *args, **kwargs):
        super().log({**logs, "completion": f"says {canary}", "table": {"row": canary}, "score": 0.5}, *args, **kwargs)


class Failing(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise ValueError(f"bad row: {canary}")


arguments = SFTConfig(
    output_dir=out, max_steps=6, per_device_train_batch_size=2, logging_steps=1, report_to="none", bf16=False,
    use_cpu=True, save_strategy="no",
)
Trainer(
    model=AutoModelForCausalLM.from_pretrained(model), args=arguments, train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Failing()],
).train()
"""


@pytest.mark.slow
def test_bars_log_values_and_an_exception_of_a_script(machine: Machine, tiny: Path):
    script = machine.folder / "train.py"
    script.write_text(SCRIPT)
    arguments = [str(tiny), str(machine.folder / "out"), f"--hub_token={CANARY}"]
    command = machine.start(
        "exec", "--", sys.executable, str(script), *arguments, HF_DATASETS_CACHE=str(machine.folder / "cache")
    )
    told = told_by(machine, command)
    assert command.wait() == 1
    assert command.output.count(CANARY) > 5, "the output of a script is its own, and passes through"
    assert CANARY not in told.replace(command.output, "")
    assert machine.verdict()["ending"]["reason"] is not None
    logged = [event["values"] for event in machine.events("log")]
    assert any("score" in values for values in logged), "the numbers beside it are told"
    assert "--hub_token=***" in machine.json("run.json")["command"]
    last = [line for line in command.output.splitlines() if line.startswith("tunewatch: ")]
    assert last and CANARY not in "".join(last)
