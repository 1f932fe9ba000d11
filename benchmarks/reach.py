"""What the search is held to on the real objective, in pieces that go on where they stopped.

    python -m benchmarks.reach iterations TEXT    from a weak baseline at 2.60: the gain of two iterations of 20 s
    python -m benchmarks.reach pairs TEXT         40 real A/A pairs under the rule, five A/A verifications
    python -m benchmarks.reach noise TEXT         spread of eight runs: wall and charged clock, quiet and disturbed
    python -m benchmarks.reach proposers TEXT     gp1 against random1: 40 runs each, three times
    python -m benchmarks.reach long TEXT          300 s: the configurations of LONG, one after another

`--minutes M` starts nothing that could outlast them; the same command again goes on. What was measured lies in
benchmarks/results, one line a run, with the load before it, and the answer so far is printed as JSON every time.
`--budget-s` makes runs shorter than 20 s (`pairs`, `noise`, `proposers`); results of other budgets lie in other files.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.research import acceptance, plan, study
from hotlap.research.acceptance import TWO_RUN
from hotlap.research.history import History
from hotlap.research.space import load_study

FOLDER = Path(__file__).parent / "results"
THREADS = int(os.environ.get("THREADS", os.cpu_count() or 1))
WEAK: dict[str, Any] = {"input_ngram": 1, "embed_lr": 1.0, "value_embeddings": False}
TARGET, TOLERANCE = 2.60, 0.05
FOUNDING = ["lr", "warmup", "weight_decay", "batch_size", "width", "depth", "dropout", "schedule"]
NUM_PAIRS, NUM_FIRST, NUM_REPEATS, NUM_RUNS = 40, 6, 8, 40
SEARCHES = 3
BIG: dict[str, Any] = {"width": 128, "depth": 3, "context": 128, "input_ngram": 4}
LONG: dict[str, dict[str, Any]] = {
    "dropout 0.15 (1.527 before)": {**BIG, "dropout": 0.15},
    "dropout 0.3": {**BIG, "dropout": 0.3},
    "dropout 0.3, trigrams": {**BIG, "dropout": 0.3, "input_ngram": 3},
    "dropout 0.25, weight decay 0.5": {**BIG, "dropout": 0.25, "weight_decay": 0.5},
    "dropout 0.3, width 192": {**BIG, "dropout": 0.3, "width": 192, "head_dim": 64},
    "dropout 0.3, depth 4, context 256": {**BIG, "dropout": 0.3, "depth": 4, "context": 256},
    "dropout 0.4, width 192, bigrams": {**BIG, "dropout": 0.4, "width": 192, "head_dim": 64, "input_ngram": 2},
    "dropout 0.3, embed_lr 3": {**BIG, "dropout": 0.3, "embed_lr": 3.0},
}
WALL = """
import sys
from hotlap.research import gpt
class Wall(gpt.ChargedClock):
    def add(self, step_s):
        super().add(step_s)
        self.real_s = getattr(self, "real_s", 0.0) + step_s
        self.charged_s, self.is_recharged = self.real_s, True
gpt.ChargedClock = Wall
sys.exit(gpt.main(sys.argv[1:]))
"""
LOAD = """
import random, time
import numpy as np
source, matrix = random.Random(1), np.ones((256, 256))
while True:
    until = time.monotonic() + source.uniform(0.5, 4.0)
    while time.monotonic() < until:
        matrix @ matrix
    time.sleep(source.uniform(0.5, 4.0))
