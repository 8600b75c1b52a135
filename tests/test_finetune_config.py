"""The configuration file: what it accepts, and what its errors say."""

import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from tunewatch.finetune import errors
from tunewatch.finetune.config import load_config, parse_config
from tunewatch.finetune.errors import ConfigError, MissingExtraError, require_train_extra

EXAMPLES = Path(__file__).parent.parent / "examples"
BASE = Path("/base")
MINIMAL = {"model": "org/model", "dataset": "data.jsonl", "output_dir": "out"}


def refused(**change):
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, **change}, base=BASE)
    return str(caught.value)


def test_a_minimal_file_gets_defaults_and_absolute_paths(tmp_path):
    file = tmp_path / "nightly.yaml"
    file.write_text("model: org/model\ndataset: rows/train.jsonl\noutput_dir: out\n")
    config = load_config(file)
    assert config.name == "nightly"
    assert config.model.name == "org/model", "a Hub id stays one"
    assert config.dataset.path == str(tmp_path / "rows" / "train.jsonl")
    assert config.output_dir == tmp_path / "out"
    assert config.lora == {} and config.resume is False and config.samples.number == 20
    assert config.hub.push_to is None and config.model.trust_remote_code is False


def test_the_resolved_file_reads_back_as_the_same_configuration(tmp_path):
    for example in ("run.yaml", "demo.yaml"):
        config = load_config(EXAMPLES / example)
        copy = tmp_path / "config.yaml"
        copy.write_text(config.to_yaml())
        assert load_config(copy) == config


def test_the_examples_name_files_that_exist():
    for example in ("run.yaml", "demo.yaml"):
        dataset = load_config(EXAMPLES / example).dataset
        assert Path(dataset.path).is_file() and Path(str(dataset.eval_path)).is_file()


def test_durations_become_seconds():
    config = parse_config(
        {
            **MINIMAL,
            "patience": {"step": 300, "prepare": "5m", "save": "1h30m", "package": "90 s"},
            "walltime": "2d",
        },
        base=BASE,
    )
    assert config.patience == {"step": 300, "prepare": 300, "save": 5400, "package": 90}
    assert config.walltime == 172_800


@pytest.mark.parametrize("value", ["soon", "5 parsecs", 0, "0m", -3, True, [5], "1h30"])
def test_bad_durations(value):
    message = refused(patience={"step": value})
    assert message.startswith("patience.step: found ") and "5m" in message


def test_a_deadline_means_the_same_in_the_resolved_copy():
    for value in (
        "2027-01-01T10:00+02:00",
        datetime(2027, 1, 1, 8, tzinfo=UTC),
    ):  # YAML makes the latter of the former
        config = parse_config({**MINIMAL, "deadline": value}, base=BASE)
        assert config.deadline == datetime(2027, 1, 1, 8, tzinfo=UTC)
        assert parse_config(yaml.safe_load(config.to_yaml()), base=BASE) == config
    later = parse_config({**MINIMAL, "deadline": "18:00"}, base=BASE).deadline
    assert timedelta(0) < later - datetime.now(UTC) <= timedelta(days=1)


@pytest.mark.parametrize(
    ("value", "words"),
    [("soon", "write 2026-12-24T18:00"), (1080, "in quotes"), ("2027-01-01", "18:00 for the next")],
)
def test_bad_deadlines(value, words):
    message = refused(deadline=value)
    assert message.startswith("deadline: found ") and words in message


def test_short_forms():
    config = parse_config(
        {**MINIMAL, "lora": False, "samples": False, "hub": "me/model", "resume": "auto"}, base=BASE
    )
    assert config.lora is False and config.samples.number == 0
    assert config.hub.push_to == "me/model" and config.resume is True
    assert (
        parse_config({**MINIMAL, "resume": "out/checkpoint-3"}, base=BASE).resume == "/base/out/checkpoint-3"
    )
    assert parse_config({**MINIMAL, "resume": "if_available"}, base=BASE).resume == "if_available"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": "x"}, "modle: unknown key; allowed: name, model, .*; did you mean 'model'?"),
        (
            {"dataset": {"path": "a", "evalpath": "b"}},
            "dataset.evalpath: unknown key; .*; did you mean 'eval_path'?",
        ),
        ({"patience": {"evaluat": 3}}, "patience.evaluat: unknown key; .*; did you mean 'evaluate'?"),
        ({"model": 5}, r"model.name: found 5 \(number\); allowed: text"),
        ({"samples": {"number": "many"}}, r"samples.number: found 'many' \(text\); allowed: a whole number"),
        ({"lora": "big"}, r"lora: found 'big' \(text\); allowed: false \(full fine-tuning\), or a mapping"),
        (
            {"resume": 3.5},
            r"resume: found 3.5 \(number\); allowed: false, true, auto, if_available, or the path",
        ),
        ({"hub": "model"}, r"hub.push_to: found 'model' \(text\); allowed: user/repository"),
        ({"training": [1]}, r"training: found \[1\] \(list\); allowed: a mapping"),
        (
            {"dataset": {"path": "a", "eval_fraction": 2}},
            r"dataset.eval_fraction: found 2 \(number\); .*less than 1",
        ),
        (
            {"dataset": {"path": "a", "eval_path": "b", "eval_split": "c"}},
            "dataset: set one of eval_path, eval_split and eval_fraction, not eval_path and eval_split",
        ),
        (
            {"training": {"output_dir": "x"}},
            "training.output_dir: not allowed here: set output_dir at the top level",
        ),
    ],
)
def test_errors_name_key_finding_and_what_is_allowed(change, message):
    assert re.match(message.replace("?", r"\?"), refused(**change)), refused(**change)


