"""The verdicts about one run, fed with scripted events and moments; times are worked out by hand."""

from __future__ import annotations

import collections
import sys

import health_feed
import pytest
from health_feed import active, log, moment

from tunewatch.health import LEVELS, SIGNALS, Health, Patience, Thresholds, Verdict, human_duration

NAN = float("nan")


def begin(health, *, precision="bf16", each_step=True, **fields):
    health_feed.begin(health, precision=precision, each_step=each_step, **fields)


def bad(health, step, *, loss=False, norm=False, rank=0):
    health.event({"event": "nonfinite", "rank": rank, "step": step, "loss": loss, "grad_norm": norm})


def sound(health, step, rank=0):
    health.event({"event": "finite", "rank": rank, "step": step})


def test_each_signal_has_one_level_and_verdicts_are_complete():
    assert set(SIGNALS.values()) == set(LEVELS)
    assert {name for name, level in SIGNALS.items() if level == "bad"} == {
        "nonfinite", "fp16_overflow", "zero_loss", "labels_masked", "nothing_trainable", "no_gradient", "lr_zero",
        "diverging", "resume_lost", "stalled",
    }  # fmt: skip
    health = Health()
    begin(health)
    bad(health, 7, loss=True, norm=True)
    (verdict,) = health.verdicts
    assert (verdict.signal, verdict.level, verdict.step) == ("nonfinite", "bad", 7)
    assert (
        verdict.message
        == "The loss and gradient norm is NaN or infinite since step 7 (bf16): the weights are damaged."
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
    assert [verdict.level for verdict in health.verdicts] == ["bad", "attention", "attention"]


def test_a_note_never_changes_the_health():
    health = Health()
    begin(health, precision="fp16")
    bad(health, 3, norm=True)
    assert [verdict.level for verdict in health.verdicts] == ["info"]
    assert health.level == "ok"


def test_a_signal_can_be_switched_off():
    health = Health(thresholds=Thresholds(off=frozenset({"nonfinite"})))
    begin(health)
    bad(health, 3, norm=True)
    assert active(health) == set()
    with pytest.raises(ValueError, match="no such signal: nonsense; there are nonfinite"):
        Thresholds(off=frozenset({"nonsense"}))
    with pytest.raises(ValueError, match="threshold flat_logs: 0 is not a number above 0"):
        Thresholds(flat_logs=0)


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
            assert active(health) == {"norm_overflow"}
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
        assert active(health) == {"norm_overflow"}

    def test_four_ranks_that_report_one_step_are_one_step(self):
        health = Health()
        begin(health, precision="fp16")
        for rank in range(4):
            bad(health, 3, norm=True, rank=rank)
        assert active(health) == {"norm_overflow"}

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

    def test_a_sound_step_proves_that_the_weights_are_and_heals_after_ten(self):
        health = Health()
        begin(health)
        bad(health, 7, norm=True)
        health.tick(moment(step=30))
        assert active(health) == {"nonfinite"}, "no sound step was seen: it goes on"
        sound(health, 8)
        assert health.nonfinite_since is None
        health.tick(moment(step=16))
        assert active(health) == {"nonfinite_isolated"}
        assert health.verdicts[0].step == 7
        health.tick(moment(step=17))
        assert active(health) == set()

    def test_three_in_a_row_are_not_taken_back_by_one_sound_step(self):
        health = Health()
        begin(health)
        for step in (7, 8, 9):
            bad(health, step, norm=True)
        sound(health, 10)
        assert active(health) == {"nonfinite"}
        health.tick(moment(step=19))
        assert active(health) == set()

    def test_a_new_training_starts_clean(self):
        health = Health()
        begin(health)
        bad(health, 7, norm=True)
        log(health, 8, {"eval_loss": "nan"})
        begin(health)
        assert active(health) == set()
        assert health.nonfinite_since is None

    @pytest.mark.parametrize(
        ("apart", "found"),
        [(11, True), (12, False)],  # the tenth is 99 or 108 steps after the first
    )
    def test_ten_within_a_hundred_steps_are_bad_though_none_is_by_itself(self, apart, found):
        health = Health()
        begin(health, precision="fp16")
        for number in range(9):
            bad(health, 7 + number * apart, norm=True)
            sound(health, 8 + number * apart)
            assert active(health) == {"norm_overflow"}
        bad(health, 7 + 9 * apart, norm=True)
        assert active(health) == ({"nonfinite"} if found else {"norm_overflow"})
        if found:
            assert health.verdicts[0].message == (
                "The gradient norm was NaN or infinite in 10 of the last 100 steps (fp16)."
            )
            assert health.verdicts[0].step == 7
            sound(health, 107)
            health.tick(moment(step=106))
            assert active(health) == {"nonfinite"}, "ten are still in the last hundred"
            health.tick(moment(step=116))
            assert active(health) == set()

    def test_the_same_of_losses_whose_gradients_the_user_zeroes(self):
        health = Health()
        begin(health)
        for step in range(10, 101, 10):
            assert health.level in ("ok", "attention")
            bad(health, step, loss=True)
            sound(health, step + 1)
        assert active(health) == {"nonfinite"}
        assert "in 10 of the last 91 steps (bf16)" in health.verdicts[0].message

    @pytest.mark.parametrize(
        ("precision", "rate", "words", "advice"),
        [
            (
                "fp16",
                2e-4,
                "(fp16, learning rate 0.0002)",
                "with bf16 instead of fp16, or a lower learning rate.",
            ),
            ("bf16", 5e-5, "(bf16, learning rate 5e-05)", "with a lower learning rate."),
            ("fp32", None, "(fp32)", "with a lower learning rate."),
            (None, 1e-3, "(learning rate 0.001)", "with a lower learning rate or bf16."),
            (None, None, "since step 3:", "with a lower learning rate or bf16."),
        ],
    )
    def test_it_names_precision_and_learning_rate(self, precision, rate, words, advice):
        health = Health()
        begin(health, precision=precision, effective={"learning_rate": rate})
        for step in (3, 4, 5):
            bad(health, step, loss=True, norm=True)
        assert words in health.verdicts[0].message
        assert health.verdicts[0].advice.endswith(advice)

    def test_the_rate_is_that_of_the_last_log(self):
        health = Health()
        begin(health, effective={"learning_rate": 1e-3})
        log(health, 10, loss=2.0, learning_rate=7e-4)
        bad(health, 11, norm=True)
        assert "learning rate 0.0007" in health.verdicts[0].message


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
        assert active(health) == {"norm_overflow"}
        for step in range(20, 120, 10):
            log(health, step, loss=2.0 - step / 1000, grad_norm=1.0)
            health.tick(moment(step=step))
            assert active(health) == {"norm_overflow"}
        log(health, 120, loss=1.8, grad_norm=1.0)
        assert active(health) == set(), "ten sound logs later"

    def test_skips_that_the_scaler_counts_explain_dead_lines_however_many(self):
        for skips, expected in ((False, {"nonfinite"}), (True, {"norm_overflow", "fp16_skips"})):
            health = Health()
            begin(health, precision="fp16", each_step=False)
            for step in range(1, 16):
                log(health, step, {"grad_norm": "inf"}, loss=0.0, skipped=step * skips)
            assert active(health) == expected

    def test_a_gradient_norm_that_dies_first_is_bad_at_its_line(self):
        health = Health()
        begin(health, each_step=False)
        log(health, 5, loss=1.52, grad_norm=0.8)
        log(health, 10, {"grad_norm": "nan"}, loss=1.4596)
        assert active(health) == {"nonfinite"}
        log(health, 15, {"grad_norm": "nan"}, loss=0.0)
        assert health.verdicts[0].step == health.nonfinite_since == 10

    @pytest.mark.parametrize("spelled", ["nan", "inf"])
    def test_a_log_read_on_its_own_excuses_one_line_and_two_but_not_three(self, spelled):
        health = Health()
        for step in (10, 20):
            log(health, step, {"grad_norm": spelled}, loss=2.4)
            assert active(health) == {"norm_overflow"}
        log(health, 30, {"grad_norm": spelled}, loss=2.4)
        assert active(health) == {"nonfinite"}
        assert health.verdicts[0].step == 10

    def test_ten_lines_of_a_hundred_are_bad(self):
        health = Health()
        for step in range(1, 92):
            bad_line = {"grad_norm": "inf"} if step % 10 == 1 else None
            log(health, step * 5, bad_line, loss=2.4 - step / 200)
            assert ("nonfinite" in active(health)) == (step == 91)
        assert "in 10 of the last 91 logs" in health.verdicts[0].message

    def test_a_log_read_on_its_own_with_a_made_up_loss_is_dead_at_once(self):
        health = Health()
        log(health, 10, {"grad_norm": "nan"}, loss=0.0)
        assert active(health) == {"nonfinite"}

    def test_where_a_reward_is_optimized_a_loss_of_0_beside_it_proves_nothing(self):
        health = Health()
        log(health, 1, loss=0.0, grad_norm=0.2, reward=1.0)
        log(health, 2, {"grad_norm": "nan"}, loss=0.0, reward=1.0)
        assert health.level == "ok"

    def test_other_keys_that_are_not_finite_never_count(self):
        health = Health()
        begin(health, each_step=False)
        for step in range(1, 9):
            log(health, step, {"logits/chosen": "nan", "entropy": "inf"}, loss=0.69, grad_norm=1.0)
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


PATIENCE = Patience(
    prepare=100.0, first_step=50.0, step=10.0, step_factor=4.0, evaluate=30.0, save=20.0, package=70.0
)


class TestStall:
    @pytest.mark.parametrize(
        ("state", "allowed", "where"),
        [
            ({"phase": "prepare", "step": None, "first": True, "detail": "tokens"}, 100, "while preparing (tokens)"),
            ({"phase": "data", "first": True, "step": 0, "detail": "first batch"}, 50, "waiting for the next batch"),
            ({"phase": "data", "first": True, "step": 4, "activity": "skip_data"}, 100, "waiting for the next batch"),
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


def _size(root):
    """Bytes of everything a Health holds, containers and slots followed."""
    seen, todo, total = set(), collections.deque([root]), 0
    while todo:
        item = todo.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (int, float, str)):
            continue
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple, set, collections.deque)):
            todo.extend(item)
        elif type(item).__module__.startswith("tunewatch.health"):
            todo.extend(vars(item).values() if hasattr(item, "__dict__") else ())
            todo.extend(getattr(item, name, None) for name in getattr(type(item), "__slots__", ()))
    return total


def test_memory_is_constant():
    health = Health()
    begin(health)

    def feed(first, last):
        for step in range(first, last):
            bad(health, step, norm=True)
            if step % 3 == 0:
                sound(health, step)
            values = {f"eval_{step}b_loss": 1.0, f"key{step}": 1.0, "learning_rate": 1e-4, "grad_norm": 1.0}
            log(health, step, {f"eval_{step}_loss": "nan"}, loss=1.0, **values)
            health.event({"event": "evaluate", "seconds": float(step)})
            health.tick(moment(silent=step % 700, step=step))

    def size():
        return _size(health)

    feed(0, 700)
    before = size()
    feed(700, 5000)
    assert size() == pytest.approx(before, rel=0.02)


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
