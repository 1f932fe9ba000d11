"""What a study's rules do, before any money is spent: the real decision functions on simulated losses.

Losses are in units of the noise of one run, so that one table serves every machine. Nothing here is another version of
a rule: candidates are judged by `acceptance.py`, and whole searches are planned by `plan.py` and `proposer.py`.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from hotlap.errors import TrainingFailed
from hotlap.research import acceptance, plan, proposer
from hotlap.research.acceptance import Rule
from hotlap.research.executor import NUMBERS
from hotlap.research.history import SCHEMA, History, Row
from hotlap.research.plan import Propose
from hotlap.research.space import Axis, Settings, Space, StudyConfig, space_json

_DRIFT_MEMORY = 0.9
"""How much of a machine's mood is left one run later."""


@dataclass(frozen=True)
class Rate:
    """A share of simulated cases, with its standard error, and the runs that one case took."""

    share: float
    se: float
    runs: float


def _rate(hits: int, repeats: int, num_runs: int) -> Rate:
    share = hits / repeats
    return Rate(share, math.sqrt(share * (1 - share) / repeats), num_runs / repeats)


def anchor_moves(rule: Rule, gain: float, num_incumbent: int, repeats: int, source: np.random.Generator) -> Rate:
    """How often a candidate that is truly `gain` better moves the anchor; 0 is a placebo."""
    hits = num_runs = 0
    for _ in range(repeats):
        noise = source.standard_normal(num_incumbent + 2)
        incumbent, first, second = list(noise[2:]), float(noise[0] - gain), float(noise[1] - gain)
        judged, num_used = acceptance.judge_screen(rule, incumbent, first, 1.0), 1
        if judged.outcome == "confirm":
            judged, num_used = acceptance.judge_confirm(rule, incumbent, (first, second), 1.0), 2
        hits += judged.moves_anchor
        num_runs += num_used
    return _rate(hits, repeats, num_runs)


def verification(gain: float, drift: float, repeats: int, source: np.random.Generator) -> Rate:
    """How often a claim of `gain` is proven. `drift`: standard deviation of the machine's own slow changes."""
    hits = 0
    for _ in range(repeats):
        losses = iter(source.standard_normal(2 * acceptance.NUM_PAIRS) + _mood(drift, source))
        gains: list[float] = []
        for pair in range(acceptance.NUM_PAIRS):
            arms = {arm: float(next(losses)) for arm in acceptance.order_of(pair)}
            gains.append(arms["I"] - arms["C"] + gain)
        hits += acceptance.judge_pairs(gains, 1.0).verdict == "verified"
    return _rate(hits, repeats, 2 * acceptance.NUM_PAIRS * repeats)


def _mood(drift: float, source: np.random.Generator) -> np.ndarray:
    steps = source.standard_normal(2 * acceptance.NUM_PAIRS) * drift * math.sqrt(1 - _DRIFT_MEMORY**2)
    mood = [float(source.standard_normal()) * drift]
    for step in steps[1:]:
        mood.append(_DRIFT_MEMORY * mood[-1] + float(step))
    return np.array(mood)


# --- what a session would take ---


GAINS = (0.0, 0.5, 1.0, 2.0, 3.0)
_SETUP_S = 5.0
"""Seconds a trial takes beside its budget, before one has been seen; more where the study grants it more."""


def forecast(
    study: StudyConfig, history: History | None, num_trials: int, usd_per_hour: float, repeats: int
) -> dict[str, Any]:
    """What the study's rule does to true gains of so many times the noise, and what a session and a proof would take.

    Noise and seconds are the study's own as far as it has run.
    """
    source = np.random.default_rng(0)
    rule = acceptance.RULES[study.acceptance]
    noise = None if history is None or not history.groups else history.noise().s
    table: list[dict[str, Any]] = []
    for gain in GAINS:
        moved = anchor_moves(rule, gain, 4, repeats, source)
        proven = verification(gain, 0.0, repeats, source)
        row = {"gain_sigmas": gain, "gain_nats": None if noise is None else gain * noise}
        table.append(row | {"kept": moved.share, "runs_each": moved.runs, "proven": proven.share})
    trial_s = seconds_of_a_trial(study, history)
    num_runs = study.num_baseline_runs + math.ceil(num_trials * table[0]["runs_each"] * (1 + 1 / study.sentinel_every))
    session_s, proof_s = num_runs * trial_s / study.workers, 2 * acceptance.NUM_PAIRS * trial_s
    usd = usd_per_hour / 3600
    per_day = study.trials_per_day
    days = None if per_day is None else math.ceil((num_runs + 2 * acceptance.NUM_PAIRS) / per_day)
    words = (
        f"{num_trials} changes take about {num_runs} runs of {trial_s:.0f} s: {session_s / 60:.0f} min, "
        f"${session_s * usd:.2f}; a proof takes {2 * acceptance.NUM_PAIRS} more: {proof_s / 60:.0f} min, "
        f"${proof_s * usd:.2f}" + ("." if days is None else f"; {days} days in all at {per_day} trials a day.")
    )
    costs = {"session_s": session_s, "proof_s": proof_s, "session_usd": session_s * usd, "proof_usd": proof_s * usd}
    return {
        "rule": rule.name,
        "noise": noise,
        "table": table,
        "num_runs": num_runs,
        "days": days,
        **costs,
        "words": words,
    }


