"""The verdicts about one run, fed with scripted events and moments; times are worked out by hand."""

from __future__ import annotations

import sys

import pytest

from tunewatch.health import SIGNALS, Health, Moment, Patience, Verdict, human_duration

NAN = float("nan")


def begin(health, *, precision="bf16", each_step=True, step=0, restored=None):
    health.event(
        {
            "event": "train_begin",
            "step": step,
            "effective": {"precision": precision},
            "nan_visibility": "each step" if each_step else "logs only",
            "restored": restored or {},
        }
    )


def bad(health, step, *, loss=False, norm=False, rank=0):
    health.event({"event": "nonfinite", "rank": rank, "step": step, "loss": loss, "grad_norm": norm})


def sound(health, step, rank=0):
    health.event({"event": "finite", "rank": rank, "step": step})


def log(health, step, nonfinite=None, **values):
    health.event({"event": "log", "step": step, "values": values, "nonfinite": nonfinite or {}})


def moment(now=1000.0, *, silent=0.0, phase="compute", detail="", step=100, first=False, pace=1.0):
    return Moment(now, phase, detail, now - silent, step, first, pace)


def active(health):
    return {verdict.signal for verdict in health.verdicts}


def test_each_signal_has_one_level_and_verdicts_are_complete():
    assert SIGNALS == {
        "nonfinite": "bad", "nonfinite_isolated": "attention", "eval_nonfinite": "attention",
        "stalled": "bad", "resume_lost": "bad",
    }  # fmt: skip
    health = Health()
    begin(health)
    bad(health, 7, loss=True, norm=True)
    (verdict,) = health.verdicts
    assert (verdict.signal, verdict.level, verdict.step) == ("nonfinite", "bad", 7)
    assert (
        verdict.message
        == "The loss and gradient norm is NaN or infinite since step 7: the weights are damaged."
    )
    assert verdict.advice
    assert Verdict(**verdict.to_json()) == verdict


def test_unknown_until_something_is_heard_then_the_worst_level():
    health = Health()
    assert health.level == "unknown"
    begin(health)
    assert health.level == "ok"
    log(health, 10, {"eval_loss": "nan"})
    assert health.level == "attention"
    bad(health, 11, norm=True)
    assert health.level == "bad"
    assert [verdict.level for verdict in health.verdicts] == ["bad", "attention"]


class TestNonFinite:
    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    def test_a_gradient_norm_is_bad_at_once(self, precision):
        health = Health()
        begin(health, precision=precision)
        bad(health, 7, norm=True)
        assert active(health) == {"nonfinite"}
        assert health.nonfinite_since == 7

    def test_in_fp16_it_takes_three_in_a_row(self):
        health = Health()
        begin(health, precision="fp16")
        for step in (5, 6):
            bad(health, step, norm=True)
            assert active(health) == {"nonfinite_isolated"}
            assert health.nonfinite_since is None
        bad(health, 7, norm=True)
        assert active(health) == {"nonfinite"}
        assert health.nonfinite_since == 5
        assert "since step 5" in health.verdicts[0].message

    def test_in_fp16_a_sound_step_between_starts_the_count_again(self):
        health = Health()
        begin(health, precision="fp16")
        for step in (2, 4, 6, 8):
            bad(health, step, norm=True)
            sound(health, step + 1)
        assert active(health) == {"nonfinite_isolated"}

    def test_four_ranks_that_report_one_step_are_one_step(self):
        health = Health()
        begin(health, precision="fp16")
        for rank in range(4):
            bad(health, 3, norm=True, rank=rank)
        assert active(health) == {"nonfinite_isolated"}

    def test_a_loss_whose_gradients_stayed_sound_is_attention(self):
        health = Health()
        begin(health)
        bad(health, 3, loss=True)
        sound(health, 4)
        assert active(health) == {"nonfinite_isolated"}
        assert health.verdicts[0].step == 3

    def test_three_such_losses_in_a_row_are_bad(self):
        health = Health()
        begin(health)
        for step in (3, 4, 5):
            bad(health, step, loss=True)
        assert active(health) == {"nonfinite"}
        assert health.nonfinite_since == 3

    def test_healed_after_ten_clean_steps(self):
        health = Health()
        begin(health)
        bad(health, 7, norm=True)
        health.tick(moment(step=30))
        assert active(health) == {"nonfinite"}, "no sound step was seen: it goes on"
        sound(health, 8)
        assert health.nonfinite_since is None
        health.tick(moment(step=16))
        assert active(health) == {"nonfinite"}
        health.tick(moment(step=17))
        assert active(health) == set()

    def test_a_new_training_starts_clean(self):
        health = Health()
        begin(health)
        bad(health, 7, norm=True)
        log(health, 8, {"eval_loss": "nan"})
        begin(health)
        assert active(health) == set()
        assert health.nonfinite_since is None