def test_signals_and_limits_of_the_verdicts():
    text = "off: [flat, slow]\nthresholds:\n  overfit_ratio: 1.2\n  flat_logs: 50\n"
    section = yaml.safe_load(text)
    assert False in section, "to YAML a bare off is false"
    config = parse_config({**MINIMAL, "health": section}, base=BASE)
    assert config.health.off == ["flat", "slow"]
    assert config.health.thresholds == {"overfit_ratio": 1.2, "flat_logs": 50}
    assert parse_config(yaml.safe_load(config.to_yaml()), base=BASE).health == config.health
    assert parse_config(MINIMAL, base=BASE).health.off == []


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"off": ["flatt"]},
            "health.off: no such signal: flatt; there are nonfinite, .*; did you mean 'flat'?",
        ),
        (
            {False: ["flatt"]},
            "health.off: no such signal: flatt; there are nonfinite, .*; did you mean 'flat'?",
        ),
        ({"off": "flat"}, r"health.off: found 'flat' \(text\); allowed: a list of signals"),
        (
            {"thresholds": {"flat_log": 3}},
            "health.thresholds: no such threshold: flat_log; there are .*; did you mean 'flat_logs'?",
        ),
        (
            {"thresholds": {"flat_logs": 3.5}},
            "health.thresholds: threshold flat_logs: 3.5 is not a whole number above 0",
        ),
        (
            {"thresholds": {"lr_jump": "x"}},
            "health.thresholds: threshold lr_jump: 'x' is not a number above 0",
        ),
        ({"thresholds": [1]}, r"health.thresholds: found \[1\] \(list\); allowed: a mapping"),
        ({"offf": ["flat"]}, "health.offf: unknown key; allowed: off, thresholds; did you mean 'off'?"),
        (["flat"], r"health: found \['flat'\] \(list\); allowed: a mapping"),
    ],
)
def test_errors_about_verdicts_name_the_nearest(section, said):
    assert re.match(said.replace("?", r"\?"), refused(health=section)), refused(health=section)


def test_a_missing_key():
    with pytest.raises(ConfigError, match="dataset: missing"):
        parse_config({"model": "org/model", "output_dir": "out"}, base=BASE)


def test_secrets_are_refused_and_not_shown():
    message = refused(training={"hub_token": "hf_abcdef"})
    assert "HF_TOKEN" in message and "hf_abcdef" not in message
    assert "hf_abcdef" not in refused(hub={"token": "hf_abcdef"})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model": "https://ada:pw7@h.example/m"}, "model"),
        ({"dataset": {"path": "https://h.example/x.jsonl?token=pw7"}}, "dataset.path"),
        ({"training": {"optim_args": "api_key=pw7"}}, "training.optim_args"),
        ({"training": {"report_to": ["Bearer pw7pw7"]}}, "training.report_to"),
        ({"lora": {"x": {"password": "pw7"}}}, "lora.x.password"),
        ({"name": "hf_pw7DeFgHiJkLmNoP"}, "name"),
    ],
)
def test_a_secret_anywhere_is_refused_and_so_never_copied(change, key):
    message = refused(**change)
    assert message.startswith(f"{key}: a secret does not belong in this file") and "pw7" not in message


def test_words_of_a_vocabulary_are_no_secrets():
    training = {"eos_token": "<|end|>", "pad_token": "<pad>", "max_steps": 3}
    assert parse_config({**MINIMAL, "training": training}, base=BASE).training == training


