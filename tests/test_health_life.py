"""Verdicts on pace, checkpoints, disk and time, from moments; every number is worked out by hand."""

from __future__ import annotations

import random

import pytest
from health_feed import active, alarms, begin, moment, verdict

from tunewatch.health import Disk, Health, Patience, Saves, Thresholds, Work

MINUTE, HOUR = 60.0, 3600.0


class Told:
    """A training told step by step: a look at each step's end (or each `look` seconds), with each rank's work so far.

    The first step, which is judged by nobody, is over when it begins.
    """

    def __init__(self, ranks=1, **fields):
        self.health = Health()
        begin(self.health, **fields)
        self.now, self.step, self.behind = 1000.0, fields.get("step", 0), None
        self.total = {
            rank: dict.fromkeys(("steps", "seconds", "tokens", "data", "compute"), 0.0)
            for rank in range(ranks)
        }
        self.ever = set()
        self.look(first=True)
        self.steps(1, 30.0)

    def steps(self, number, seconds, tokens=1000, data=0.0, look=None):
        """So many steps of so many seconds; `data` seconds of each are waiting, one number or one for each rank."""
        for _ in range(number):
            self.step += 1
            for _ in range(round(seconds / look) - 1 if look else 0):
                self.now += look
                self.look()
            self.now += look or seconds
            for rank, total in self.total.items():
                wait = data[rank] if isinstance(data, tuple) else data
                total["steps"] += 1
                total["seconds"] += seconds
                total["tokens"] = None if tokens is None else (total["tokens"] or 0.0) + tokens
                total["data"] += wait
                total["compute"] += seconds - wait
            self.look()

    def look(self, phase="data", **fields):
        ranks = {rank: Work(**total) for rank, total in self.total.items()}
        self.health.tick(
            moment(self.now, phase=phase, step=self.step, ranks=ranks, last_in_step=self.behind, **fields)
        )
        if self.health.level != "ok":
            self.ever |= self.alarms

    def process_starts_anew(self):
        for total in self.total.values():
            total.update(dict.fromkeys(total, 0.0))

    @property
    def alarms(self):
        return alarms(self.health)