def seconds_of_a_trial(study: StudyConfig, history: History | None) -> float:
    seen = [] if history is None else [run.row["total_s"] for run in history.runs if run.row["total_s"] is not None]
    return fmean(seen) if seen else study.budget_s + max(_SETUP_S, study.setup_s)


# --- whole campaigns of independent candidates ---


@dataclass(frozen=True)
class Campaign:
    """Means over campaigns, in units of the noise: what was truly gained, what was reported on top of that (phantom
    gain), and the share of what was kept that was no gain at all."""

    true_gain: float
    phantom: float
    false_share: float
    se_true: float
    se_phantom: float


def campaigns(rule: Rule, num_runs: int, repeats: int, source: np.random.Generator) -> Campaign:
    """Candidates of which 55 % are harmful (mean 2.5), 25 % do nothing, 20 % help (mean 1.5, less as gains add up).

    A naive search starts from one run of the baseline, another from two.
    """
    rows = [_campaign(rule, num_runs, source) for _ in range(repeats)]
    true, phantom = [row[0] for row in rows], [row[1] - row[0] for row in rows]
    kept = sum(row[3] for row in rows)
    root = math.sqrt(repeats)
    return Campaign(
        fmean(true),
        fmean(phantom),
        sum(row[2] for row in rows) / max(1, kept),
        float(np.std(true)) / root,
        float(np.std(phantom)) / root,
    )


def _campaign(rule: Rule, num_runs: int, source: np.random.Generator) -> tuple[float, float, int, int]:
    """True gain, reported gain, keeps that were none, keeps."""
    num_first = 1 if rule.confirm is None else 2
    incumbent = list(source.standard_normal(num_first))
    start, level, left = fmean(incumbent), 0.0, num_runs - num_first
    num_false = num_kept = since_sentinel = 0
    while left > 0:
        if rule.confirm is not None and since_sentinel >= _SENTINEL_EVERY:
            incumbent = [*incumbent, float(source.standard_normal()) - level][-acceptance.SENTINELS_KEPT :]
            left, since_sentinel = left - 1, 0
            continue
        effect = _effect(level, source)
        runs = [float(level_noise - level - effect) for level_noise in source.standard_normal(2)]
        left, since_sentinel = left - 1, since_sentinel + 1
        judged = acceptance.judge_screen(rule, incumbent, runs[0], 1.0)
        if judged.outcome == "confirm" and left > 0:
            left, since_sentinel = left - 1, since_sentinel + 1
            judged = acceptance.judge_confirm(rule, incumbent, (runs[0], runs[1]), 1.0)
        if judged.moves_anchor:
            num_kept += 1
            num_false += effect <= 0
            level += effect
            incumbent = runs[:1] if rule.confirm is None else runs[1:]
            since_sentinel = 0
    return level, start - fmean(incumbent), num_false, num_kept


_GAINS_SHRINK = 5.0
"""Gain over which helpful candidates' effects fall by a factor of e. Not known; it sets late progress only."""

_SENTINEL_EVERY = 8


def _effect(level: float, source: np.random.Generator) -> float:
    kind = source.random()
    if kind < 0.55:
        return -float(source.exponential(2.5))
    if kind < 0.80:
        return 0.0
    return float(source.exponential(1.5)) * math.exp(-max(0.0, level) / _GAINS_SHRINK)


# --- whole searches, planned by the real plan ---


Objective = Callable[[Settings], float | None]
"""True loss of a configuration, in units of the noise; None where training diverges."""

_SIGMA = 0.006
_LOSS = 2.0
"""In nats per byte: a noise of 0.3 % of the loss, which is also what a study assumes before it knows better."""


