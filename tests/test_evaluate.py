"""Answer rules of the frozen evaluator, edge cases as the public contest has them; and whole evaluations."""

import json
import math
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from contest import floats, micro, micro_contest, safetensors

from hotlap.speedrun import evaluate, inputs

GSM8K = [
    ("The answer is\n#### 42", "#### 42", True),
    ("####42", "x #### 42", True),
    ("####\n42", "#### 42", True),
    ("#### 1,234", "#### 1234", True),
    ("#### 1234", "#### 1,234", True),
    ("#### $42", "#### 42", False),
    ("#### -3", "#### -3", True),
    ("#### +3", "#### 3", True),
    ("#### .5", "#### 0.5", True),
    ("#### 18%", "#### 18", True),
    ("#### 3/4", "#### 3", True),
    ("#### 1e3", "#### 1", True),
    ("#### 42.", "#### 42", True),
    ("#### 42.00005", "#### 42", True),
    ("#### 42.0002", "#### 42", False),
    ("#### 1\n#### 2", "#### 2", True),
    ("#### 2\nQuestion: next\n#### 3", "#### 2", True),
    ("Question: #### 2", "#### 2", False),
    ("42", "#### 42", False),
    ("", "#### 0", False),
    ("#### \u0664\u0662", "#### 42", True),
]

SQUAD = [
    ("Paris", ["Paris"], True),
    (" the Paris.\nMore", ["paris"], True),
    ("An  apple!", ["apple"], True),
    ("anapple", ["apple"], False),
    ("in Paris", ["Paris"], False),
    ("Paris Context: x", ["Paris"], True),
    ("Paris Question: x", ["Paris"], True),
    ("\n\nParis", ["Paris"], True),
    ("1,000", ["1000"], True),
    ("second", ["first", "second"], True),
    ("", ["the"], True),
    ("", ["x"], False),
]

EXACT = [
    (" 2003-04-02", "2003-04-02", True),
    ("2003-04-02\nText: more", "2003-04-02", True),
    ("\n2003-04-02", "2003-04-02", True),
    ("2003-04-02.", "2003-04-02", False),
    ("2003-04-2", "2003-04-02", False),
    ("", "2003-04-02", False),
]


@pytest.mark.parametrize(("text", "answer", "expected"), GSM8K)
def test_gsm8k(text: str, answer: str, expected: bool) -> None:
    assert evaluate.is_right("gsm8k", text, {"answer": answer}) is expected


@pytest.mark.parametrize(("text", "answers", "expected"), SQUAD)
def test_squad(text: str, answers: list[str], expected: bool) -> None:
    assert evaluate.is_right("squad", text, {"answers": {"text": answers}}) is expected


@pytest.mark.parametrize(("text", "answer", "expected"), EXACT)
def test_exact(text: str, answer: str, expected: bool) -> None:
    assert evaluate.is_right("exact", text, {"answer": answer}) is expected


