"""The page of everything: money, runs, studies, records, as far as each is there."""

from collections.abc import Sequence
from pathlib import Path

from hotlap.report.page import Page, Section, Table
from hotlap.runs import RunFolder, run_state


def page_of(runs: Sequence[RunFolder], studies: Sequence[Path], others: Sequence[Section], made_at: str) -> Page:
    """`others` are sections made elsewhere, which come first."""
    states = [run_state(run) for run in runs]
    header = ["run", "state", "step", "of", "slices", "loss", "val_loss", "begun"]
    rows = [
        [each.name, each.state, each.step, each.num_steps, each.num_slices, each.loss, each.val_loss, each.created_at]
        for each in states
    ]
    note = "hotlap report RUN makes a run's own page." if rows else "None here."
    sections = [*others, Section("runs", "Runs", tables=[Table("Runs", header, rows, note)])]
    if studies:
        table = Table("Studies", ["study"], [[path.name] for path in studies], "hotlap report STUDY makes its page.")
        sections.append(Section("studies", "Studies", tables=[table]))
    return Page("hotlap: overview", made_at, sections, [("Runs", len(runs)), ("Studies", len(studies))])