class TestSlow:
    """A stretch is a minute: 30 steps of 2 s. Five of them make the reference: 500 tokens a second."""

    @pytest.fixture
    def told(self):
        told = Told()
        told.steps(150, 2.0)
        return told

    def test_half_the_pace_for_five_minutes(self, told):
        told.steps(74, 4.0)
        assert told.alarms == set()
        told.steps(1, 4.0)
        assert told.alarms == {"slow"}
        found = verdict(told.health, "slow")
        assert found.step == 226
        assert found.message == (
            "It trains 250 tokens a second, and trained 500 for a while earlier in this run. 0% of the time it waits "
            "for data."
        )

    def test_long_steps_are_looked_at_five_at_a_time(self):
        told = Told()
        told.steps(25, 100.0)
        told.steps(24, 200.0)
        assert told.alarms == set()
        told.steps(1, 200.0)
        assert told.alarms == {"slow"}

    @pytest.mark.parametrize(("seconds", "raised"), [(3.3, False), (3.4, True)])
    def test_the_limit_is_six_tenths(self, told, seconds, raised):
        told.steps(200, seconds)  # 2 s / 0.6 = 3.33 s
        assert told.alarms == ({"slow"} if raised else set())

    def test_over_when_it_is_near_its_old_pace_again(self, told):
        told.steps(75, 4.0)
        told.steps(40, 3.0)  # below 3.33 s, but not below four fifths of that
        assert told.alarms == {"slow"}
        told.steps(24, 2.5)  # a minute
        assert told.alarms == set()
        told.steps(74, 4.0)
        assert told.alarms == set(), "it must last for five minutes again"

    def test_four_minutes_with_a_minute_of_the_old_pace_between_are_none(self, told):
        for _ in range(5):
            told.steps(60, 4.0)
            told.steps(30, 2.0)
        assert told.ever == set()

    def test_one_long_step_is_none(self, told):
        for _ in range(20):
            told.steps(1, 400.0)
            told.steps(60, 2.0)
        assert told.ever == set()

    @pytest.mark.parametrize(
        ("seconds", "tokens"),
        [(8.0, 4000), (32.0, 4000), (1.0, 100), (2.0, 250), (2.0, 4000)],
        ids=["longer", "longer_squared", "shorter", "shorter_at_no_gain", "packed"],
    )
    def test_other_lengths_are_none(self, told, seconds, tokens):
        told.steps(400, seconds, tokens=tokens)
        assert told.ever == set()

    @pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
    def test_jagged_lengths_are_none(self, power):
        draw, told = random.Random(7), Told()
        for _ in range(20_000):
            tokens = draw.randint(50, 2000)
            told.steps(1, 2.0 * (tokens / 1000) ** power, tokens=tokens)
        assert told.ever == set()

    def test_jagged_lengths_hide_no_slow_run(self):
        draw, told = random.Random(7), Told()
        for factor, expected in ((1.0, set()), (2.0, {"slow"}), (1.0, set())):
            for _ in range(1000):
                tokens = draw.randint(50, 2000)
                told.steps(1, factor * (0.2 + 0.002 * tokens), tokens=tokens)
            assert told.alarms == expected

    def test_warming_up_is_none(self):
        told = Told()
        for seconds in (120.0, 30.0, 10.0, 5.0, 3.0, 2.0):
            told.steps(40, seconds)
        assert told.ever == set()

    def test_where_tokens_are_not_known_steps_count(self):
        told = Told()
        told.steps(150, 2.0, tokens=None)
        told.steps(75, 5.0, tokens=None, data=3.0)
        assert "slow" in told.alarms
        assert verdict(told.health, "slow").message == (
            "A step takes 5 s, and took 2 s for a while earlier in this run. 60% of the time it waits for data."
        )

    def test_a_resume_has_a_pace_of_its_own(self, told):
        told.steps(75, 4.0)
        begin(told.health, step=told.step)
        assert told.alarms == set()
        told.look(first=True)
        told.process_starts_anew()
        told.steps(400, 4.0)
        assert told.alarms == set()

    def test_a_process_that_took_its_place_is_judged_by_the_same_pace(self, told):
        told.process_starts_anew()
        told.steps(1, 300.0)
        assert told.alarms == set()
        told.steps(75, 4.0)
        assert told.alarms == {"slow"}

    def test_over_when_the_training_is(self, told):
        told.steps(75, 4.0)
        told.look(phase="package")
        assert told.alarms == set()


class TestDataStarved:
    def test_it_waits_for_two_fifths_of_its_time(self):
        told = Told()
        told.steps(149, 2.0, data=0.8)
        assert told.alarms == set()
        told.steps(1, 2.0, data=0.8)
        assert told.alarms == {"data_starved"}
        assert verdict(told.health, "data_starved").message == (
            "It waits for the next batch for 40% of its time, 0.8 s before each step."
        )

    @pytest.mark.parametrize(
        ("seconds", "data", "raised"),
        [(2.0, 0.58, False), (2.0, 0.62, True), (0.1, 0.045, False), (0.11, 0.055, True)],
        ids=["less_than_the_limit", "more_than_the_limit", "milliseconds", "half_of_a_tenth_of_a_second"],
    )
    def test_the_limits(self, seconds, data, raised):
        told = Told()
        told.steps(round(400 / seconds), seconds, data=data)
        assert told.alarms == ({"data_starved"} if raised else set())

    @pytest.mark.parametrize(
        ("fields", "raised"),
        [
            ({"gpus": ["GPU-1"], "nan_filter": False}, False),
            ({"gpus": ["GPU-1"], "nan_filter": True}, True),
            ({"gpus": [], "nan_filter": False}, True),
        ],
        ids=["copies_wait_for_the_gpu", "the_filter_waits_for_it", "no_gpu"],
    )
    def test_waiting_for_the_gpu_is_none(self, fields, raised):
        told = Told(**fields)
        told.steps(150, 2.0, data=1.6)
        assert told.alarms == ({"data_starved"} if raised else set())
        told.steps(75, 4.0, data=1.6)
        assert ("waits for data" in verdict(told.health, "slow").message) == raised

    def test_one_long_wait_is_none(self):
        told = Told()
        told.steps(149, 2.0)
        told.steps(1, 600.0, data=598.0)
        told.steps(300, 2.0)
        assert told.ever == set()

    def test_many_of_them_are(self):
        """A loader with a buffer: 40 steps of a second without a wait, then one of a minute."""
        told = Told()
        for _ in range(8):
            told.steps(40, 1.0)
            told.steps(1, 61.0, data=60.0)
        assert told.alarms == {"data_starved"}

    def test_over_when_most_of_the_last_minutes_were_well(self):
        told = Told()
        told.steps(150, 2.0, data=0.8)
        told.steps(150, 2.0, data=0.5)  # a quarter, which is more than two thirds of the limit
        assert told.alarms == {"data_starved"}
        told.steps(30, 2.0)  # three of the last four minutes were such: 45 s of 240
        assert told.alarms == set()

    def test_the_first_batch_and_skipped_data_do_not_count(self):
        told = Told(step=500)
        told.total[0]["data"] = 7200.0
        told.look(first=True)
        told.steps(1, 3.0)
        told.steps(300, 2.0)
        assert told.ever == set()


