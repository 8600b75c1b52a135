"""What a resume brought back and what it lost: real trainings, held against the same training without a break."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import smalltrain
import torch
from smalltrain import Rows, events

TRUE = (True, True, True, True)
LOST = (False, False, True, True)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEWATCH_HOME", str(folder))
        patch.delenv("TUNEWATCH_RUN_FOLDER", raising=False)
        yield folder


@pytest.fixture(scope="module")
def unbroken(home, tmp_path_factory):
    """Trainings of eight steps by their settings, each with checkpoint-4 and what it trained on."""
    known = {}

    def make(data=None, **settings):
        key = json.dumps([settings, len(data or ())], default=str)
        if key not in known:
            output = tmp_path_factory.mktemp("unbroken") / f"unbroken{len(known)}"
            one = smalltrain.trainer(output, data, **settings)
            one.train()
            known[key] = (output, one)
        return known[key]

    return make


def delete(*names):
    def damage(folder):
        for name in names:
            (folder / name).unlink()

    return damage


def keep(folder):
    pass


def several_ranks(folder):
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")


FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
SGD = {"optim": "sgd"}
MOMENTUM = {"optim": "sgd", "optim_args": "momentum=0.9"}
PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "warmup_steps": 0,
}
FAR_PLATEAU = {**PLATEAU, "eval_steps": 6}
CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 0}
EPOCH = {"per_device_train_batch_size": 8}  # four steps are an epoch

CASES = {
    # settings before, damage, changes after: optimizer, scheduler, rng, data_order
    "all there": ({}, keep, {}, TRUE),
    "weights only": ({}, delete(*FILES), {}, (False, False, False, True)),
    "no optimizer.pt": ({}, delete("optimizer.pt"), {}, LOST),
    "no scheduler.pt": ({}, delete("scheduler.pt"), {}, LOST),
    "no rng_state.pth": ({}, delete("rng_state.pth"), {}, (True, True, False, True)),
    "of two ranks": ({}, several_ranks, {}, (True, True, False, True)),
    "ignore_data_skip": ({}, keep, {"ignore_data_skip": True}, (True, True, True, False)),
    "ignore_data_skip after an epoch": (EPOCH, keep, {"ignore_data_skip": True}, TRUE),
    "after an epoch": (EPOCH, keep, {}, TRUE),
    "a larger batch": ({}, keep, {"per_device_train_batch_size": 4}, (True, True, True, False)),
    "more accumulation": ({}, keep, {"gradient_accumulation_steps": 2}, (True, True, True, False)),
    "a larger batch of fewer parts": (
        {"gradient_accumulation_steps": 2}, keep,
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}, TRUE,
    ),
    "more steps": ({}, keep, {"max_steps": 12}, TRUE),
    "SGD": (SGD, keep, {}, TRUE),
    "SGD has nothing to lose": (SGD, delete("optimizer.pt"), {}, (None, False, True, True)),
    "SGD with momentum": (MOMENTUM, keep, {}, TRUE),
    "SGD with momentum, lost": (MOMENTUM, delete("optimizer.pt"), {}, LOST),
    "Adagrad has a state from the beginning": ({"optim": "adagrad"}, delete("optimizer.pt"), {}, LOST),
    "plateau": (PLATEAU, keep, {}, TRUE),
    "plateau before its first evaluation": (FAR_PLATEAU, keep, {}, TRUE),
    "plateau, lost": (PLATEAU, delete("scheduler.pt"), {}, LOST),
    "constant": (CONSTANT, keep, {}, TRUE),
    "constant has no schedule to lose": (CONSTANT, delete("scheduler.pt"), {}, (False, None, True, True)),
    "cosine, lost": ({"lr_scheduler_type": "cosine"}, delete("scheduler.pt"), {}, LOST),
    "done already": ({}, keep, {"max_steps": 4}, TRUE),
}  # fmt: skip


def resume(unbroken, tmp_path, before, damage, after, how=str):
    """Go on from checkpoint-4; returns the resumed trainer and the unbroken one."""
    source, reference = unbroken(**before)
    output = tmp_path / f"resumed-{tmp_path.name}"[-60:]
    checkpoint = Path(shutil.copytree(source / "checkpoint-4", output / "checkpoint-4"))
    damage(checkpoint)
    one = smalltrain.trainer(output, **{**before, **after})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one.train(resume_from_checkpoint=how(checkpoint))
    return one, reference


def begun(home, one):
    return events(home, one, "train_begin")[-1]


@pytest.mark.parametrize(("before", "damage", "after", "expected"), CASES.values(), ids=CASES)
def test_what_came_back(home, unbroken, tmp_path, before, damage, after, expected):
    one, reference = resume(unbroken, tmp_path, before, damage, after)
    event = begun(home, one)
    found = event["restored"]
    assert tuple(found[part] for part in ("optimizer", "scheduler", "rng", "data_order")) == expected
    assert (event["step"], event["checkpoint"]) == (4, "checkpoint-4")
    # The proof that the expectation is right: the rows of each step, and the weights in the end.
    rows = {step: sorted(numbers) for step, numbers in one.rows.items()}
    same = {step: sorted(numbers) for step, numbers in reference.rows.items() if step > 4}
    if one.args.max_steps == 8:
        assert (rows == same) == expected[3]
        same_weights = all(
            torch.equal(mine, other)
            for mine, other in zip(one.model.parameters(), reference.model.parameters(), strict=True)
        )
        assert same_weights == (
            expected in (TRUE, (True, True, False, True)) and "gradient_accumulation_steps" not in after
        )


@pytest.mark.parametrize(
    "how",
    [lambda path: True, str, Path, lambda path: f"{path}/"],
    ids=["True", "str", "Path", "with a slash"],
)
def test_by_whatever_name(home, unbroken, tmp_path, how):
    one, _ = resume(unbroken, tmp_path, {}, delete("scheduler.pt"), {}, how)
    assert begun(home, one)["checkpoint"] == "checkpoint-4"
    assert begun(home, one)["restored"] == {
        "optimizer": False,
        "scheduler": False,
        "rng": True,
        "data_order": True,
    }


def test_a_fresh_start(home, unbroken):
    _, one = unbroken()
    event = events(home, one, "train_begin")[0]
    assert (event["step"], event["checkpoint"]) == (0, None)
    assert event["restored"] == dict.fromkeys(("optimizer", "scheduler", "rng", "data_order"))


def test_more_rows_than_before(home, unbroken, tmp_path):
    """The same settings on other data: what is skipped is not what was seen."""
    source, _ = unbroken()
    output = tmp_path / "more-rows"
    shutil.copytree(source / "checkpoint-4", output / "checkpoint-4")
    one = smalltrain.trainer(output, Rows(40))
    one.train(resume_from_checkpoint=True)
    assert begun(home, one)["restored"]["data_order"] is False


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([Rows()[number] for number in range(32)])


def test_of_a_stream_the_place_is_not_known(home, tmp_path):
    one = smalltrain.trainer(tmp_path / "stream", Stream())
    one.train()
    again = smalltrain.trainer(tmp_path / "stream", Stream(), max_steps=12)
    again.train(resume_from_checkpoint=str(tmp_path / "stream" / "checkpoint-4"))
    assert begun(home, again)["restored"]["data_order"] is None
    again = smalltrain.trainer(tmp_path / "stream", Stream(), max_steps=12, ignore_data_skip=True)
    again.train(resume_from_checkpoint=str(tmp_path / "stream" / "checkpoint-4"))
    assert begun(home, again)["restored"]["data_order"] is False


def test_a_second_resume_in_one_process(home, unbroken, tmp_path):
    """The optimizer of the first training is still there, full of a state that is not the checkpoint's."""
    one, _ = resume(unbroken, tmp_path, {}, keep, {})
    checkpoint = Path(one.args.output_dir) / "checkpoint-4"
    delete("optimizer.pt")(checkpoint)
    one.train(resume_from_checkpoint=str(checkpoint))
    assert begun(home, one)["restored"] == {
        "optimizer": False,
        "scheduler": False,
        "rng": True,
        "data_order": True,
    }


def test_arguments_asked_for_and_in_effect(home, unbroken, tmp_path):
    """A resume takes the checkpoint's intervals; the batch size is the new one, whatever the checkpoint says."""
    changes = {"logging_steps": 3, "save_steps": 0.5, "per_device_train_batch_size": 4, "warmup_steps": 0.25}
    one, _ = resume(unbroken, tmp_path, {}, keep, changes)
    event = begun(home, one)
    assert event["requested"] == {"logging_steps": 3, "save_steps": 4}
    assert (event["effective"]["logging_steps"], event["effective"]["save_steps"]) == (1, 4)
    assert (event["effective"]["per_device_train_batch_size"], event["effective"]["batch_size"]) == (4, 4)
    assert event["effective"]["warmup_steps"] == 2  # a quarter of eight
    assert event["trainer"] == "Trainer"
