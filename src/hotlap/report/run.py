"""The page of a run: its losses, its speed, where the seconds of every slice went, its answers, what it cost."""

import json
from collections.abc import Sequence
from typing import Any

from hotlap import durable
from hotlap.cloud.lease import Lease
from hotlap.cloud.money import usd
from hotlap.report.chart import Chart, Line, Value
from hotlap.report.page import Page, Sample, Section, Table
from hotlap.report.slices import COLUMNS, PHASES, slice_row
from hotlap.runs import Identity, RunFolder, all_slices, read_identity, run_state

Rows = Sequence[dict[str, Any]]
_MOST_PROMPTS = 50
_MOST_ANSWERS = 4


def page_of(run: RunFolder, made_at: str, leases: Sequence[Lease] = ()) -> Page:
    """
    Raises:
        CorruptFile: the run's identity, metrics or samples cannot be read.
    """
    identity, rows = read_identity(run), durable.read_rows(run.metrics)
    slices = [slice_row(state) for state in all_slices(run)]
    state = run_state(run)
    sections = [_losses(rows), _speed(slices), _samples(durable.read_rows(run.samples))]
    sections += [_money(leases)] if leases else []
    sections += [_setup(identity)] if identity else []
    steps = f"{state.step} of {state.num_steps}" if state.num_steps else str(state.step)
    facts: list[tuple[str, Value]] = [
        ("State", state.state),
        ("Step", steps),
        ("Loss", state.loss),
        ("Held-out loss", state.val_loss),
        ("Slices", state.num_slices),
        ("Tokens", sum(row.get("num_tokens", 0) for row in rows)),
        ("Begun", state.created_at),
    ]
    return Page(f"Run {run.name}", made_at, [section for section in sections if section], facts)


# --- losses ---


def _losses(rows: Rows) -> Section:
    steps = [row for row in rows if row.get("loss") is not None]
    held = [row for row in rows if "val_loss" in row]
    lines = [Line("loss", [row["step"] for row in steps], [row["loss"] for row in steps])]
    if len(steps) > 40:
        lines.append(
            Line("loss, mean of recent steps", [r["step"] for r in steps], smoothed([r["loss"] for r in steps]))
        )
    if held:
        lines.append(Line("val_loss", [row["step"] for row in held], [row["val_loss"] for row in held]))
    charts = [Chart("loss", "Loss", "step", "nats per trained token", lines, _fall(steps, held))]
    if steps:
        rates, norms = [row["lr"] for row in steps], [row["grad_norm"] for row in steps]
        at = [row["step"] for row in steps]
        charts += [
            Chart("lr", "Learning rate", "step", "learning rate", [Line("lr", at, rates)], _range("It", rates)),
            Chart("grad-norm", "Gradient norm", "step", "norm", [Line("grad_norm", at, norms)], _range("It", norms)),
        ]
    return Section("losses", "Losses", charts=charts)


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """A mean in which every value before counts 0.9 times as much, not drawn to where it began."""
    means: list[float] = []
    total = share = 0.0
    for value in values:
        total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        means.append(total / share)
    return means


def _fall(steps: Rows, held: Rows) -> str:
    if not steps:
        return "No step has been trained yet."
    first, last = steps[0], steps[-1]
    text = f"Loss went from {first['loss']:.4g} at step {first['step']} to {last['loss']:.4g} at step {last['step']}."
    if held:
        best = min(held, key=lambda row: row["val_loss"])
        text += f" Held-out loss was lowest at step {best['step']}: {best['val_loss']:.4g}."
    return text