class TestSlowRank:
    def test_one_waits_for_its_data_and_the_others_for_it(self):
        told = Told(ranks=3)
        told.steps(149, 2.0, data=(0.1, 0.1, 1.0))
        assert told.alarms == set()
        told.steps(1, 2.0, data=(0.1, 0.1, 1.0))
        assert "slow_rank" in told.alarms
        found = verdict(told.health, "slow_rank")
        assert found.message == (
            "Rank 2 keeps the others waiting for 45% of the time, 0.9 s in each step, while it waits for its data."
        )
        told.steps(30, 2.0, data=(0.1, 0.1, 0.6))  # a quarter, which is more than two thirds of the limit
        assert "slow_rank" in told.alarms
        told.steps(30, 2.0, data=(0.1, 0.1, 0.4))
        assert "slow_rank" not in told.alarms

    def test_another_rank_is_another_matter(self):
        told = Told(ranks=2)
        told.steps(150, 2.0, data=(0.1, 0.8))
        assert "Rank 1 keeps the others waiting for 35% of" in verdict(told.health, "slow_rank").message
        told.steps(30, 2.0, data=(0.8, 0.1))
        assert "slow_rank" not in told.alarms

    @pytest.mark.parametrize(
        "data", [(0.1, 0.6), (0.9, 1.0), (0.0, 0.0)], ids=["a_quarter", "all_wait", "none_waits"]
    )
    def test_too_little(self, data):
        told = Told(ranks=2)
        told.steps(400, 2.0, data=data)
        assert "slow_rank" not in told.ever

    def test_milliseconds_are_none(self):
        told = Told(ranks=2)
        told.steps(4000, 0.15, data=(0.01, 0.1))
        assert "slow_rank" not in told.ever

    def test_another_one_each_minute_is_none(self):
        told = Told(ranks=2)
        for _ in range(10):
            told.steps(30, 2.0, data=(0.1, 1.0))
            told.steps(30, 2.0, data=(1.0, 0.1))
        assert "slow_rank" not in told.ever

    def test_one_computes_its_loss_while_the_others_wait_for_its_gradients(self):
        told = Told(ranks=2)
        told.behind = 1
        for _ in range(75):  # of 4 s; 2 s of them rank 1 alone has no loss yet
            told.behind = 1
            told.steps(1, 2.0, look=0.5, tokens=500)
            told.behind = None
            told.steps(1, 2.0, look=0.5, tokens=500)
        assert told.alarms == {"slow_rank"}
        message = verdict(told.health, "slow_rank").message
        assert message.startswith("Rank 1 keeps the others waiting for 50% of the time")
        assert message.endswith("while it computes its loss.")

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_parts_of_a_step_that_are_too_short_to_be_seen(self, accumulation):
        told = Told(ranks=2, effective={"gradient_accumulation_steps": accumulation})
        told.behind = 1
        told.steps(150, 2.0, look=0.5)
        assert told.alarms == ({"slow_rank"} if accumulation == 1 else set())

    def test_a_single_process_waits_for_nobody(self):
        told = Told()
        told.steps(400, 2.0, data=0.5)
        assert told.ever == set()

    def test_ranks_that_come_and_go_are_no_reason(self):
        told = Told(ranks=2)
        for _ in range(6):
            told.steps(30, 2.0, data=(0.1, 1.0))
            gone = told.total.pop(1)
            told.look()
            told.total[1] = gone
        assert "slow_rank" not in told.ever


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_training_of_milliseconds_on_a_busy_machine_raises_none(seed):
    """Eight hours of steps of 20 ms, a quarter of it data; for 20 s at a time it goes up to three times as slow."""
    draw, told = random.Random(seed), Told(ranks=2)
    for _ in range(8 * 180):
        factor = draw.uniform(1.0, 3.0)
        for _ in range(20):  # a look each second
            share = draw.uniform(0.1, 0.5)
            for total in told.total.values():
                steps = 1.0 / (0.02 * factor)
                total["steps"] += steps
                total["seconds"] += 1.0
                total["tokens"] += steps * draw.uniform(900, 1100)
                total["data"] += share * draw.uniform(0.5, 1.0)
                total["compute"] += 1.0 - share
            told.now += 1.0
            told.step += round(steps)
            told.behind = draw.choice((None, 0, 1))
            told.look()
    assert told.ever == set()


