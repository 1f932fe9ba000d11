"""The evaluator, frozen: `python -m hotlap.speedrun.evaluate ORDER.json` scores one adapter on one set of test rows.

It runs in a sandbox of its own, imports nothing of hotlap, and takes every setting from the order: nothing is read from
a generation config. Its file's hash is part of every track. It writes one line per test row to `predictions.jsonl` and
the result to `score.json`, both in the order's output folder.

Answer rules `gsm8k` and `squad` are those of the public contest, edge cases included.
"""

import json
import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# B rows of a batch, T positions, V vocabulary

Row = Mapping[str, Any]
_GSM8K = re.compile(r"####\s*([-+]?[\d,]*\.?\d+)")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def is_right(rule: str, text: str, row: Row) -> bool:
    """Whether a generated text answers a row.

    `exact`: its first line, stripped, is the row's `answer`. `gsm8k`: the last number after `####`, up to the first
    `Question:`, is that of the row's `answer`. `squad`: its first line, normalized, is one of `answers.text`.
    """
    match rule:
        case "exact":
            return first_line(text) == row["answer"]
        case "gsm8k":
            found, gold = gsm8k_number(text), gsm8k_gold(row["answer"])
            return found is not None and abs(found - gold) < 1e-4
        case "squad":
            cut = text.partition("Context:")[0].partition("Question:")[0]
            return normalized(first_line(cut)) in {normalized(answer) for answer in row["answers"]["text"]}
        case _:
            raise ValueError(rule)


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def gsm8k_number(text: str) -> float | None:
    found = _GSM8K.findall(text.partition("Question:")[0])
    return float(found[-1].replace(",", "")) if found else None


def gsm8k_gold(answer: str) -> float:
    return float(answer.rpartition("####")[2].replace(",", ""))


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_ARTICLES.sub(" ", text).split())


def score(order: dict[str, Any]) -> dict[str, Any]:
    """Run an order: `base_model`, `adapter`, `rows`, `output`, `metric` (as the track has it), `dtype`, `threads`."""
    import torch

    torch.set_num_threads(order["threads"])
    torch.manual_seed(0)
    rows = [json.loads(line) for line in Path(order["rows"]).read_text(encoding="utf-8").splitlines()]
    model, tokenizer, effect = load(order, rows)
    ignored = ignored_tensors(model, Path(order["adapter"]) / "adapter_model.safetensors")
    metric = order["metric"]
    judge = judge_exact if metric["type"] == "exact" else judge_loss
    items = judge(model, tokenizer, rows, metric)
    output = Path(order["output"])
    (output / "predictions.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    if metric["type"] == "exact":
        num_right = sum(item["is_right"] for item in items)
        facts = {"score": num_right / len(items), "num_right": num_right}
    else:
        num_tokens = sum(item["num_tokens"] for item in items)
        facts = {"score": sum(item["loss_sum"] for item in items) / num_tokens, "num_tokens": num_tokens}
    return {**facts, "num_rows": len(items), "adapter_effect": effect, "ignored_tensors": ignored}


def load(order: dict[str, Any], rows: Sequence[Row]) -> tuple[Any, Any, float]:
    """The base model with its adapter, the tokenizer, and the largest change of a logit that the adapter makes."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(order["base_model"], padding_side="left", local_files_only=True)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    base = AutoModelForCausalLM.from_pretrained(
        order["base_model"],
        dtype=getattr(torch, order["dtype"]),
        attn_implementation="sdpa",
        local_files_only=True,
        use_safetensors=True,
    )
    base.eval()
    probe = tokenizer(order["metric"]["prompt"].format_map(rows[0]), return_tensors="pt")
    with torch.inference_mode():
        before = base(**probe).logits
    model: Any = PeftModel.from_pretrained(base, order["adapter"])
    model.eval()
    with torch.inference_mode():
        after = model(**probe).logits
    return model, tokenizer, float((after - before).abs().max())


def ignored_tensors(model: Any, path: Path) -> list[str]:
    """Tensors of the adapter's file that loading dropped without a word."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
    there = {name.replace(".default.weight", ".weight") for name, _ in model.named_parameters()}
    return sorted(set(names) - there)


def judge_exact(model: Any, tokenizer: Any, rows: Sequence[Row], metric: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=metric["max_new_tokens"],
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        stop_strings=list(metric["stop"]) or None,
    )
    model.generation_config = model.get_base_model().generation_config = GenerationConfig()
    items: list[dict[str, Any]] = []
    for start in range(0, len(rows), metric["batch_rows"]):
        batch = rows[start : start + metric["batch_rows"]]
        prompts = [metric["prompt"].format_map(row) for row in batch]
        longest = metric["max_prompt_tokens"]
        cut = {"truncation": True, "max_length": longest} if longest else {}
        tokens = tokenizer(prompts, return_tensors="pt", padding=True, **cut)
        tokens.pop("token_type_ids", None)
        with torch.inference_mode():
            written_BT = model.generate(**tokens, generation_config=settings, tokenizer=tokenizer)
        new_BT = written_BT[:, tokens["input_ids"].shape[1] :]
        for row, text in zip(batch, tokenizer.batch_decode(new_BT, skip_special_tokens=True), strict=True):
            items.append({"text": text, "is_right": is_right(metric["rule"], text, row)})
    return items


def judge_loss(model: Any, tokenizer: Any, rows: Sequence[Row], metric: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row alone, so that no padding is involved: nats of ` answer` and the end of the text, given the prompt."""
    import torch

    items: list[dict[str, Any]] = []
    for row in rows:
        prompt = tokenizer(metric["prompt"].format_map(row))["input_ids"]
        answer = tokenizer(" " + row["answer"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        tokens_BT = torch.tensor([prompt + answer])
        with torch.inference_mode():
            logits_BTV = model(input_ids=tokens_BT).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV[0, len(prompt) - 1 : -1].float(), tokens_BT[0, len(prompt) :], reduction="sum"
        )
        items.append({"loss_sum": float(loss), "num_tokens": len(answer)})
    return items


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = score(order)
    (Path(order["output"]) / "score.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