@dataclass(frozen=True)
class Bowl:
    """Eight axes in [0, 1]: a quadratic that mixes neighboring axes, and a cliff on the first one, beyond which a run
    diverges. The start is `height` above the optimum."""

    optimum: tuple[float, ...]
    start: tuple[float, ...]
    curvature: tuple[float, ...]
    height: float

    def __call__(self, config: Settings) -> float | None:
        point = [float(config[f"x{index}"] or 0.0) for index in range(len(self.optimum))]
        if point[0] > self.optimum[0] + 0.25:
            return None
        return self.height * self._raw(point) / self._raw(self.start)

    def _raw(self, point: Sequence[float]) -> float:
        away = [value - best for value, best in zip(point, self.optimum, strict=True)]
        total = 0.0
        for index in range(0, len(away), 2):
            a, b = (away[index] + away[index + 1]) / math.sqrt(2), (away[index] - away[index + 1]) / math.sqrt(2)
            total += self.curvature[index] * a**2 + self.curvature[index + 1] * b**2
        return total


def draw_bowl(source: np.random.Generator, height: float = 10.0) -> Bowl:
    optimum = source.uniform(0.25, 0.75, 8)
    start = np.clip(optimum + source.uniform(-0.4, 0.4, 8), 0.0, 1.0)
    start[0] = min(start[0], optimum[0] + 0.2)
    curvature = np.exp(source.uniform(math.log(0.3), math.log(3.0), 8))
    return Bowl(tuple(optimum), tuple(start), tuple(curvature), height)


def search_regrets(
    study: StudyConfig, bowl: Bowl, checkpoints: Sequence[int], seed: int, propose: Propose = proposer.propose
) -> list[float]:
    """True loss of the anchor above the optimum, in units of the noise, after so many runs."""
    regrets: list[float] = []

    def look(history: History) -> bool:
        while len(regrets) < len(checkpoints) and history.num_ended >= checkpoints[len(regrets)]:
            regrets.append(bowl(history.anchor.config) or 0.0)
        return len(regrets) == len(checkpoints)

    history = _search(study, bowl, seed, look, propose=propose)
    last = bowl(history.anchor.config) or 0.0
    return regrets + [last] * (len(checkpoints) - len(regrets))


def search(
    study: StudyConfig, bowl: Bowl, num_runs: int, seed: int, keep: Callable[[Row], None] = lambda _row: None
) -> History:
    """What a study's journal would hold after so many runs; `keep` is given its rows."""
    return _search(study, bowl, seed, lambda history: history.num_ended >= num_runs, keep)


def _search(
    study: StudyConfig,
    bowl: Bowl,
    seed: int,
    is_over: Callable[[History], bool],
    keep: Callable[[Row], None] = lambda _row: None,
    propose: Propose = proposer.propose,
) -> History:
    """Until it is over, between two proposals, or nothing more is proposed."""
    secret, source = str(seed).encode(), np.random.default_rng(seed)
    history = History()

    def append(row: Row) -> None:
        keep(row)
        history.apply(row)

    append(_campaign_row(study, bowl))
    while history.in_progress or not is_over(history):
        action = plan.next_in_search(
            history, secret, "2000-01-01", sys.maxsize, propose
        )  # also where little is expected
        if isinstance(action, plan.Decide):
            append({**action.row, "at": "2000-01-01"})
        elif isinstance(action, plan.Start):
            row = {**action.row, "started_at": "2000-01-01"}
            append(row)
            append(_ended(row, bowl(action.config), source))
        else:
            error = action.error if isinstance(action, plan.Finish) else None
            if error is not None:
                raise TrainingFailed(f"The simulated search stopped: {error}") from error
            break
    return history


def _campaign_row(study: StudyConfig, bowl: Bowl) -> Row:
    names = [f"x{index}" for index in range(len(bowl.start))]
    axes = tuple(Axis(name=name, kind="linear", default=0.5, low=0.0, high=1.0) for name in names)
    start: Settings = {name: float(value) for name, value in zip(names, bowl.start, strict=True)}
    return {
        "schema": SCHEMA,
        "kind": "campaign",
        "campaign_id": study.name,
        "study": study.model_dump(mode="json"),
        "space": space_json(Space(axes, start)),
    }


def _ended(started: Row, height: float | None, source: np.random.Generator) -> Row:
    noise = float(source.standard_normal())
    loss = None if height is None else _LOSS + _SIGMA * (height + noise)
    ending: Row = dict.fromkeys((*NUMBERS, "exit_code", "error_class", "error_tail"))
    status = "diverged" if loss is None else "ok"
    return {
        **started,
        **ending,
        "kind": "run",
        "status": status,
        "val_search_nats_per_byte": loss,
        "cell": {},
        "flags": [],
        "cost_usd": None,
        "ended_at": "2000-01-01",
    }
