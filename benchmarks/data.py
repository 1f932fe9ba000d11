"""Data: how preparing scales, what opening costs, and how fast it is beside `datasets.map`.

`python -m benchmarks.data [--rows 1000,10000,100000] [--python PATH] [--model FOLDER]`. Prints one JSON object.

Scaling uses a cheap tokenizer of whole words and rows of about 20 tokens, so that a million rows take minutes. The
comparison uses the tokenizer of a model folder and rows of about 110 tokens; `--python` names an interpreter that has
`datasets` (the `bench` extra), by default this one. Every measurement is a process of its own.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import spread

WORDS = [f"w{number}" for number in range(2000)]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' <turn_end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
OPENINGS = 300
COMPARED_ROWS = 10_000
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1000,10000,100000,1000000")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--child", nargs="*")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child[0]](*arguments.child[1:])))
        return
    with tempfile.TemporaryDirectory() as name:
        report = measure(Path(name), [int(text) for text in arguments.rows.split(",")], arguments)
    print(json.dumps({**report, "cores": os.cpu_count(), "load": os.getloadavg()[0]}))


def measure(folder: Path, counts: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    tokenizer = write_tokenizer(folder / "tokenizer")
    scaling = []
    for count in counts:
        source = write_rows(folder / f"{count}.jsonl", count, 6)
        scaling.append({"rows": count, **child("prepare", folder / "home", source, tokenizer, 128)})
        print(scaling[-1], file=sys.stderr)
    ends = [scaling[0]["fingerprint"], scaling[-1]["fingerprint"]]
    opening = child("open", folder / "home", *ends)
    print(opening, file=sys.stderr)
    report = {"scaling": scaling, "opening": opening}
    if arguments.model:
        source = write_rows(folder / "compared.jsonl", COMPARED_ROWS, 10)
        times_s: dict[str, list[float]] = {"hotlap": [], "datasets": []}
        cpu_ratios: list[float] = []
        for repeat in range(REPEATS):
            ours = child("prepare", folder / f"home-{repeat}", source, arguments.model, 512)
            theirs = child("datasets", folder / f"cache-{repeat}", source, arguments.model, python=arguments.python)
            times_s["hotlap"].append(ours["seconds"])
            times_s["datasets"].append(theirs["seconds"])
            cpu_ratios.append(theirs["cpu_s"] / ours["cpu_s"])
            assert ours["tokens"] == theirs["tokens"], (ours, theirs)
            print(ours, theirs, file=sys.stderr)
        ratios = [theirs / ours for ours, theirs in zip(times_s["hotlap"], times_s["datasets"], strict=True)]
        rates = {name: spread([COMPARED_ROWS / value for value in values]) for name, values in times_s.items()}
        report["comparison"] = {
            "rows": COMPARED_ROWS,
            "rows_per_s": rates,
            "hotlap over datasets": spread(ratios),
            "by processor time": spread(cpu_ratios),
        }
    return report


def child(kind: str, *arguments: object, python: str = sys.executable) -> dict[str, Any]:
    argv = [python, "-m", "benchmarks.data", "--child", kind, *map(str, arguments)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_rows(path: Path, count: int, num_words: int) -> Path:
    with path.open("w") as file:
        for row in range(count):
            words = [WORDS[(row * 7919 + at * 104729) % len(WORDS)] for at in range(2 * num_words)]
            prompt, completion = " ".join(words[:num_words]), " ".join(words[num_words:])
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    return path


def write_tokenizer(folder: Path) -> Path:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    specials = ["<pad>", "<end>", "<user>", "<assistant>", "<turn_end>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


# --- measured in processes of their own ---


def prepare_rows(home: str, source: str, tokenizer: str, seq_len: str) -> dict[str, Any]:
    os.environ["HOTLAP_HOME"] = home
    from transformers import PreTrainedTokenizerFast

    from hotlap.config import RunConfig
    from hotlap.data.prepare import Places, prepare

    assert PreTrainedTokenizerFast  # importing it is not measured on either side, loading the tokenizer is on both
    config = RunConfig.model_validate({"base_model": "m", "dataset": "d", "data": {"seq_len": int(seq_len)}})
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    packing = prepare(config, 1, Places(Path(source)), Path(tokenizer), lambda text: None)
    seconds = time.perf_counter() - began_s
    return {
        "seconds": round(seconds, 3),
        "cpu_s": round(time.process_time() - began_cpu_s, 3),
        "rows_per_s": round(packing.train.num_examples / seconds),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "tokens": packing.train.facts.num_tokens,
        "fingerprint": packing.train.fingerprint,
    }


def open_rows(home: str, *fingerprints: str) -> dict[str, Any]:
    """Opening and reading a first step, alternately the small and the large one."""
    os.environ["HOTLAP_HOME"] = home
    from hotlap.data.packed import open_packed

    times_s: list[list[float]] = [[] for _ in fingerprints]
    for _ in range(OPENINGS):
        for mine, fingerprint in zip(times_s, fingerprints, strict=True):
            began_s = time.perf_counter()
            data = open_packed(fingerprint)
            assert data is not None
            data.tokens_NT[:8].sum()
            mine.append(time.perf_counter() - began_s)
    ratios = [large / small for small, large in zip(*times_s, strict=True)]
    return {
        "microseconds": [spread([1e6 * value for value in mine]) for mine in times_s],
        "large over small": spread(ratios),
    }


def map_rows(cache: str, source: str, tokenizer: str) -> dict[str, Any]:
    os.environ["HF_HOME"] = cache
    from datasets import disable_progress_bars, load_dataset  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast

    disable_progress_bars()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    renderer = PreTrainedTokenizerFast.from_pretrained(tokenizer, local_files_only=True)

    def tokenized(batch: dict[str, list[str]]) -> dict[str, Any]:
        chats = [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            for prompt, completion in zip(batch["prompt"], batch["completion"], strict=True)
        ]
        texts = renderer.apply_chat_template(chats, tokenize=False)
        return {"input_ids": renderer(texts, add_special_tokens=False)["input_ids"]}

    data = load_dataset("json", data_files=source, split="train", cache_dir=cache)
    data = data.map(tokenized, batched=True, remove_columns=["prompt", "completion"])
    seconds = time.perf_counter() - began_s
    cpu_s = time.process_time() - began_cpu_s
    num_tokens = sum(len(ids) for ids in data["input_ids"])
    return {"seconds": round(seconds, 3), "cpu_s": round(cpu_s, 3), "tokens": num_tokens}


CHILDREN = {"prepare": prepare_rows, "open": open_rows, "datasets": map_rows}

if __name__ == "__main__":
    main()