def _range(what: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{what} lies between {min(known):.4g} and {max(known):.4g}." if known else "Nothing is known of it."


# --- slices ---


def _speed(slices: Rows) -> Section:
    numbers = [f"slice {row['number']}" for row in slices]
    speeds = [row["tokens_per_s"] for row in slices]
    shares = [None if row["goodput"] is None else 100.0 * row["goodput"] for row in slices]
    told = [row for row in slices if row["steps"] is not None]
    phases = [
        Line(name, [f"slice {row['number']}" for row in told], [row[name] for row in told], "stacked")
        for name in PHASES
        if any(row[name] for row in told)
    ]
    spent = {line.name: sum(float(y or 0.0) for y in line.y) for line in phases}
    most = ", ".join(f"{name} {spent[name]:.1f} s" for name in sorted(spent, key=lambda name: -spent[name])[:3])
    speed = Line("tokens/s", numbers, speeds, "bars")
    goodput, unit = Line("goodput", numbers, shares, "bars"), "% of the slice's time in finished steps"
    spent_on = f"Most of all slices: {most or 'nothing'}."
    charts = [
        Chart(
            "tokens-per-s", "Tokens per second", "slice", "tokens/s", [speed], _range("While it stepped, it", speeds)
        ),
        Chart("goodput", "Goodput", "slice", unit, [goodput], _range("It", shares)),
        Chart("timeline", "Where the seconds went", "slice", "seconds", phases, spent_on),
    ]
    note = "Seconds, where nothing else is said. A slice that was killed gave no account."
    header = [name.replace("_", " ") for name in COLUMNS]
    table = Table("Slices", header, [[row[name] for name in COLUMNS] for row in slices], note)
    return Section("slices", "Slices", charts=charts if slices else [], tables=[table])


# --- answers, money, setup ---


def _samples(rows: Rows) -> Section:
    """Each prompt with its first, its last, and some answers between."""
    by_prompt: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        where = f"After step {row['step']}" if row["step"] else "Before training"
        by_prompt.setdefault(row["prompt"], []).append((where, row["text"]))
    samples = [Sample(prompt, _spread(answers)) for prompt, answers in list(by_prompt.items())[:_MOST_PROMPTS]]
    text = (
        "The most likely words, in training order."
        if samples
        else "None were asked for. eval.sample_prompts has prompts answered before training and at every evaluation."
    )
    return Section("samples", "Answers", text=text, samples=samples)


def _spread(answers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    if len(answers) <= _MOST_ANSWERS:
        return answers
    return [answers[round(at * (len(answers) - 1) / (_MOST_ANSWERS - 1))] for at in range(_MOST_ANSWERS)]


def _money(leases: Sequence[Lease]) -> Section:
    header = ["lease", "machine", "provider", "GPU", "state", "outcome", "GPU-seconds", "charged"]
    rows = [
        [
            *(lease.lease_id, lease.machine_id, lease.provider, lease.gpu, lease.state, lease.outcome),
            *(lease.gpu_s, usd(lease.usd_micros)),
        ]
        for lease in leases
    ]
    total = usd(sum(lease.usd_micros for lease in leases))
    note = "What may be alive is charged its worst case."
    return Section("money", "Money", facts=[("Charged", total)], tables=[Table("Machines", header, rows, note)])


def _setup(identity: Identity) -> Section:
    facts: list[tuple[str, Value]] = [
        ("Seed", str(identity.seed)),
        ("Precision", identity.precision),
        ("Threads", identity.num_threads),
        ("Rows", identity.num_rows),
        ("Steps", identity.num_steps),
    ]
    settings = [[name, _flat(value)] for name, value in _leaves(identity.trajectory)]
    pins = _pinned("base model", identity.base_pins)
    for name, value in identity.data_pins.items():
        pins += _pinned(f"data: {name}", value)
    tables = [Table("Settings that decide what is learned", ["setting", "value"], settings)]
    tables += [Table("What it was made from", ["what", "file", "sha256 or pin"], pins)]
    return Section("setup", "Setup", facts=facts, tables=tables)


def _leaves(tree: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        is_table = isinstance(value, dict) and value
        found += _leaves(value, f"{before}{name}.") if is_table else [(before + name, value)]
    return found


def _pinned(what: str, pins: dict[str, Any]) -> list[list[Value]]:
    return [
        [what, name, pin["sha256"] if isinstance(pin, dict) and "sha256" in pin else _flat(pin)]
        for name, pin in pins.items()
    ]


def _flat(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