@pytest.mark.parametrize(
    ("risk", "message"),
    [
        ({"unsaved_seconds": 3700.0, "save_seconds_apart": 1200.0},
         "The last complete checkpoint is 1 h 1 min of work old; usual is 20 min 0 s."),
        ({"unsaved_seconds": 2900.0, "save_seconds_apart": 1200.0}, None),
        ({"unsaved_seconds": 600.0, "save_seconds_apart": 60.0}, None),
        ({"unsaved_seconds": 1860.0, "left_seconds": 5 * HOUR, "saves": Saves("no", last=900)},
         "This training makes no checkpoints (save_strategy no): 31 min 0 s of work would be lost now, and 5 h 31 min "
         "at its end."),
        ({"unsaved_seconds": 1800.0, "left_seconds": 5 * HOUR, "saves": Saves("no", last=900)}, None),
        ({"unsaved_seconds": 1860.0, "left_seconds": 3 * HOUR, "saves": Saves("no", last=900)}, None),
        ({"unsaved_seconds": 1860.0, "saves": Saves("no")}, None),
        ({"unsaved_seconds": 4 * HOUR + 60, "saves": Saves("no")},
         "This training makes no checkpoints (save_strategy no): 4 h 1 min of work would be lost now."),
        ({"unsaved_seconds": 1860.0, "left_seconds": 5 * HOUR, "saves": Saves("steps", every=1000, last=900)},
         "The first checkpoint comes at the end, at step 900: 31 min 0 s of work would be lost now, and 5 h 31 min at "
         "its end."),
        ({"unsaved_seconds": 1860.0, "left_seconds": 5 * HOUR, "save_seconds_apart": 3 * HOUR,
          "saves": Saves("steps", every=600, last=900)}, None),
        ({"unsaved_seconds": 4 * HOUR + 60, "left_seconds": HOUR, "saves": Saves("best", last=900)},
         "No checkpoint has been made for a long time: 4 h 1 min of work would be lost now."),
        ({"unsaved_seconds": 9 * HOUR}, None),
        ({"save_seconds_apart": 60.0}, None),
    ],
)  # fmt: skip
def test_what_would_be_lost(risk, message):
    health = Health()
    health.tick(moment(**risk))
    assert alarms(health) == ({"work_at_risk"} if message else set())
    if message:
        assert verdict(health, "work_at_risk").message == message
    health.tick(moment())
    assert alarms(health) == set()


