"""A submission to start from: a `train.py` that trains, or a recipe of hotlap's own trainer."""

import re
from pathlib import Path
from typing import Literal

from hotlap import durable
from hotlap.errors import UsageError
from hotlap.speedrun.submission import NAME
from hotlap.speedrun.track import Track

Form = Literal["train", "recipe"]

_CONFIG = """author: {author}
github: {author}
track: {track}
base_model: {base_model}
description: What it does, in one line.
technique: Which ideas make it fast.

# Packages beside the track's own, as name==version. They are installed before the clock starts.
extra_pip_packages: []

# What you measured. A verification holds it against its own figures.
self_reported:
  mean_train_seconds: null
  accuracies: []
"""

_NOTES = """# {name}

What makes it fast, what was tried and did not help, and what you measured: machine, seeds, times, scores. A reader
should be able to judge each idea on its own. Claims in config.yaml are held against what the verification measures.
"""

_RECIPE = """# Settings of `hotlap train`, but for model, data and seed, which the track and the verifier give.
[lora]
rank = 16

[optim]
lr = 2e-3
schedule = "linear"

[train]
max_steps = 30
micro_batch_rows = 4

[data]
seq_len = 128

# What makes it fast. `hotlap speedrun ablate` measures what each is worth.
[techniques]
chunked_loss = true
fused_projections = true
"""

_TRAIN = '''"""Train a LoRA adapter: `python train.py --data-dir D --output-dir O --seed S`, in the contest's folder."""

import argparse
import json
from pathlib import Path

LEARNING_RATE = 2e-3
NUM_STEPS = 30
BATCH_ROWS = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(given.seed)
    lines = (given.data_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained("{base_model}")
    base = AutoModelForCausalLM.from_pretrained("{base_model}", dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    num_passes = -(-NUM_STEPS * BATCH_ROWS // len(rows))
    order = torch.cat([torch.randperm(len(rows)) for _ in range(num_passes)]).tolist()
    for step in range(NUM_STEPS):
        batch = [rows[index] for index in order[step * BATCH_ROWS : (step + 1) * BATCH_ROWS]]
        prompts = [tokenizer({prompt!r}.format_map(row))["input_ids"] for row in batch]
        answers = [tokenizer(" " + row["answer"], add_special_tokens=False)["input_ids"] for row in batch]
        answers = [[*answer, tokenizer.eos_token_id] for answer in answers]
        width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        is_answer = torch.zeros(len(batch), width, dtype=torch.bool)
        for line, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens[line, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            is_answer[line, len(prompt) : len(prompt) + len(answer)] = True
        # Padding stands last, where a causal model does not look; the head sees only what is trained.
        hidden = base.model(input_ids=tokens).last_hidden_state
        logits = base.lm_head(hidden[:, :-1][is_answer[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits.float(), tokens[is_answer])
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / NUM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(given.output_dir)
    (given.output_dir / "README.md").unlink(missing_ok=True)  # an adapter is two files


if __name__ == "__main__":
    main()
'''


def new(contest: Path, name: str, author: str, track: Track, form: Form = "train") -> Path:
    """A submission to start from, which trains.

    Raises:
        UsageError: the name is not a submission's, or is taken.
    """
    folder = contest / "submissions" / name
    if not NAME.fullmatch(name):
        raise UsageError(f"A submission is called NNN-author, as in 001-{author}; {name!a} is not.")
    if folder.exists():
        raise UsageError(f"{folder} is there already; take the next number.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}", author):
        raise UsageError(f"An author is a GitHub name; {author!a} is not.")
    base_model = track.spec.base_model.name
    files = {
        "config.yaml": _CONFIG.format(author=author, track=track.spec.id, base_model=base_model),
        "NOTES.md": _NOTES.format(name=name),
    }
    if form == "recipe":
        files["recipe.toml"] = _RECIPE
    else:
        files["train.py"] = _TRAIN.format(base_model=base_model, prompt=track.spec.metric.prompt)
    durable.make_dirs(folder)
    for file_name, text in files.items():
        durable.write_synced(folder / file_name, text.encode())
    return folder
