"""The built-in job as a real child process, on a tiny model."""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from tunewatch.finetune.config import parse_config
from tunewatch.finetune.errors import CheckpointError, ConfigError, HubError, MissingFileError
from tunewatch.finetune.faults import fault_callback
from tunewatch.finetune.hub import explain
from tunewatch.finetune.job import check_writable
from tunewatch.finetune.resume import choose_checkpoint
from tunewatch.finetune.tiny import CHAT_TEMPLATE, build_tiny_model

CANARY = "canary-41c0de"


class Child:
    """A job in a run folder of its own."""

    def __init__(self, root: Path, config: dict[str, Any], **environment: str) -> None:
        self.folder = root / "20250101-000000-test"
        self.folder.mkdir(parents=True)
        self.output = Path(config["output_dir"])
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        self.log = self.folder / "child.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tunewatch.finetune", str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "HF_DATASETS_CACHE": str(root / "cache"),
                    "HF_HUB_OFFLINE": "1",
                    "TUNEWATCH_RUN_FOLDER": str(self.folder),
                    "TUNEWATCH_RUN_ID": self.folder.name,
                    "TUNEWATCH_WAY": "train",
                    **environment,
                },
            )

    def wait(self) -> "Child":
        self.process.wait(timeout=180)
        return self

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == name or name is None]

    def event(self, name: str) -> dict[str, Any]:
        (event,) = self.events(name)
        return event

    def all_that_is_told(self) -> str:
        """Everything that leaves the process except its own log and the files of the output folder."""
        return "".join(f.read_bytes().decode("latin-1") for f in self.folder.iterdir() if f != self.log)


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny) -> dict[str, Any]:
    """A configuration of eight steps; the rows hold a canary."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [chat(f"What is {i} plus one? {CANARY}", f"It is {i + 1}.") for i in range(40)]
    return {
        "name": "sums",
        "model": str(tiny),
        "dataset": {
            "path": write_rows(folder / "train.jsonl", rows[:32]),
            "eval_path": write_rows(folder / "eval.jsonl", rows[32:]),
        },
        "lora": {"r": 4},
        "training": {
            "max_steps": 8,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": "1e-3",
            "max_length": 64,
            "logging_steps": 1,
            "eval_steps": 4,
            "save_steps": 4,
            "gradient_checkpointing": False,
        },
        "samples": {"number": 3, "max_new_tokens": 4},
    }


@pytest.fixture(scope="module")
def healthy(base, tmp_path_factory) -> Child:
    root = tmp_path_factory.mktemp("healthy")
    return Child(root, {**base, "output_dir": str(root / "out")}).wait()


def variant(base: dict[str, Any], root: Path, **change: Any) -> dict[str, Any]:
    training = {**base["training"], **change.pop("training", {})}
    return {**base, "output_dir": str(root / "out"), "training": training, **change}


# -- a healthy run ------------------------------------------------------------------------------------------


def test_a_healthy_run_ends_well(healthy):
    assert healthy.code == 0, healthy.log.read_text()[-3000:]
    package = healthy.event("package")
    assert (package["ok"], package["reason"], package["weights_finite"], package["push"]) == (
        True,
        None,
        True,
        "none",
    )


def test_events_come_in_the_order_of_the_work(healthy):
    told = [event.get("state") or event["event"] for event in healthy.events()]
    milestones = [
        "session",
        "preparing",
        "train_begin",
        "train_end",
        "packaging",
        "samples",
        "package",
        "exit",
    ]
    assert [name for name in told if name in milestones] == milestones
    details = [event["detail"] for event in healthy.events("phase") if event["phase"] == "prepare"]
    expected = [
        "importing torch and trl",
        "reading the dataset",
        "loading the tokenizer",
        "loading the model",
        "tokenizing",
    ]
    assert [detail for detail in dict.fromkeys(details) if detail in expected] == expected
    activities = {event["detail"]: event.get("activity") for event in healthy.events("phase")}
    assert [activities[detail] for detail in expected] == ["import", "load", "load", "load", "tokenize"]


def test_provenance_names_settings_and_data_but_no_path(healthy, base):
    info = {key: value for event in healthy.events("provenance") for key, value in event["info"].items()}
    content = Path(base["dataset"]["path"]).read_bytes()
    expected = {
        "name": "sums",
        "base_model": "tiny-llama",
        "dataset": "train.jsonl",
        "dataset_hash": "sha256:" + hashlib.sha256(content).hexdigest(),
        "dataset_rows": 32,
        "dataset_split": "train",
        "eval_dataset": "eval.jsonl",
        "eval_dataset_hash": "sha256:"
        + hashlib.sha256(Path(base["dataset"]["eval_path"]).read_bytes()).hexdigest(),
        "eval_rows": 8,
        "eval_overlap_rows": 0,
        "method": "lora",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_modules": "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "learning_rate": 0.001,
        "max_length": 64,
        "precision": "fp32",
        "seed": 42,
    }
    assert {key: info.get(key) for key in expected} == expected
    assert "base_model_revision" not in info, "a folder has no commit"
    assert "evaluation rows" not in healthy.log.read_text(), "no warning without overlap"
    assert str(Path(base["model"]).parent) not in json.dumps(healthy.events("provenance"))


def test_provenance_of_full_fine_tuning_with_rows_in_both_sets(base, tmp_path):
    """Forty rows of which every second is a twin; ten of them held out; bfloat16 weights without autocast."""
    rows = [chat(f"What is {i // 2} plus one?", f"It is {i // 2 + 1}.") for i in range(40)]
    dataset = {"path": write_rows(tmp_path / "twins.jsonl", rows), "eval_fraction": 0.25}
    model = {"name": base["model"], "dtype": "bfloat16"}
    training = {"max_steps": 2, "eval_steps": 2, "save_steps": 2, "data_seed": 5, "seed": 7, "use_cpu": True}
    config = variant(base, tmp_path, dataset=dataset, model=model, lora=False, training=training, samples=0)
    child = Child(tmp_path, config).wait()
    assert child.code == 0, child.log.read_text()[-3000:]
    info = {key: value for event in child.events("provenance") for key, value in event["info"].items()}
    expected = {
        "method": "full", "base_model": "tiny-llama", "dataset": "twins.jsonl", "dataset_rows": 30, "eval_rows": 10,
        "eval_fraction": 0.25, "seed": 7, "data_seed": 5, "max_steps": 2, "batch_size": 4,
    }  # fmt: skip
    assert {key: info.get(key) for key in expected} == expected
    assert not {"lora_r", "lora_alpha", "eval_dataset", "base_model_revision"} & info.keys()
    # The same split again, counted by hand.
    import datasets

    parts = datasets.Dataset.from_list(rows).train_test_split(test_size=10, seed=7)
    trained = [row["messages"] for row in parts["train"]]
    overlap = sum(row["messages"] in trained for row in parts["test"])
    assert overlap > 0 and info["eval_overlap_rows"] == overlap
    assert f"{overlap} of 10 evaluation rows also occur in the training data" in child.log.read_text()
    assert info["precision"] == "bf16", "what is computed in, and not that autocast is off"
    versions = child.events("provenance")[-1]["environment"]
    assert {"python", "torch", "transformers", "trl", "peft", "accelerate", "datasets"} <= versions.keys()


@pytest.mark.slow
def test_a_streamed_run_does_not_claim_to_know_its_rows(base, tmp_path):
    dataset = {**base["dataset"], "streaming": True}
    training = {"max_steps": 2, "eval_steps": 2, "save_steps": 2}
    child = Child(tmp_path, variant(base, tmp_path, dataset=dataset, training=training)).wait()
    assert child.code == 0, child.log.read_text()[-3000:]
    info = {key: value for event in child.events("provenance") for key, value in event["info"].items()}
    content = Path(base["dataset"]["path"]).read_bytes()
    assert info["dataset_hash"] == "sha256:" + hashlib.sha256(content).hexdigest()
    assert not {"dataset_rows", "eval_rows", "eval_overlap_rows"} & info.keys()
    assert child.event("samples")["generated"] == 3
    assert child.event("package")["ok"]


def test_the_package_is_whole(healthy):
    final = healthy.output / "final"
    manifest = json.loads((final / "checksums.json").read_text())
    assert manifest["run_id"] == healthy.folder.name
    listed = {entry["path"]: entry for entry in manifest["files"]}
    present = {file.name for file in final.iterdir()} - {"checksums.json"}
    assert set(listed) == present
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= present
    assert "training_args.bin" not in present, "a pickle with paths of this machine"
    for name, entry in listed.items():
        content = (final / name).read_bytes()
        assert (entry["sha256"], entry["bytes"]) == (hashlib.sha256(content).hexdigest(), len(content))
    package = healthy.event("package")
    assert (package["files"], package["bytes"]) == (len(listed), sum(e["bytes"] for e in listed.values()))
    assert not [path for path in healthy.output.iterdir() if path.name.startswith(".")], (
        "nothing half-done is left"
    )


def test_the_adapter_can_be_loaded(healthy, tiny):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), healthy.output / "final")
    trained = [value for name, value in model.named_parameters() if "lora_B" in name]
    assert trained and any(value.abs().max() > 0 for value in trained), "lora_B starts at zero"


def test_the_model_card_names_run_and_quality(healthy):
    card = (healthy.output / "final" / "README.md").read_text()
    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "peft"
    assert f"`{healthy.folder.name}`" in body and "| dataset_hash | sha256:" in body
    state = json.loads((healthy.output / "checkpoint-8" / "trainer_state.json").read_text())
    losses = [(entry["step"], entry["eval_loss"]) for entry in state["log_history"] if "eval_loss" in entry]
    assert [step for step, _ in losses] == [4, 8]
    assert f"Evaluation loss {losses[-1][1]:.4g} at step 8" in body
    assert str(healthy.output) not in card


def test_samples_are_written_and_only_counted(healthy):
    rows = [json.loads(line) for line in (healthy.output / "samples.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert (
        rows[0]["prompt"][0]["content"] == f"What is 32 plus one? {CANARY}"
        and rows[0]["reference"] == "It is 33."
    )
    assert all(isinstance(row["generated"], str) for row in rows)
    assert healthy.event("samples")["generated"] == 3


def test_no_text_of_the_data_is_told(healthy):
    assert CANARY in Path(healthy.output / "samples.jsonl").read_text()
    assert CANARY not in healthy.all_that_is_told()


# -- resuming -----------------------------------------------------------------------------------------------


def test_resume_goes_on_and_a_failed_push_is_known(healthy, base, tmp_path):
    shutil.copytree(healthy.output, tmp_path / "out")
    with Hub({"/api/repos/create": (403, "Forbidden")}) as hub:
        config = variant(base, tmp_path, resume=True, training={"max_steps": 12}, hub={"push_to": "me/sums"})
        child = Child(tmp_path, config, HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong", HF_HUB_OFFLINE="0").wait()
    assert child.code == 0, child.log.read_text()[-3000:]
    begin = child.event("train_begin")
    assert (begin["step"], begin["max_steps"]) == (8, 12)
    assert begin["restored"]["optimizer"] is True and begin["restored"]["scheduler"] is True
    package = child.event("package")
    assert (package["ok"], package["push"]) == (True, "failed")
    assert "hf_wrong" not in child.all_that_is_told()
    assert "/api/repos/create" in hub.requests
    assert "checkpoint-12" in {path.name for path in child.output.iterdir()}


def config_for(output: Path, resume: Any) -> Any:
    return parse_config(
        {"model": "a/b", "dataset": "c/d", "output_dir": str(output), "resume": resume}, base=output.parent
    )


def test_which_checkpoint_is_chosen(healthy, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(healthy.output, out)
    assert choose_checkpoint(config_for(out, True)) == out / "checkpoint-8"
    assert choose_checkpoint(config_for(out, str(out / "checkpoint-4"))) == out / "checkpoint-4"
    with pytest.raises(ConfigError, match="out holds checkpoint-8 of an earlier run: set resume: true"):
        choose_checkpoint(config_for(out, False))

    (out / "checkpoint-8" / "optimizer.pt").unlink()
    assert choose_checkpoint(config_for(out, True)) == out / "checkpoint-4", "8 would start a fresh optimizer"
    with pytest.raises(CheckpointError, match=r"cannot resume from checkpoint-8 \(no optimizer"):
        choose_checkpoint(config_for(out, str(out / "checkpoint-8")))

    (out / "checkpoint-4" / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match="out holds no checkpoint to resume from: checkpoint-8"):
        choose_checkpoint(config_for(out, True))
    assert choose_checkpoint(config_for(out, "if_available")) is None
    with pytest.raises(MissingFileError, match="no checkpoint folder checkpoint-9"):
        choose_checkpoint(config_for(out, str(out / "checkpoint-9")))
    with pytest.raises(ConfigError, match="final is not a checkpoint"):
        choose_checkpoint(config_for(out, str(out / "final")))


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(ConfigError, match="there is no checkpoint in out; resume: if_available"):
        choose_checkpoint(config_for(tmp_path / "out", True))
    assert choose_checkpoint(config_for(tmp_path / "out", "if_available")) is None
    assert choose_checkpoint(config_for(tmp_path / "out", False)) is None


# -- runs that fail -----------------------------------------------------------------------------------------


def test_a_model_full_of_nan_is_not_packaged(base, tmp_path):
    child = Child(tmp_path, variant(base, tmp_path, lora=False), TUNEWATCH_FAULT="nan@6").wait()
    assert child.code == 1
    losses = {event["step"]: event for event in child.events("log") if "loss" in event["values"]}
    assert losses[5]["values"]["grad_norm"] is not None and losses[6]["nonfinite"].get("grad_norm") == "nan"
    package = child.event("package")
    assert (package["ok"], package["reason"], package["weights_finite"]) == (False, "nan", False)
    exception = child.event("exception")
    assert (exception["type"], exception["reason"]) == ("NonFiniteWeightsError", "nan")
    assert "weights are NaN or infinite" in exception["detail"]
    assert not (child.output / "final").exists()


def test_a_row_that_an_exception_quotes_is_not_told(base, tiny, tmp_path):
    from transformers import AutoTokenizer

    model = tmp_path / "strict-model"
    shutil.copytree(tiny, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% if 'What is 7' in messages[0]['content'] %}"
        "{{ raise_exception(messages[0]['content']) }}{% endif %}" + CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(model)
    child = Child(tmp_path, variant(base, tmp_path, model=str(model))).wait()
    assert child.code == 1
    assert CANARY in child.log.read_text(), "the exception does quote the row"
    assert CANARY not in child.all_that_is_told()
    exception = child.event("exception")
    assert (exception["type"], exception["reason"]) == ("DataError", "data")
    assert exception["detail"] == "TRL could not prepare the rows (TemplateError)"
    assert not child.events("train_begin")


@pytest.mark.parametrize(
    ("lora", "kind", "reason", "detail"),
    [
        ({"r": 4, "inference_mode": True}, "NothingTrainableError", "nothing_trainable", "no parameter"),
        pytest.param(
            {"target_modules": ["q_projection"]},
            "ConfigError",
            "config",
            "lora: Target modules",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_adapters_that_cannot_learn(base, tmp_path, lora, kind, reason, detail):
    child = Child(tmp_path, variant(base, tmp_path, lora=lora)).wait()
    assert child.code == 1
    exception = child.event("exception")
    assert (exception["type"], exception["reason"]) == (kind, reason)
    assert exception["detail"].startswith(detail)
    assert not child.events("train_begin") and not child.events("package")


def test_an_output_folder_below_a_file(base, tmp_path):
    (tmp_path / "a-file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir: cannot write into 'out': Not a directory") as caught:
        check_writable(tmp_path / "a-file" / "out")
    assert str(tmp_path) not in str(caught.value)
    check_writable(tmp_path / "new" / "out")
    assert list((tmp_path / "new" / "out").iterdir()) == []


# -- faults on request --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_disk_full_leaves_an_incomplete_checkpoint(base, tmp_path):
    from tunewatch.supervisor.checkpoints import scan

    child = Child(tmp_path, variant(base, tmp_path), TUNEWATCH_FAULT="disk_full@5").wait()
    assert child.code == 1
    assert child.event("exception")["during"] == "train"
    assert {c.step: c.complete for c in scan(child.output)} == {4: True, 8: False}


@pytest.mark.slow
def test_out_of_memory_in_a_step(base, tmp_path):
    child = Child(tmp_path, variant(base, tmp_path), TUNEWATCH_FAULT="oom@2").wait()
    assert child.code == 1
    assert child.event("exception")["reason"] == "oom_host"
    assert [event["step"] for event in child.events("log")] == [1]


@pytest.mark.slow
def test_stall_hangs_until_a_signal_and_kill_kills(base, tmp_path):
    stalled = Child(tmp_path / "stall", variant(base, tmp_path / "stall"), TUNEWATCH_FAULT="stall@3")
    killed = Child(tmp_path / "kill", variant(base, tmp_path / "kill"), TUNEWATCH_FAULT="kill@3").wait()
    assert killed.code == -signal.SIGKILL and not killed.events("exception")
    deadline = time.monotonic() + 120
    while not (stalled.folder / "events.jsonl").exists() or len(stalled.events("log")) < 2:
        assert time.monotonic() < deadline and stalled.process.poll() is None
        time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        stalled.process.wait(timeout=2)
    assert len(stalled.events("log")) == 2, "no step ends any more"
    stalled.process.terminate()
    assert stalled.process.wait(timeout=30) == -signal.SIGTERM


@pytest.mark.parametrize("value", ["nam", "nan@soon", "@5"])
def test_faults_that_do_not_exist(value):
    with pytest.raises(
        ConfigError, match=r"TUNEWATCH_FAULT: found .*; allowed: nan, stall, kill, oom, disk_full"
    ):
        fault_callback(value)


# -- the Hub ------------------------------------------------------------------------------------------------


class Hub:
    """A Hub on loopback that answers as it is told, by the beginning of the path; 404 otherwise."""

    def __init__(self, answers: dict[str, tuple[int, str]]) -> None:
        self.requests: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def answer(handler) -> None:
                self.requests.append(handler.path)
                path = handler.path
                status, code = next(
                    (a for p, a in answers.items() if path.startswith(p)), (404, "RepoNotFound")
                )
                handler.send_response(status)
                handler.send_header("X-Error-Code", code)
                handler.send_header("X-Error-Message", "no")
                body = json.dumps({"url": f"{self.url}/me/sums"}).encode()
                handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                if handler.command != "HEAD":
                    handler.wfile.write(body)

            def do_GET(handler) -> None:
                handler.answer()

            def do_HEAD(handler) -> None:
                handler.answer()

            def do_POST(handler) -> None:
                handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
                handler.answer()

            def log_message(handler, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()


ASK = """
import sys
from tunewatch.finetune.config import DatasetSection, ModelSection
from tunewatch.finetune.data import load_data
from tunewatch.finetune.errors import JobError
from tunewatch.finetune.job import _load_tokenizer
for name in sys.argv[1:]:
    try:
        if name.startswith("data:"):
            load_data(DatasetSection(path=name[5:]), seed=1)
        else:
            _load_tokenizer(ModelSection(name=name))
    except JobError as error:
        print(type(error).__name__, error.tunewatch_reason, error, sep="|")