def order_for(tmp_path: Path, metric: dict[str, Any], value: float) -> tuple[dict[str, Any], Path]:
    """An evaluation of the tiny model with one adapter whose B is `value` everywhere."""
    model = inputs.base_model(micro(micro_contest(tmp_path / "contest")), lambda _text: None)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    name = "base_model.model.model.layers.1.mlp.down_proj"
    tensors = {f"{name}.lora_A.weight": floats(2, 64), f"{name}.lora_B.weight": floats(32, 2, value=value)}
    (adapter / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "target_modules": ["down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "layers_to_transform": [1]}))
    rows = [{"question": "ab", "answer": "n"}, {"question": "xe", "answer": "y"}, {"question": "q", "answer": "n"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = {
        "base_model": str(model),
        "adapter": str(adapter),
        "rows": str(tmp_path / "rows.jsonl"),
        "output": str(tmp_path),
        "metric": metric,
        "dtype": "float32",
        "threads": 1,
    }
    return order, model


@pytest.mark.torch
def test_loss_equals_that_of_the_formula(tmp_path: Path) -> None:
    """Against the softmax written out, with the adapter's update added to the weight by hand."""
    import torch
    from transformers import AutoModelForCausalLM

    metric = {"type": "loss", "target": 1.0, "prompt": "{question}=", "batch_rows": 2}
    order, model = order_for(tmp_path, metric, 0.125)
    result = evaluate.score(order)
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        base.model.layers[1].mlp.down_proj.weight += torch.full((32, 2), 0.125) @ torch.full((2, 64), 0.5)
    total, count = 0.0, 0
    for question, answer in (("ab", "n"), ("xe", "y"), ("q", "n")):
        prompt, target = list(f"{question}=".encode()), [*f" {answer}".encode(), 258]
        with torch.inference_mode():
            logits = base(input_ids=torch.tensor([prompt + target])).logits[0].double()
        for offset, token in enumerate(target):
            row = logits[len(prompt) - 1 + offset]
            total += math.log(sum(math.exp(value) for value in row.tolist())) - float(row[token])
            count += 1
    assert result["num_tokens"] == count == 9
    assert result["score"] == pytest.approx(total / count, rel=1e-5)
    assert result["adapter_effect"] > 0 and result["ignored_tensors"] == []


GREEDY = {
    "type": "exact",
    "rule": "exact",
    "target": 0.5,
    "prompt": "{question}=",
    "max_new_tokens": 4,
    "batch_rows": 1,
    "stop": [],
    "max_prompt_tokens": None,
}


@pytest.mark.torch
def test_nothing_is_taken_from_a_generation_config(tmp_path: Path) -> None:
    """Chance, beams, penalties and forbidden tokens that stand beside the model's weights do not change an answer."""
    order, model = order_for(tmp_path, GREEDY, 0.125)
    evaluate.score(order)
    plain = (tmp_path / "predictions.jsonl").read_text()
    shutil.copytree(model, tmp_path / "other")
    odd = {"do_sample": True, "num_beams": 3, "repetition_penalty": 9.0, "suppress_tokens": list(range(60, 120))}
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps(odd))
    evaluate.score({**order, "base_model": str(tmp_path / "other")})
    assert (tmp_path / "predictions.jsonl").read_text() == plain


@pytest.mark.torch
def test_greedy_answers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    order, _ = order_for(tmp_path, GREEDY, 0.125)
    evaluate.score(order)
    one_by_one = (tmp_path / "predictions.jsonl").read_text()
    evaluate.score({**order, "metric": {**GREEDY, "batch_rows": 3}})
    assert (tmp_path / "predictions.jsonl").read_text() == one_by_one
    assert len(one_by_one.splitlines()) == 3


@pytest.mark.torch
def test_an_adapter_that_changes_nothing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the whole program, as `python -m` runs it."""
    metric = {"type": "loss", "target": 1.0, "prompt": "{question}=", "batch_rows": 2}
    order, _ = order_for(tmp_path, metric, 0.0)
    monkeypatch.setattr(sys, "argv", ["evaluate", str(_written(tmp_path, order))])
    runpy.run_path(evaluate.__file__, run_name="__main__")
    assert json.loads((tmp_path / "score.json").read_text())["adapter_effect"] == 0.0


@pytest.mark.torch
def test_a_tensor_that_is_never_applied_is_named(tmp_path: Path) -> None:
    metric = {"type": "loss", "target": 1.0, "prompt": "{question}=", "batch_rows": 2}
    order, _ = order_for(tmp_path, metric, 0.125)
    config = Path(order["adapter"]) / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "layers_to_transform": [0]}))
    with pytest.warns(UserWarning, match="missing adapter keys"):
        ignored = evaluate.score(order)["ignored_tensors"]
    name = "base_model.model.model.layers.1.mlp.down_proj"
    assert ignored == [f"{name}.lora_A.weight", f"{name}.lora_B.weight"]


def _written(folder: Path, order: dict[str, Any]) -> Path:
    path = folder / "order.json"
    path.write_text(json.dumps(order))
    return path