@pytest.mark.parametrize(
    ("good", "resume"),
    [("checkpoint-20", "the newest complete one is checkpoint-20"), (None, "there is no complete one")],
)
def test_a_broken_checkpoint(good, resume):
    health = Health()
    health.tick(moment(broken_checkpoint="checkpoint-30", good_checkpoint=good))
    assert verdict(health, "checkpoint_broken").message == (
        f"A resume would pick checkpoint-30, which is not complete; {resume}."
    )
    health.tick(moment(good_checkpoint="checkpoint-30"))
    assert alarms(health) == set()


class TestOverdue:
    """A training of 100 steps that saves every 20, of 100 s each; it is looked at when a step has ended."""

    def go(self, health, first, last, **fields):
        rank = {0: Work(0, 0, None, 0, 0)}
        for step in range(first, last + 1):
            given = {"saves": Saves("steps", every=20, last=100), "ranks": rank, **fields}
            health.tick(moment(1000.0 + 100.0 * step, step=step, **given))

    @pytest.fixture
    def health(self):
        health = Health()
        begin(health, max_steps=100)
        return health

    def test_a_save_that_did_not_come(self, health):
        self.go(health, 1, 24)  # step 20 was found to be past at the end of step 21; 300 s later is step 24
        assert alarms(health) == set()
        self.go(health, 25, 25)
        assert alarms(health) == {"checkpoint_overdue"}
        assert verdict(health, "checkpoint_overdue").message == (
            "A checkpoint was due at step 20; at step 25 there is none."
        )
        self.go(health, 26, 40, saved_step=20)
        assert alarms(health) == set()
        self.go(health, 41, 45, saved_step=20)
        assert verdict(health, "checkpoint_overdue").message == (
            "A checkpoint was due at step 40; at step 45 the newest is of step 20."
        )
        self.go(health, 46, 46, saved_step=40)
        assert alarms(health) == set()

    def test_two_steps_are_no_long_time_however_slow_they_are(self, health):
        for step, now in ((20, 0.0), (21, 1000.0), (22, 2000.0)):
            self.go(health, step, step)
            health.tick(
                moment(
                    9000.0 + now,
                    step=step,
                    saves=Saves("steps", every=20, last=100),
                    ranks={0: Work(0, 0, None, 0, 0)},
                )
            )
        assert alarms(health) == set()

    def test_fast_steps_that_pass_by_several(self, health):
        """Each 20 steps take 20 s: it is the first one that counts."""
        for step in range(1, 1000):
            health.tick(
                moment(
                    1000.0 + step,
                    step=step,
                    saves=Saves("steps", every=20, last=1000),
                    ranks={0: Work(0, 0, None, 0, 0)},
                )
            )
            assert alarms(health) == (set() if step <= 321 else {"checkpoint_overdue"})
        assert "due at step 20; at step 999" in verdict(health, "checkpoint_overdue").message

    @pytest.mark.parametrize(
        "fields",
        [
            {"saved_step": 20},
            {"writing": True},
            {"saves": Saves("epoch", every=20, last=100)},
            {"saves": Saves("no", last=100)},
            {"saves": Saves()},
            {"saves": Saves("steps", every=500, last=1000)},
            {"ranks": {8: Work(0, 0, None, 0, 0)}},
        ],
        ids=["saved", "written_by_a_thread", "epochs", "never", "unknown", "later", "second_machine"],
    )
    def test_none_is_owed(self, health, fields):
        self.go(health, 1, 39, **fields)
        assert alarms(health) == set()

    def test_a_resume_owes_nothing_for_the_steps_before_it(self, health):
        self.go(health, 1, 30)
        begin(health, step=40, max_steps=100)
        assert alarms(health) == set()
        self.go(health, 41, 60)
        assert alarms(health) == set()
        self.go(health, 61, 65)
        assert "due at step 60; at step 65 there is none" in verdict(health, "checkpoint_overdue").message

    def test_over_when_the_training_is(self, health):
        self.go(health, 1, 30)
        self.go(health, 30, 30, phase="package")
        assert alarms(health) == set()


GB = 1e9


