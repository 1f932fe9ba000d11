"""The commands that the README and the documentation show, page by page, and a folder in which they can be typed."""

import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md" and "decisions" not in path.parts),
]
_REASONS = {
    r"# account|--volume-id|--on (runpod|modal|ssh)\b|--offers|hotlap push ": "needs an account",
    r"--install-cron": "changes this user's crontab",
    r"ORG/NAME|other:8000": "names something that only the reader has",
    r"prefetch --tool|--form fp8|export fp8": "needs a tool of 1 GB in an environment of its own",
    r"^make ": "a target of the Makefile, which CI runs",
}
DATA = ("train.jsonl", "data/train.jsonl", "train.csv")


@dataclass(frozen=True)
class Shown:
    """One command as a page shows it, without its comment."""

    page: str
    text: str
    why_not: str | None
    """Why it is not run here; None for what is."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def shown() -> list[Shown]:
    """All of them, in the order of reading."""
    return [
        Shown(
            page.relative_to(ROOT).as_posix(),
            re.sub(r"\s+# .*", "", line),
            next((reason for pattern, reason in _REASONS.items() if re.search(pattern, line)), None),
        )
        for page in PAGES
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), flags=re.S)
        for line in re.findall(r"^\$ (.*)$", block, flags=re.M)
    ]


def furnish(folder: Path, page: str, budget_s: float | None = None) -> None:
    """What a reader has in his folder when he comes to a page: a clone's contest, some data, the files it shows.
    `budget_s` is put in place of a trial's seconds."""
    for name in ("tracks", "records", "submissions"):
        shutil.copytree(ROOT / name, folder / name)
    rows = (ROOT / "src/hotlap/cli/demo_identity.jsonl").read_text()
    (folder / "data").mkdir()
    for name in ("train.jsonl", "data/train.jsonl"):
        (folder / name).write_text(rows)
    (folder / "mine.jsonl").write_text(_CONTEST_ROWS)
    (folder / "my.txt").write_text("\n\n".join(topics.values()))
    (folder / "ORDER.json").write_text(
        json.dumps({"config": {"depth": 2}, "budget_s": budget_s or 20.0, "out": "r.json"})
    )
    (folder / "axolotl.yaml").write_text(_AXOLOTL)
    for study in ("lr", "my-study"):
        (folder / f"{study}.toml").write_text(_STUDY.replace("NAME", study))
    text = (ROOT / page).read_text()
    if "--output run.toml" not in text:
        (folder / "run.toml").write_text(_RUN)
    for block in re.findall(r"```toml\n(.*?)```", text, flags=re.S):
        if budget_s is not None:
            block = re.sub(r"budget_s = .*", f"budget_s = {budget_s}\nsetup_s = 60.0", block)
        if name := re.search(r'^\[study\]\nname = "([\w-]+)"', block):
            (folder / f"{name[1]}.toml").write_text(block)


_CONTEST_ROWS = "".join(f'{{"prompt": "{number} plus one?", "completion": "{number + 1}"}}\n' for number in range(400))
_AXOLOTL = """base_model: smollm2-135m
datasets: [{path: train.jsonl, type: {field_instruction: prompt, field_output: completion}}]
sequence_len: 256
adapter: lora
lora_r: 8
lora_alpha: 16
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0002
flash_attention: true
"""
_RUN = """base_model = "smollm2-135m"
dataset = "train.jsonl"
[data]
seq_len = 256
[train]
max_steps = 2
"""
_STUDY = """[study]
name = "NAME"
data = "embedded"
budget_s = 5.0
setup_s = 60.0
axes = ["lr"]
"""
