"""How fast a run goes: against its own past, against its data, and one rank against the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from tunewatch.health.baseline import Smooth
from tunewatch.health.moment import Moment, Work
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings

SIGNALS_OF_PACE = ("slow", "data_starved", "slow_rank")

LONGEST_LOOK = 1.0
"""Seconds for which one look at the ranks stands at most."""


@dataclass(frozen=True)
class Stretch:
    """Some steps in a row, with evaluation and saving taken out. `steps` and `seconds` are those of the lowest rank;
    `tokens` are the sum of all ranks (None is unknown), `data` and `compute` seconds are told by rank, and
    `late` is how long each rank was the only one that was not as far in its step as the others."""

    steps: float
    seconds: float
    tokens: float | None
    data: Mapping[int, float]
    compute: Mapping[int, float]
    late: Mapping[int, float]


class Tempo:
    """Cuts the run into stretches of at least `pace_steps` (5) steps and `pace_seconds` (60 s) of step time, and hands
    each to the detectors.

    Whatever one step does, it spoils one stretch, and a training of milliseconds a step must last for minutes before
    it is judged at all. The first step of a training (the first batch, data that a resume skips, compilation) belongs
    to none; nor does time in which ranks come or go.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._detectors: tuple[Slow | DataStarved | SlowRank, ...] = (
            Slow(findings, limits), DataStarved(findings, limits), SlowRank(findings, limits),
        )  # fmt: skip
        self._forget()

    def begin(self, training: Training) -> None:
        self._forget()
        for detector in self._detectors:
            detector.begin(training)

    def _forget(self) -> None:
        self._since: Mapping[int, Work] = {}
        self._late: dict[int, float] = {}
        self._looked: float | None = None

    def tick(self, moment: Moment) -> None:
        if moment.phase == "package":
            self._findings.drop(*SIGNALS_OF_PACE)
            return
        if moment.first_step or not moment.ranks:
            self._forget()
            return
        if not _goes_on(self._since, moment.ranks):
            self._forget()
            self._since = moment.ranks
        self._look(moment)
        lowest = min(moment.ranks)
        steps = moment.ranks[lowest].steps - self._since[lowest].steps
        seconds = moment.ranks[lowest].seconds - self._since[lowest].seconds
        if steps < self._limits.pace_steps or seconds < self._limits.pace_seconds:
            return
        stretch = Stretch(
            steps, seconds, _grown_tokens(self._since, moment.ranks),
            _grown(self._since, moment.ranks, lambda work: work.data),
            _grown(self._since, moment.ranks, lambda work: work.compute), self._late,
        )  # fmt: skip
        self._since, self._late = moment.ranks, {}
        for detector in self._detectors:
            detector.stretch(stretch, moment.step)

    def _look(self, moment: Moment) -> None:
        """Count the time since the last look for the rank that the others are ahead of in the step."""
        before, self._looked = self._looked, moment.now
        rank = moment.last_in_step
        if before is not None and rank is not None:
            self._late[rank] = self._late.get(rank, 0.0) + min(LONGEST_LOOK, moment.now - before)