"""


class Over(Exception):
    """No time for another run."""


class Bench:
    """Runs of one question, each kept under a name: what has a name is not run again."""

    def __init__(self, name: str, text: Path, budget_s: float, until_s: float) -> None:
        self.text, self.budget_s, self._until_s = text.absolute(), budget_s, until_s
        self.name = f"{name}-{budget_s:g}s"
        self.path = FOLDER / f"{self.name}.jsonl"
        durable.make_dirs(FOLDER)
        self.rows = {row["name"]: row for row in durable.read_rows(self.path)} if self.path.exists() else {}

    def require_s(self, seconds: float) -> None:
        if time.monotonic() + seconds > self._until_s:
            raise Over

    def keep(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        self.rows[name] = {"name": name, **row}
        durable.append_rows(self.path, [self.rows[name]])
        return self.rows[name]

    def run(
        self, name: str, seed: int, config: dict[str, Any], clock: str = "charged", with_load: bool = False
    ) -> dict[str, Any]:
        """The run of that name, made now if there is none."""
        if name in self.rows:
            return self.rows[name]
        self.require_s(1.6 * self.budget_s + 25)
        order = {"config": config, "budget_s": self.budget_s, "seed_init": seed, "seed_data": 10_000 + seed}
        order |= {"data": str(self.text), "threads": THREADS, "splits": ["search", "lock"]}
        load = os.getloadavg()[0]
        other = subprocess.Popen([sys.executable, "-c", LOAD]) if with_load else None
        try:
            result = trial(order, clock)
        finally:
            if other is not None:
                other.kill()
                other.wait()
        kept = (
            "status",
            "val_search_nats_per_byte",
            "val_lock_nats_per_byte",
            "steps",
            "charged_s",
            "wall_s",
            "validity",
        )
        print(f"{name}: {result['val_search_nats_per_byte']}", file=sys.stderr)
        return self.keep(name, {"load": round(load, 1), **{key: result[key] for key in kept}})


def trial(order: dict[str, Any], clock: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        path.write_text(json.dumps(order))
        start = ["-c", WALL] if clock == "wall" else ["-m", "hotlap.research.gpt"]
        command = [sys.executable, *start, str(path)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def loss(row: dict[str, Any]) -> float:
    assert row["status"] == "ok", row
    return float(row["val_search_nats_per_byte"])


# --- iterations ---


def iterations(bench: Bench) -> dict[str, Any]:
    """Two changes from a baseline whose learning rate was lowered until it stands at 2.60; five studies."""
    low, high, lr = 1e-4, 6e-3, 3e-4
    for number in range(8):
        row = bench.run(f"calibration {number}: {lr:.3g}", number, {**WEAK, "lr": lr})
        if abs(loss(row) - TARGET) <= TOLERANCE:
            break
        low, high = (lr, high) if loss(row) > TARGET else (low, lr)
        lr = float(f"{math.sqrt(low * high):.3g}")
    found: list[dict[str, Any]] = []
    for number in range(5):
        start = {**WEAK, "lr": lr}
        history = searched(bench, f"two-{number}", start, "gp1", lambda history: history.num_judged >= 2, axes=FOUNDING)
        last = history.anchor
        gain = history.baseline_loss() - statistics.fmean(last.losses)
        axes = [made.first["axis"] for made in history.candidates.values()]
        found.append({"baseline": history.baseline_loss(), "gain": gain, "axes": axes})
    gains = [one["gain"] for one in found]
    return {"goal": 0.13, "lr": lr, "studies": found, "reached": sum(gain >= 0.13 for gain in gains), "of": len(gains)}


def searched(
    bench: Bench, name: str, start: dict[str, Any], proposer: str, is_over: Callable[[History], bool], **settings: Any
) -> History:
    """A study of its own, begun or taken up again, until it is over."""
    values = {"name": f"{bench.name}-{name}", "data": str(bench.text), "budget_s": bench.budget_s, "threads": THREADS}
    values |= {"proposer": proposer, "baseline_runs": 3, "on_disturbed": "use", **settings}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path = FOLDER / f"{bench.name}-{name}.toml"
    path.write_text(
        "[study]\n"
        + "\n".join(lines)
        + "\n[start]\n"
        + "\n".join(f"{k} = {json.dumps(v)}" for k, v in start.items())
        + "\n"
    )
    file = load_study(path)

    def next_action(history: History, secret: bytes) -> plan.Action:
        if is_over(history) and not history.in_progress and not history.open:
            return plan.Finish("trials")
        bench.require_s(file.study.deadline_s)
        return plan.next_in_search(history, secret, "2026-01-01", None if is_over(history) else sys.maxsize)

    def tell(row: dict[str, Any], _history: History) -> None:
        if row["kind"] != "started":
            print(f"{name} {row.get('outcome') or row['val_search_nats_per_byte']}", file=sys.stderr)

    folder = study.find_folder(path, FOLDER)
    listener = study.Listener(tell, lambda _run, _fraction, _loss: None, print)
    with study.opened(file, folder, listener) as opened:
        opened.run(next_action)
        return opened.history


# --- A/A pairs ---


def pairs(bench: Bench) -> dict[str, Any]:
    """The default against itself: each pair has two runs of its own, judged against the six runs before it."""
    runs = [bench.run(f"run {number}", number, {}) for number in range(NUM_FIRST + 2 * NUM_PAIRS)]
    losses = [loss(row) for row in runs]
    noise = acceptance.pooled_noise([losses], acceptance.PRIOR_RATIO["cpu"] * statistics.fmean(losses))
    moved = 0
    for number in range(NUM_PAIRS):
        at = NUM_FIRST + 2 * number
        incumbent, own = losses[at - NUM_FIRST : at], (losses[at], losses[at + 1])
        judged = acceptance.judge_screen(TWO_RUN, incumbent, own[0], noise.s)
        if judged.outcome == "confirm":
            judged = acceptance.judge_confirm(TWO_RUN, incumbent, own, noise.s)
        moved += judged.moves_anchor
    locked = [row["val_lock_nats_per_byte"] for row in runs[NUM_FIRST:]]
    each = 2 * acceptance.NUM_PAIRS
    verified = 0
    for start in range(0, len(locked) - each + 1, each):
        arms = [dict(zip(acceptance.order_of(pair), locked[start + 2 * pair :][:2], strict=True)) for pair in range(8)]
        verified += acceptance.judge_pairs([arm["I"] - arm["C"] for arm in arms], noise.s).verdict == "verified"
    return {
        "s": noise.s,
        "pairs": NUM_PAIRS,
        "moved": moved,
        "chance of so many or more at 15 %": at_least(moved, NUM_PAIRS, 0.15),
        "verifications": len(locked) // each,
        "verified": verified,
        "flags": sum(bool(row["validity"]["flags"]) for row in runs),
    }


def at_least(hits: int, count: int, share: float) -> float:
    return sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(hits, count + 1))


# --- noise ---


def noise(bench: Bench) -> dict[str, Any]:
    """The four kinds in turn, eight times, so that what drifts reaches all of them alike."""
    kinds = [(clock, with_load) for with_load in (False, True) for clock in ("charged", "wall")]
    for number in range(NUM_REPEATS):
        for clock, with_load in random.Random(number).sample(kinds, len(kinds)):
            bench.run(f"{clock}, {'disturbed' if with_load else 'quiet'}, {number}", number, {}, clock, with_load)
    found: dict[str, Any] = {}
    for clock, with_load in kinds:
        word = f"{clock}, {'disturbed' if with_load else 'quiet'}"
        rows = [row for name, row in bench.rows.items() if name.startswith(word)]
        values = [loss(row) for row in rows]
        found[word] = {"mean": statistics.fmean(values), "s": statistics.stdev(values)}
        found[word] |= {"steps": statistics.fmean(row["steps"] for row in rows)}
        found[word] |= {"wall_s": statistics.fmean(row["wall_s"] for row in rows)}
    return found


# --- proposers ---


def proposers(bench: Bench) -> dict[str, Any]:
    """Gain of the final anchor over the baseline, both by three fresh runs each, from the same weak start."""
    start = {**WEAK, "lr": 1e-3}
    gains: dict[str, list[float]] = {"gp1": [], "random1": []}
    for repeat in range(SEARCHES):
        for name, found in gains.items():
            history = searched(bench, f"{name}-{repeat}", start, name, lambda history: history.num_ended >= NUM_RUNS)
            seeds = range(500 + 10 * repeat, 503 + 10 * repeat)
            ends = [
                statistics.fmean(loss(bench.run(f"{name} {repeat} {word} {seed}", seed, config)) for seed in seeds)
                for word, config in (("start", history.anchors[0].config), ("end", history.anchor.config))
            ]
            found.append(ends[0] - ends[1])
    ratios = [b / a for a, b in zip(gains["gp1"], gains["random1"], strict=True)]
    # Student's t for three repeats: 4.303 standard errors hold 95 %.
    half = 4.303 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    middle = statistics.fmean(ratios)
    return {"gains": gains, "random1 over gp1": [middle, middle - half, middle + half]}


# --- 300 s ---


def long(bench: Bench) -> dict[str, Any]:
    """Every configuration once, then the best of them with two more seeds."""
    rows = {name: bench.run(f"{name}, seed 1", 1, config) for name, config in LONG.items()}
    best = min(rows, key=lambda name: loss(rows[name]))
    more = [bench.run(f"{best}, seed {seed}", seed, LONG[best]) for seed in (2, 3)]
    values = [loss(row) for row in (rows[best], *more)]
    return {"each": {name: loss(row) for name, row in rows.items()}, "best": best, "mean": statistics.fmean(values)}


QUESTIONS = {"iterations": iterations, "pairs": pairs, "noise": noise, "proposers": proposers, "long": long}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("text", type=Path)
    parser.add_argument("--budget-s", type=float)
    parser.add_argument("--minutes", type=float, default=math.inf)
    given = parser.parse_args()
    budget_s = given.budget_s or (300.0 if given.question == "long" else 20.0)
    bench = Bench(given.question, given.text, budget_s, time.monotonic() + 60 * given.minutes)
    try:
        print(json.dumps(QUESTIONS[given.question](bench), indent=1))
    except Over:
        print(f"{len(bench.rows)} runs are kept; the same command goes on", file=sys.stderr)
        sys.exit(75)


if __name__ == "__main__":
    main()