def test_dataset_paths_by_list_and_pattern():
    def path(value):
        return parse_config({**MINIMAL, "dataset": {"path": value}}, base=BASE).dataset.path

    assert path(["a.jsonl", "../b/*.jsonl"]) == ["/base/a.jsonl", "/b/*.jsonl"]
    assert path("shards/part-*") == "/base/shards/part-*"
    assert path("org/rows") == "org/rows"
    for value in (5, [], ["a.jsonl", 3], ""):
        with pytest.raises(
            ConfigError, match=r"dataset\.path: found .*; allowed: a Hub id, a path, or a list of files"
        ):
            path(value)


def test_streaming_needs_a_number_of_steps_and_no_fraction():
    from tunewatch.finetune.arguments import training_arguments

    assert "with streaming" in refused(dataset={"path": "a", "streaming": True, "eval_fraction": 0.1})

    def arguments(**training):
        section = {"path": "a.jsonl", "streaming": True}
        return training_arguments(
            parse_config({**MINIMAL, "dataset": section, "training": training}, base=BASE), has_eval=False
        )

    with pytest.raises(ConfigError, match=r"training\.max_steps: streamed rows have no known number"):
        arguments()
    assert arguments(max_steps=5).max_steps == 5


@pytest.mark.parametrize(
    ("value", "number"), [(7, 7), ({"number": 7}, 7), (0, 0), (False, 0), ({"max_new_tokens": 4}, 20)]
)
def test_samples_as_a_number_or_a_section(value, number):
    assert parse_config({**MINIMAL, "samples": value}, base=BASE).samples.number == number


@pytest.mark.parametrize("value", [-1, "many", True, 2.5, {"number": None}])
def test_samples_that_are_no_number(value):
    assert refused(samples=value).startswith("samples")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        load_config(tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: a\ndataset: [1, 2\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml, line 3: not valid YAML"):
        load_config(broken)
    listing = tmp_path / "list.yaml"
    listing.write_text("- model\n")
    with pytest.raises(ConfigError, match=r"list\.yaml: found list, expected a mapping"):
        load_config(listing)


def test_training_keys_and_types_are_those_of_sft_config():
    from tunewatch.finetune.arguments import training_arguments

    def arguments(**training):
        return training_arguments(parse_config({**MINIMAL, "training": training}, base=BASE), has_eval=False)

    # YAML 1.1 reads 2e-4 as text.
    assert yaml.safe_load("x: 2e-4") == {"x": "2e-4"}
    assert arguments(learning_rate="2e-4").learning_rate == 0.0002
    assert arguments().report_to == [] and arguments().output_dir == "/base/out"
    for training, message in [
        ({"learning_rat": 1}, "training.learning_rat: unknown key; .*; did you mean 'learning_rate'?"),
        (
            {"learning_rate": "fast"},
            r"training.learning_rate: found 'fast' \(text\); allowed: a valid number",
        ),
        ({"max_steps": 2.5}, r"training.max_steps: found 2.5 \(number\); allowed: a valid integer"),
        ({"eval_steps": 5}, "training.eval_steps: there is no evaluation set"),
        ({"lr_scheduler_type": "cosin"}, "training: cosin is not a valid SchedulerType"),
    ]:
        with pytest.raises(ConfigError, match=message):
            arguments(**training)


def test_lora_keys_have_short_names_and_alpha_follows_r():
    from tunewatch.finetune.arguments import lora_config

    def lora(section):
        return lora_config(parse_config({**MINIMAL, "lora": section}, base=BASE))

    made = lora({"r": 4, "dropout": 0.1})
    assert (made.r, made.lora_alpha, made.lora_dropout, made.task_type) == (4, 8, 0.1, "CAUSAL_LM")
    assert lora(False) is None
    with pytest.raises(ConfigError, match=r"lora.alhpa: unknown key; .*; did you mean 'alpha'\?"):
        lora({"alhpa": 3})


def test_evaluation_is_on_when_there_is_something_to_evaluate():
    from tunewatch.finetune.arguments import training_arguments

    config = parse_config({**MINIMAL, "training": {"eval_steps": 5}}, base=BASE)
    assert training_arguments(config, has_eval=True).eval_strategy == "steps"
    assert training_arguments(parse_config(MINIMAL, base=BASE), has_eval=True).eval_strategy == "epoch"


def test_a_missing_extra_is_named(monkeypatch):
    require_train_extra()
    monkeypatch.setattr(errors, "TRAIN_EXTRA", ("torch", "no_such_trl", "no_such_peft"))
    with pytest.raises(MissingExtraError) as caught:
        require_train_extra()
    assert str(caught.value) == (
        "tunewatch train needs the 'train' extra: pip install 'tunewatch[train]' "
        "(missing: no_such_trl, no_such_peft)"
    )


def test_errors_import_without_the_extra():
    import subprocess

    code = (
        "import sys, tunewatch.finetune.errors; "
        "sys.exit(bool({'torch', 'trl', 'transformers', 'pydantic', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
