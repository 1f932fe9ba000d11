"""Submissions run in turn on one machine, so that whatever that machine does meets all of them alike.

A round runs each of them once, with one seed and one set of test rows for all, so that two of a round are a pair; the
order turns from round to round. What is finished is kept, and the same call goes on from there, after days too.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.child import passing_on_stops
from hotlap.errors import Refused
from hotlap.speedrun.attempt import Say, Sources
from hotlap.speedrun.compare import interval
from hotlap.speedrun.stopping import Stopped
from hotlap.speedrun.submission import Submission
from hotlap.speedrun.track import Track
from hotlap.speedrun.verify import (
    alone_on_this_machine,
    drawn,
    finished_or_run,
    is_finished,
    machine_facts,
    prepared,
    require_machine,
    warm_libraries,
)

Result = dict[str, Any]


@dataclass(frozen=True)
class Rounds:
    runs: dict[str, list[Result]]
    """What is kept of every run, by entry, a round after the other."""
    machine: dict[str, Any]


def run_rounds(
    entries: Mapping[str, Submission],
    track: Track,
    num_rounds: int,
    folder: Path,
    sources: Sources,
    say: Say,
    until: clock.Deadline | None = None,
) -> Rounds:
    """Every entry, `num_rounds` times, as far as that was not done. `folder` has a folder an entry, by its name.

    Raises:
        Stopped: somebody asked to, or `until` is over; the same call goes on.
        Refused: `folder` holds the runs of other code under one of these names.
        And as `verify.measure`.
    """
    require_machine(track)
    _require_same_code(entries, track, folder)
    results: dict[str, list[Result]] = {name: [] for name in entries}
    with alone_on_this_machine(), passing_on_stops() as stops:
        shared = {"number": 0}
        of_round = Sources(
            seed=lambda: drawn(folder / "seeds.jsonl", "seed", shared["number"], sources.seed),
            entropy=lambda: drawn(folder / "entropies.jsonl", "entropy", shared["number"], sources.entropy),
        )
        places = {name: prepared(entry, track, folder / name, of_round, say, stops) for name, entry in entries.items()}
        is_warm = False
        for number in range(1, num_rounds + 1):
            shared["number"] = number
            for name in order_of(list(entries), number):
                if not is_finished(places[name], number):
                    if until is not None and until.is_over():
                        raise Stopped
                    if not is_warm:
                        warm_libraries(places[name])
                    is_warm = True
                    say(f"round {number} of {num_rounds}: {name}")
                results[name].append(finished_or_run(places[name], number))
            of_round.entropy()  # also of a round in which nothing could be scored: draws are counted by round
        machine = machine_facts(next(iter(places.values())).training)
    return Rounds(results, machine)


def _require_same_code(entries: Mapping[str, Submission], track: Track, folder: Path) -> None:
    """
    Raises:
        Refused: these are other entries than those whose runs lie there.
    """
    path = folder / "entries.json"
    asked = {"track_sha256": track.sha256, "code_sha256": {name: each.code_sha256 for name, each in entries.items()}}
    data = (durable.canonical_json(asked) + "\n").encode()
    if path.is_file() and path.read_bytes() != data:
        raise Refused(f"{folder} holds runs of other code or under other rules. Name another folder.")
    durable.make_dirs(folder)
    durable.replace(path, data)


def order_of(names: Sequence[str], number: int) -> list[str]:
    """The order of a round, from 1: every name comes first in turn, and forwards and backwards in turn."""
    shift = ((number - 1) // 2) % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned if number % 2 else turned[::-1]


@dataclass(frozen=True)
class Paired:
    """Two entries over the rounds in which both were scored: `first` against `second`, with 95 % intervals."""

    num_pairs: int
    time_ratio: float | None
    """Geometric mean of first over second. Below 1: the first is faster."""
    time_ratio_interval: tuple[float, float] | None
    time_difference_s: float | None
    time_difference_interval_s: tuple[float, float] | None
    score_difference: float | None
    """First less second."""
    score_difference_interval: tuple[float, float] | None

    @property
    def faster(self) -> int | None:
        """0: the first is, 1: the second is, with confidence. None: the difference is not proven."""
        if self.time_ratio_interval is None:
            return None
        low, high = self.time_ratio_interval
        return 0 if high < 1 else 1 if low > 1 else None


def paired(first: Sequence[Result], second: Sequence[Result]) -> Paired:
    """Student's intervals of the differences of pairs; of the ratio, by its logarithm."""
    both = [(a, b) for a, b in zip(first, second, strict=True) if a["score"] is not None and b["score"] is not None]
    logs = [math.log(a["wall_s"] / b["wall_s"]) for a, b in both]
    seconds = [a["wall_s"] - b["wall_s"] for a, b in both]
    scores = [a["score"] - b["score"] for a, b in both]
    if not both:
        return Paired(0, *(None,) * 6)
    known = len(both) > 1
    low, high = interval(logs) if known else (0.0, 0.0)
    return Paired(
        num_pairs=len(both),
        time_ratio=math.exp(statistics.fmean(logs)),
        time_ratio_interval=(math.exp(low), math.exp(high)) if known else None,
        time_difference_s=statistics.fmean(seconds),
        time_difference_interval_s=interval(seconds) if known else None,
        score_difference=statistics.fmean(scores),
        score_difference_interval=interval(scores) if known else None,
    )