class Slow:
    """`slow`: the run takes much longer for its tokens than it did.

    p is the seconds per token of a stretch (per step, where tokens are not known). Its reference is the best that a
    quick mean of such stretches (`Smooth`: five of them, from the fifth on) has ever been, among those whose mean step
    had about as many tokens (half an octave): within a factor of 1.41 in length p can not change by more than 1.41,
    whether time grows with the square of the length or not at all, so neither longer nor shorter sequences are taken
    for a slow run. It is slow when p > reference / `slow_ratio` (0.6) in `pace_windows` (5) stretches in a row, so for
    five minutes and 25 steps at least, and no longer when p is at most 0.8 of that in one. Source: fail-slow faults of
    real clusters last ten minutes and more in the mean; a step time of three times the mean of the last ones, as others
    use it, takes each long batch for one.
    Can not see: a run that was slow from its beginning, lengths that it has not had before, and, where tokens are not
    known, that sequences have become longer.
    """

    RECOVERED = 0.8
    MAX_LENGTHS = 64

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._tells_waiting = training.waits_in_step
        self._known: dict[int | None, Smooth] = {}
        self._in_a_row = 0

    def stretch(self, stretch: Stretch, step: int | None) -> None:
        length, amount = _length(stretch), stretch.tokens or stretch.steps
        pace = stretch.seconds / amount
        known = self._of_length(length)
        if known is None:
            return
        best = known.best
        known.add(pace)
        if best is None:
            return
        limit = best / self._limits.slow_ratio
        if pace <= limit:
            self._in_a_row = 0
            if pace <= self.RECOVERED * limit:
                self._findings.drop("slow")
            return
        self._in_a_row += 1
        if self._in_a_row >= self._limits.pace_windows:
            self._hold(stretch, step, pace, best)

    def _of_length(self, length: int | None) -> Smooth | None:
        if length not in self._known and len(self._known) >= self.MAX_LENGTHS:
            return None
        return self._known.setdefault(length, Smooth())

    def _hold(self, stretch: Stretch, step: int | None, pace: float, best: float) -> None:
        message = f"A step takes {pace:.3g} s, and took {best:.3g} s for a while earlier in this run."
        if stretch.tokens is not None:
            message = (
                f"It trains {1.0 / pace:.4g} tokens a second, and trained {1.0 / best:.4g} for a while earlier in this "
                "run."
            )
        waiting = _waiting(stretch) if self._tells_waiting else None
        share = "" if waiting is None else f" {waiting:.0%} of the time it waits for data."
        self._findings.hold(
            "slow", step, f"{message}{share}",
            "Keep it running; look who else uses the machine (GPU, CPU, disk), and at the GPU's clocks and throttling.",
        )  # fmt: skip


