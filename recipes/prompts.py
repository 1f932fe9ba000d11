"""The contests' data as these recipes want it: `python recipes/prompts.py gsm8k|squad SOURCE.jsonl OUT.jsonl`.

A question in the contest's words, and an answer that begins with its space. SOURCE is the public train split as JSON
lines: rows of GSM8K, or of SQuAD with its `context`, `question` and `answers`.
"""

import json
import sys
from pathlib import Path
from typing import Any


def gsm8k(row: dict[str, Any]) -> dict[str, str]:
    return {"prompt": f"Question: {row['question']}\nAnswer:", "completion": f" {row['answer']}"}


def squad(row: dict[str, Any]) -> dict[str, str]:
    prompt = f"Context: {row['context']}\nQuestion: {row['question']}\nAnswer:"
    return {"prompt": prompt, "completion": f" {row['answers']['text'][0]}"}


def main() -> None:
    kind, source, out = sys.argv[1:]
    write = {"gsm8k": gsm8k, "squad": squad}[kind]
    rows = (json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines())
    Path(out).write_text("".join(json.dumps(write(row)) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