"""


def ask(root: Path, *names: str, **environment: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        env={**os.environ, "HF_HOME": str(root / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split("|") for line in done.stdout.splitlines()]


def test_what_the_hub_refuses_is_said_in_a_few_words(tmp_path):
    answers = {
        "/org/gated": (403, "GatedRepo"),
        "/api/models/org/gated": (403, "GatedRepo"),
        "/org/closed": (401, ""),
        "/api/models/org/closed": (401, ""),
    }
    missing = str(tmp_path / "tiny-lama")
    (tmp_path / "tiny-llama").mkdir()
    with Hub(answers) as hub:
        told = ask(
            tmp_path,
            "org/typo", "org/gated", "org/closed", "data:org/typo", missing, str(tmp_path / "tiny-llama"),
            HF_ENDPOINT=hub.url,
        )  # fmt: skip
    assert [line[:2] for line in told] == [
        ["ConfigError", "config"],
        ["AuthError", "auth"],
        ["AuthError", "auth"],
        ["ConfigError", "config"],
        ["MissingFileError", "missing_file"],
        ["MissingFileError", "missing_file"],
    ], told
    assert told[0][2].startswith("model.name: no model 'org/typo' on the Hub")
    assert told[1][2] == "model org/gated is gated: accept its terms on the Hub, then set HF_TOKEN"
    assert told[3][2].startswith("dataset.path: no dataset 'org/typo' on the Hub")
    assert told[4][2] == "model folder not found: tiny-lama; did you mean 'tiny-llama'?"
    assert told[5][2] == "model folder tiny-llama has no config.json"


def test_no_way_to_the_hub(tmp_path):
    told = ask(tmp_path, "org/model", "data:org/rows", HF_HUB_OFFLINE="1")
    assert [line[:2] for line in told] == [["HubError", "hub"], ["HubError", "hub"]], told
    assert told[0][2] == "model org/model is not on this machine and the Hub cannot be reached"
    with Hub({}) as hub:
        closed = hub.url
    with pytest.raises(Exception, match="refused") as refused:
        huggingface_hub.get_session().get(closed)
    assert isinstance(explain(refused.value, "model", "org/model"), HubError)
    assert explain(ValueError("something else"), "model", "org/model") is None


def test_a_push_looks_at_what_became_of_the_upload(tmp_path, monkeypatch):
    from huggingface_hub import constants

    from tunewatch.finetune.config import HubSection
    from tunewatch.finetune.packaging import push

    (tmp_path / "notes.txt").write_text("hello")
    # The repository is made, and the upload behind the future is refused.
    with Hub({"/api/repos/create": (200, ""), "/api/models/me/sums": (403, "Forbidden")}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        failure = push(tmp_path, HubSection(push_to="me/sums"), run_id="r")
    assert failure is not None and "403" in str(failure)
    assert any("preupload" in path or "commit" in path for path in hub.requests), hub.requests


# -- the tiny model -----------------------------------------------------------------------------------------


def test_the_tiny_model_is_the_same_each_time_and_encodes_anything(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = build_tiny_model(tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (tiny / name).read_bytes()
    assert (build_tiny_model(tmp_path / "b", seed=1) / "model.safetensors").read_bytes() != (
        tiny / "model.safetensors"
    ).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "Grüße aus 東京 🎏\n\ttabs"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.config.num_hidden_layers == 2 and model.config.hidden_size == 32
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], return_tensors="pt", return_dict=True
    )
    loss = model(**ids, labels=ids["input_ids"]).loss.item()
    assert math.isfinite(loss) and 0 < loss < 3 * math.log(model.config.vocab_size)