class TestDisk:
    """At step 100 of 200 with a save every 20: five are to come."""

    @pytest.mark.parametrize(
        ("disk", "saves", "message"),
        [
            (Disk(free=GB, size=2 * GB), Saves(), "The next checkpoint needs about 2.00 GB, and 1.00 GB are free."),
            (Disk(free=2 * GB, size=2 * GB), Saves(), None),
            (Disk(free=GB), Saves(), None),
            (Disk(size=GB), Saves(), None),
            (Disk(free=9.9 * GB, size=2 * GB, present=5), Saves("steps", 20, 200),
             "The checkpoints to come need up to 10.00 GB (5 of about 2.00 GB), and 9.90 GB are free: that of step 200 "
             "will not fit."),
            (Disk(free=10 * GB, size=2 * GB, present=5), Saves("steps", 20, 200), None),
            (Disk(free=3.9 * GB, size=2 * GB, present=5), Saves("steps", 20, 130),
             "The checkpoints to come need up to 4.00 GB (2 of about 2.00 GB), and 3.90 GB are free: that of step 130 "
             "will not fit."),
            (Disk(free=5 * GB, size=2 * GB, present=5), Saves("steps", 20, 200),
             "The checkpoints to come need up to 10.00 GB (5 of about 2.00 GB), and 5.00 GB are free: that of step 160 "
             "will not fit."),
            # Two are kept: with one there, two more lie there for a moment.
            (Disk(free=3.9 * GB, size=2 * GB, present=1), Saves("steps", 20, 200, keep=2),
             "The checkpoints to come need up to 4.00 GB (2 of about 2.00 GB), and 3.90 GB are free: that of step 140 "
             "will not fit."),
            (Disk(free=4 * GB, size=2 * GB, present=1), Saves("steps", 20, 200, keep=2), None),
            (Disk(free=2 * GB, size=2 * GB, present=1), Saves("steps", 20, 120, keep=5), None),
            (Disk(free=2 * GB, size=2 * GB, present=5), Saves("steps", 20, 200, keep=2), None),
            (Disk(free=1.9 * GB, size=2 * GB, present=2), Saves("steps", 20, 200, keep=2),
             "The next checkpoint needs about 2.00 GB, and 1.90 GB are free."),
            (Disk(free=1 * GB, size=2 * GB, present=2), Saves("no", None, 200), None),
            (Disk(free=1 * GB, size=2 * GB, present=5), Saves("steps", 20, 100), None),
            (Disk(free=99 * GB, size=2 * GB, inodes=69, files=14, present=5), Saves("steps", 20, 200),
             "The checkpoints to come need up to 70 files (5 of about 14 files), and 69 files are free: that of step "
             "200 will not fit."),
            (Disk(free=99 * GB, size=2 * GB, inodes=13, files=14), Saves(),
             "The next checkpoint needs about 14 files, and 13 files are free."),
        ],
    )  # fmt: skip
    def test_room(self, disk, saves, message):
        health = Health()
        health.tick(moment(step=100, disk=disk, saves=saves))
        assert alarms(health) == ({"will_not_fit"} if message else set())
        if message:
            assert verdict(health, "will_not_fit").message == message

    def test_no_flicker(self):
        health, saves = Health(), Saves("steps", 20, 200)
        for free, raised in (
            (10.1, False),
            (9.9, True),
            (10.1, True),
            (10.4, True),
            (10.6, False),
            (10.1, False),
        ):
            health.tick(moment(step=100, disk=Disk(free=free * GB, size=2 * GB), saves=saves))
            assert alarms(health) == ({"will_not_fit"} if raised else set()), free

    @pytest.mark.parametrize(
        ("saves", "step", "number"),
        [
            (Saves("steps", 20, 100), 27, 4), (Saves("steps", 20, 110), 27, 5), (Saves("steps", 20, 110), 100, 1),
            (Saves("steps", 20, 100), 20, 4), (Saves("steps", 20, 100), 100, 0), (Saves("steps", 20), 27, None),
            (Saves("no", None, 100), 27, 0), (Saves("best", None, 100), 27, None), (Saves(), 27, None),
        ],
    )  # fmt: skip
    def test_saves_to_come(self, saves, step, number):
        assert saves.to_come(step) == number