class TestFromLogsOnly:
    """Where the steps are not seen (an older transformers), the logs have to do."""

    def test_the_filtered_loss_of_a_dead_run_is_bad_at_the_first_line(self):
        health = Health()
        begin(health, each_step=False)
        log(health, 1, loss=4.17, grad_norm=0.9)
        assert active(health) == set()
        log(health, 2, {"grad_norm": "nan"}, loss=0.0)
        assert active(health) == {"nonfinite"}
        assert health.verdicts[0].message.startswith(
            "The loss and gradient norm is NaN or infinite since step 2"
        )

    def test_a_window_that_holds_one_bad_step_is_bad_too(self):
        health = Health()
        begin(health, each_step=False)
        log(health, 3, {"grad_norm": "nan"}, loss=3.705)
        assert active(health) == {"nonfinite"}
        assert "The gradient norm is" in health.verdicts[0].message

    def test_without_a_gradient_norm_a_bad_loss_is_bad(self):
        health = Health()
        begin(health, each_step=False)
        log(health, 3, {"loss": "nan"})
        assert active(health) == {"nonfinite"}

    def test_with_a_sound_gradient_norm_it_is_attention(self):
        health = Health()
        begin(health, each_step=False)
        log(health, 3, {"loss": "nan"}, grad_norm=0.17)
        assert active(health) == {"nonfinite_isolated"}

    def test_fp16_and_healing(self):
        health = Health()
        begin(health, precision="fp16", each_step=False)
        log(health, 10, {"grad_norm": "inf"}, loss=2.0)
        assert active(health) == {"nonfinite_isolated"}
        log(health, 20, loss=2.0, grad_norm=1.0)
        health.tick(moment(step=20))
        assert active(health) == set()

    def test_no_labels_at_all_is_another_matter(self):
        """A loss of exactly 0 with a finite norm is what fully masked labels give."""
        health = Health()
        begin(health, each_step=False)
        log(health, 1, loss=0.0, grad_norm=0.0)
        assert active(health) == set()

    def test_where_each_step_is_seen_the_logs_do_not_count_twice(self):
        health = Health()
        begin(health)
        log(health, 2, {"grad_norm": "nan"}, loss=0.0)
        assert active(health) == set()


def test_evaluation_sets_are_told_apart():
    health = Health()
    begin(health)
    log(health, 10, {"eval_a_loss": "nan"})
    log(health, 10, eval_b_loss=2.0)
    assert active(health) == {"eval_nonfinite"}, "a sound set does not heal another"
    assert "eval_a_loss" in health.verdicts[0].message
    log(health, 20, eval_a_loss=2.1)
    assert active(health) == set()


@pytest.mark.parametrize(
    ("step", "restored", "words"),
    [
        (40, {"optimizer": False, "scheduler": True}, "did not restore the optimizer:"),
        (40, {"optimizer": True, "scheduler": False}, "did not restore the learning rate schedule:"),
        (40, {"optimizer": False, "scheduler": False}, "the optimizer and learning rate schedule:"),
        (40, {"optimizer": True, "scheduler": True, "rng": False}, None),
        (40, {"optimizer": None, "scheduler": None}, None),
        (0, {"optimizer": False, "scheduler": False}, None),
    ],
)
def test_a_lossy_resume_is_said_before_the_first_step(step, restored, words):
    health = Health()
    begin(health, step=step, restored=restored)
    if words is None:
        assert active(health) == set()
    else:
        assert active(health) == {"resume_lost"}
        assert words in health.verdicts[0].message
        begin(health, step=40, restored={"optimizer": True, "scheduler": True})
        assert active(health) == set()


PATIENCE = Patience(
    prepare=100.0, first_step=50.0, step=10.0, step_factor=4.0, evaluate=30.0, save=20.0, package=70.0
)