class DataStarved:
    """`data_starved`: the run waits for its next batch for much of its time.

    The share is data / (data + compute) over the last `pace_windows` (5) stretches, all ranks together, without the
    one that waited longest: a single long wait is none. It is starved when the share is above `starved_share` (0.3) and
    a step waits for more than `starved_wait` (0.05 s); no longer when the share is at most two thirds of the limit.
    Source of the limits: judgement; a loader that keeps up has a share near 0, and what takes milliseconds is not worth
    a word. Evaluation and saving count on neither side, nor does the first batch.
    Can not see: a training on a GPU with logging_nan_inf_filter=False, whose program waits for the GPU where it copies
    the next batch to it (it is not judged), and what waits inside the step (batches that are generated there). What
    other callbacks do between two steps looks like waiting.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._is_told = training.waits_in_step
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=int(self._limits.pace_windows))
        """Of each stretch the steps, the data and the compute seconds of a rank in the mean."""

    def stretch(self, stretch: Stretch, step: int | None) -> None:
        if not self._is_told:
            return
        recent = self._recent
        recent.append((stretch.steps, fmean(stretch.data.values()), fmean(stretch.compute.values())))
        if len(recent) < self._limits.pace_windows:
            return
        usual = sorted(recent, key=lambda one: one[1])[:-1] or list(recent)
        steps, data, compute = (sum(one[i] for one in usual) for i in range(3))
        share, wait = data / max(data + compute, 1e-9), data / steps
        limit = self._limits.starved_share
        if share > limit and wait > self._limits.starved_wait:
            self._findings.hold(
                "data_starved", step,
                f"It waits for the next batch for {share:.0%} of its time, {wait:.2g} s before each step.",
                "Keep it running; more dataloader workers, data on a local disk, or tokenizing beforehand would speed "
                "it up.",
            )  # fmt: skip
        elif share <= 2.0 / 3.0 * limit or wait <= self._limits.starved_wait:
            self._findings.drop("data_starved")


class SlowRank:
    """`slow_rank`: one rank keeps the others waiting.

    In each step the ranks wait for the last of them, so a rank costs the others what it waits for its data beyond the
    median of theirs, and the time for which it alone has not come as far in the step as they have (it computes its loss
    while they wait in the backward pass). Of a stretch that is a share of the time; the rank is slow when its share is
    above `slow_rank_share` (0.3) and costs a step more than `slow_rank_wait` (0.1 s) in `pace_windows` (5) stretches in
    a row, and no longer when it is at most two thirds of that in one. Where the parts of a step (a micro-batch's
    forward or backward pass) are shorter than half a second, only data counts: what a rank tells may be a tenth of a
    second old. Source: fail-slow faults of real clusters last ten minutes and more in the mean; the share is judgement,
    for lengths that differ from rank to rank make one wait for another too.
    Can not see: ranks on other machines, and a slow GPU, whose work goes on behind the program's back: then all ranks
    are equally far, and its clocks tell.
    """

    PART_SECONDS = 0.5

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._parts = 2 * training.accumulation  # each micro-batch is begun, and then has its loss
        self._rank: int | None = None
        self._in_a_row = 0

    def stretch(self, stretch: Stretch, step: int | None) -> None:
        if len(stretch.data) < 2:
            return
        costs = {rank: self._cost(stretch, rank) for rank in stretch.data}
        rank = max(costs, key=lambda one: sum(costs[one]))
        data, late = costs[rank]
        share, wait = (data + late) / stretch.seconds, (data + late) / stretch.steps
        limit = self._limits.slow_rank_share
        if rank != self._rank or share <= 2.0 / 3.0 * limit:
            self._in_a_row = 0
            self._findings.drop("slow_rank")
        self._rank = rank
        costly = share > limit and wait > self._limits.slow_rank_wait
        self._in_a_row = self._in_a_row + 1 if costly else 0
        if self._in_a_row < self._limits.pace_windows:
            return
        doing = "waits for its data" if data >= late else "computes its loss"
        self._findings.hold(
            "slow_rank", step,
            f"Rank {rank} keeps the others waiting for {share:.0%} of the time, {wait:.2g} s in each step, while it "
            f"{doing}.",
            "Look at that rank: its data and its worker processes, the CPU cores it has, its GPU.",
        )  # fmt: skip

    def _cost(self, stretch: Stretch, rank: int) -> tuple[float, float]:
        """Seconds of waiting for data beyond the others, and of being alone behind in the step."""
        others = median(seconds for one, seconds in stretch.data.items() if one != rank)
        part = stretch.seconds / stretch.steps / self._parts
        late = stretch.late.get(rank, 0.0) if part >= self.PART_SECONDS else 0.0
        return max(0.0, stretch.data[rank] - others), late


def _goes_on(before: Mapping[int, Work], now: Mapping[int, Work]) -> bool:
    """Whether these are the same processes still: the same ranks, and no counter has gone back."""
    return before.keys() == now.keys() and all(
        now[rank].steps >= work.steps and now[rank].seconds >= work.seconds for rank, work in before.items()
    )


def _grown(
    before: Mapping[int, Work], now: Mapping[int, Work], part: Callable[[Work], float]
) -> dict[int, float]:
    return {rank: max(0.0, part(work) - part(before[rank])) for rank, work in now.items()}


def _grown_tokens(before: Mapping[int, Work], now: Mapping[int, Work]) -> float | None:
    """Tokens of all ranks since then; None where one of them does not count them."""
    total = 0.0
    for rank, work in now.items():
        earlier = before[rank].tokens
        if work.tokens is None or earlier is None or work.tokens <= earlier:
            return None
        total += work.tokens - earlier
    return total


def _length(stretch: Stretch) -> int | None:
    """Which half octave the tokens of the mean step are in; None where they are not known."""
    if stretch.tokens is None:
        return None
    return math.floor(2.0 * math.log2(stretch.tokens / stretch.steps))


def _waiting(stretch: Stretch) -> float | None:
    data, compute = fmean(stretch.data.values()), fmean(stretch.compute.values())
    return data / (data + compute) if data + compute > 0 else None