class TestDeadline:
    """Step 7000 of 10000 at 10 s a step: 30000 s (8 h 20 min) are to come."""

    def tick(self, health, until, *, now=1000.0, step=7000, left=30_000.0, session=500.0, **fields):
        health.tick(
            moment(
                now,
                step=step,
                max_steps=10_000,
                left_seconds=left,
                session_steps=session,
                deadline=now + until,
                **fields,
            )
        )

    def late(self, until, **fields):
        health = Health()
        self.tick(health, until, **fields)
        assert alarms(health) == set(), "not at the first look"
        self.tick(health, until, now=1060.0, **fields)
        return health

    def test_it_says_how_far_it_will_get(self):
        health = self.late(20_000.0, saves=Saves("steps", 500, 10_000), saved_step=7000)
        found = verdict(health, "will_not_fit")
        assert found.message == (
            "At its recent pace it needs 8 h 20 min more, and its time is over in 5 h 33 min: it will get to about "
            "step 9000 of 10000, 2 h 46 min short; the last checkpoint before that is of step 9000."
        )
        assert found.advice == "Ask for more time, or go on from checkpoint-9000 in a next job."

    @pytest.mark.parametrize(
        ("fields", "end"),
        [
            ({"saves": Saves("steps", 800, 10_000)}, "; the last checkpoint before that is of step 8800."),
            ({"saves": Saves("steps", 6000, 10_000), "saved_step": 6000},
             "; the last checkpoint before that is of step 6000."),
            ({"saves": Saves("no", None, 10_000)}, "; no checkpoint falls before that."),
            ({"saves": Saves("steps", 20_000, 10_000)}, "; no checkpoint falls before that."),
            ({}, "2 h 46 min short."),
        ],
        ids=["to_come", "past", "never", "too_late", "unknown"],
    )  # fmt: skip
    def test_what_is_saved_by_then(self, fields, end):
        assert verdict(self.late(20_000.0, **fields), "will_not_fit").message.endswith(end)

    @pytest.mark.parametrize(
        ("until", "fields", "raised"),
        [
            (28_500.0, {}, True),  # 1500 s short, which is more than 5 % of the time (1425 s)
            (28_600.0, {}, False),  # 1400 s, less than 1430 s
            (20_000.0, {"session": 19.0}, False),
            (20_000.0, {"left": None}, False),
            (20_000.0, {"step": 10_000, "left": 0.0}, False),
            (100.0, {"left": 109.0}, False),  # less than 10 s
            (100.0, {"left": 111.0}, True),
        ],
    )
    def test_the_limits(self, until, fields, raised):
        assert alarms(self.late(until, **fields)) == ({"will_not_fit"} if raised else set())

    def test_a_short_time_without_a_deadline_is_none(self):
        health = Health()
        for now in (1000.0, 2000.0):
            health.tick(moment(now, step=7000, max_steps=10_000, left_seconds=30_000.0, session_steps=500.0))
        assert alarms(health) == set()

    def test_no_flicker_and_over_when_it_fits_again(self):
        health = self.late(20_000.0)
        for now, until, raised in (
            (2000.0, 29_900.0, True),
            (2001.0, 30_000.0, False),
            (2100.0, 29_000.0, False),
        ):
            self.tick(health, until, now=now)
            assert alarms(health) == ({"will_not_fit"} if raised else set()), now

    def test_a_moment_of_a_slow_pace_is_none(self):
        health = Health()
        for now, left in (
            (1000.0, 30_000.0),
            (1050.0, 20_500.0),
            (1061.0, 30_000.0),
            (1100.0, 19_000.0),
            (1121.0, 30_000.0),
        ):
            self.tick(health, 20_000.0, now=now, left=left)
            assert alarms(health) == set()

    def test_a_time_that_is_over(self):
        health = self.late(-300.0)
        assert verdict(health, "will_not_fit").message == (
            "Its time has been over for 5 min 0 s, and it needs about 8 h 20 min more."
        )

    def test_disk_and_time_are_told_together(self):
        health = self.late(20_000.0)
        self.tick(health, 20_000.0, now=1061.0, disk=Disk(free=GB, size=2 * GB))
        message = verdict(health, "will_not_fit").message
        assert message.startswith(
            "The next checkpoint needs about 2.00 GB, and 1.00 GB are free. At its recent pace "
        )
        self.tick(health, 30_000.0, now=1062.0, disk=Disk(free=GB, size=2 * GB))
        assert (
            verdict(health, "will_not_fit").message
            == "The next checkpoint needs about 2.00 GB, and 1.00 GB are free."
        )

    def test_over_when_the_training_was_stopped_early(self):
        health = self.late(20_000.0)
        self.tick(health, 20_000.0, now=1070.0, phase="package")
        assert alarms(health) == set()