class TestStall:
    @pytest.mark.parametrize(
        ("state", "allowed", "where"),
        [
            ({"phase": "prepare", "step": None, "first": True, "detail": "tokens"}, 100, "while preparing (tokens)"),
            ({"phase": "data", "first": True, "step": 0, "detail": "first batch"}, 50, "waiting for the next batch"),
            ({"phase": "data", "first": True, "step": 4, "detail": "skipping data"}, 100, "waiting for the next batch"),
            ({"phase": "compute", "first": True, "step": 0, "pace": None}, 50, "inside a step"),
            ({"phase": "compute", "pace": 1.0}, 10, "after step 100, inside a step"),
            ({"phase": "data", "pace": 2.5}, 10, "after step 100, waiting for the next batch"),
            ({"phase": "data", "pace": 7.0}, 28, "after step 100, waiting for the next batch"),
            ({"phase": "data", "pace": 7.0, "detail": "skipping data"}, 28, "after step 100, waiting"),
            ({"phase": "evaluate"}, 30, "in an evaluation"),
            ({"phase": "save", "detail": "checkpoint-100"}, 20, "saving a checkpoint (checkpoint-100)"),
            ({"phase": "package"}, 70, "after the training"),
        ],
    )  # fmt: skip
    def test_each_phase_has_its_patience_and_its_words(self, state, allowed, where):
        health = Health(PATIENCE)
        health.tick(moment(silent=allowed, **state))
        assert active(health) == set()
        assert health.deadline == 1000.0
        health.tick(moment(silent=allowed + 0.5, **state))
        assert active(health) == {"stalled"}
        assert where in health.verdicts[0].message
        assert human_duration(allowed + 0.5) in health.verdicts[0].message
        never = state.get("first") and state["phase"] in ("data", "compute")
        assert health.verdicts[0].message.startswith("No first step yet" if never else "No sign of life")
        assert health.verdicts[0].advice

    def test_a_sign_of_life_takes_it_back(self):
        health = Health(PATIENCE)
        health.tick(moment(silent=11))
        assert health.is_active("stalled")
        health.tick(moment(silent=0.1))
        assert not health.is_active("stalled")
        assert health.deadline == pytest.approx(999.9 + 10)

    def test_the_longest_evaluation_and_save_are_learned(self):
        health = Health(PATIENCE)
        for seconds in (5.0, 40.0, 6.0, None, NAN):
            health.event({"event": "evaluate", "step": 1, "seconds": seconds, "batches": 3})
        health.event({"event": "save", "step": 1, "checkpoint": "checkpoint-1", "seconds": 15.0})
        health.event({"event": "save", "step": 1, "checkpoint": "checkpoint-1", "seconds": None})
        assert health.allowed(moment(phase="evaluate")) == 120.0
        assert health.allowed(moment(phase="save")) == 45.0

    def test_the_defaults(self):
        health = Health()
        assert health.allowed(moment(pace=2.0)) == 300.0
        assert health.allowed(moment(pace=45.0)) == 450.0
        assert health.allowed(moment(phase="prepare")) == 3600.0
        assert health.allowed(moment(phase="evaluate")) == 1800.0

    def test_an_ended_run_can_not_stall(self):
        health = Health(PATIENCE)
        health.tick(moment(silent=11))
        health.silence()
        assert health.deadline is None
        assert not health.is_active("stalled")


def test_memory_is_constant():
    health = Health()
    begin(health)

    def feed(first, last):
        for step in range(first, last):
            bad(health, step, norm=True)
            if step % 3 == 0:
                sound(health, step)
            log(health, step, {f"eval_{step}_loss": "nan"}, loss=1.0, **{f"key{step}": 1.0})
            health.event({"event": "evaluate", "seconds": float(step)})
            health.tick(moment(silent=step % 700, step=step))

    def size():
        state = vars(health)
        return sum(len(value) for value in state.values() if hasattr(value, "__len__")) + sys.getsizeof(state)

    feed(0, 200)
    before = size()
    feed(200, 5000)
    assert size() == before


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.7, "1 min 0 s"),
        (330, "5 min 30 s"),
        (3599.6, "1 h 0 min"),
        (11100, "3 h 5 min"),
        (187200, "2 d 4 h"),
    ],
)
def test_human_duration(seconds, text):
    assert human_duration(seconds) == text