class TestWaitingForABatch:
    """The limit is the larger of five minutes, and three times the longest wait that ended, up to half an hour."""

    def wait(self, health, begin, seconds, *, first=False, activity=None):
        for second in range(0, round(seconds) + 1, 10):
            health.tick(moment(begin + second, silent=second, phase="data", first=first, activity=activity))

    def test_five_minutes_at_first(self):
        health = Health()
        self.wait(health, 1000.0, 300)
        assert alarms(health) == set()
        self.wait(health, 1000.0, 310)
        assert alarms(health) == {"stalled"}

    @pytest.mark.parametrize(("first", "allowed"), [(480, 1440), (700, 1800), (90, 300)])
    def test_a_buffer_that_is_filled_again(self, first, allowed):
        health = Health()
        self.wait(health, 1000.0, first, first=True, activity="first_batch")
        health.tick(moment(2900.0, phase="compute"))
        self.wait(health, 3000.0, allowed)
        assert alarms(health) == set()
        self.wait(health, 3000.0, allowed + 10)
        assert alarms(health) == {"stalled"}

    def test_a_hang_that_went_away_excuses_no_other_one(self):
        health = Health()
        self.wait(health, 1000.0, 500)
        assert alarms(health) == {"stalled"}
        health.tick(moment(2000.0, phase="compute"))
        assert alarms(health) == set()
        self.wait(health, 3000.0, 310)
        assert alarms(health) == {"stalled"}

    def test_nor_does_data_that_a_resume_skips(self):
        health = Health()
        self.wait(health, 1000.0, 1500, first=True, activity="skip_data")
        assert alarms(health) == set()
        health.tick(moment(2900.0, phase="compute"))
        self.wait(health, 3000.0, 310)
        assert alarms(health) == {"stalled"}

    @pytest.mark.parametrize(
        ("phase", "longest", "allowed"),
        [("evaluate", 0, 1800), ("evaluate", 900, 2700), ("save", 0, 1800), ("save", 1200, 3600)],
    )
    def test_an_evaluation_of_few_long_batches_and_a_long_save(self, phase, longest, allowed):
        health = Health()
        if longest:
            health.event({"event": phase, "step": 20, "seconds": longest})
        health.tick(moment(9000.0, silent=allowed, phase=phase))
        assert alarms(health) == set()
        health.tick(moment(9001.0, silent=allowed + 1, phase=phase))
        assert alarms(health) == {"stalled"}

    def test_skipped_data_has_the_patience_of_preparing(self):
        health = Health(Patience(skip_data=None))
        health.tick(moment(9000.0, silent=3600, phase="data", first=True, activity="skip_data"))
        assert alarms(health) == set()
        health.tick(moment(9001.0, silent=3601, phase="data", first=True, activity="skip_data"))
        assert alarms(health) == {"stalled"}


def test_each_of_them_can_be_switched_off():
    off = frozenset({"work_at_risk", "will_not_fit", "checkpoint_broken"})
    health = Health(thresholds=Thresholds(off=off))
    health.tick(
        moment(
            unsaved_seconds=9 * HOUR,
            save_seconds_apart=MINUTE,
            disk=Disk(free=1.0, size=2.0),
            broken_checkpoint="checkpoint-1",
        )
    )
    assert active(health) == set()
