"""Answers: the most likely words, of the right weights, ended where the turn ends, told as they come."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fixtures_data import write_byte_tokenizer
from safetensors.numpy import save

from hotlap import artifacts, child, durable, errors
from hotlap.checkpoint import CheckpointStore
from hotlap.cli.generate import Choice, ask, choose_adapter, generate
from hotlap.data.readers import Message
from hotlap.data.render import Renderer
from hotlap.runs import Identity, RunFolder

pytestmark = pytest.mark.torch

PROMPTS = ("hi", "Who are you?")
ALPHA, RANK, HIDDEN = 8, 2, 32
ADAPTED = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")]

Files = dict[str, bytes]


@pytest.fixture(scope="session")
def adapter_files() -> Files:
    """A standard PEFT folder for the tiny model, written by hand."""
    chance = np.random.default_rng(3)
    shapes = {"lora_A": (RANK, HIDDEN), "lora_B": (HIDDEN, RANK)}
    tensors = {
        f"base_model.model.{module}.{name}.weight": chance.normal(0, 0.5, shape).astype(np.float32)
        for module in ADAPTED
        for name, shape in shapes.items()
    }
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    config |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny", "inference_mode": True}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


@pytest.fixture
def adapter(adapter_files: Files, tmp_path: Path) -> Path:
    return write_files(tmp_path / "adapter", adapter_files)


@pytest.fixture
def run(tiny_model: Path, adapter_files: Files, tmp_path: Path) -> RunFolder:
    """A run with a checkpoint at step 10, not finished."""
    run = RunFolder(tmp_path / "runs" / "my-run")
    durable.make_dirs(run.slices)
    Identity(
        trajectory={"base_model": str(tiny_model)},
        seed=1,
        base_pins=artifacts.pins_to_json(artifacts.pin(tiny_model)),
        data_pins={},
        packed={},
        num_rows=1,
        num_steps=20,
        num_threads=1,
        created_at="2026-11-30T09:00:00Z",
    ).write(run)
    CheckpointStore(run.checkpoints, 1, 2, lambda: None).publish(10, adapter_files.items, {}, 1)
    return run


def write_files(folder: Path, files: Files) -> Path:
    durable.make_dirs(folder)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def publish(target: Path, files: Files, step: int) -> None:
    staged = write_files(target.with_name(f".staging-{target.name}"), files)
    durable.publish(staged, target, {"step": step})


def damage(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# --- what the model says ---


def answers(model: Path, adapter: Path | None = None, num_new: int = 12, *prompts: str) -> list[dict[str, Any]]:
    from hotlap.train.generate import Order
    from hotlap.train.generate import answers as answers_of

    return list(answers_of(Order(model, adapter, list(prompts or PROMPTS), num_new)))


def greedy(model_folder: Path, prompt: str, num_new: int, adapter_files: Files | None = None) -> str:
    return Renderer(model_folder).decode(greedy_tokens(model_folder, prompt, num_new, adapter_files))


def greedy_tokens(model_folder: Path, prompt: str, num_new: int, adapter_files: Files | None = None) -> list[int]:
    tokens = Renderer(model_folder).encode_prompt([Message("user", prompt)])
    return continued(model_folder, tokens, num_new, adapter_files)


def continued(model_folder: Path, tokens: list[int], num_new: int, adapter_files: Files | None = None) -> list[int]:
    """From the definition: the whole text once more for each token, the adapter added into the weights."""
    import torch
    from safetensors.torch import load
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_folder)
    if adapter_files:
        tensors = load(adapter_files["adapter_model.safetensors"])
        for module in ADAPTED:
            a, b = (tensors[f"base_model.model.{module}.{name}.weight"] for name in ("lora_A", "lora_B"))
            model.get_submodule(module).weight.data += ALPHA / RANK * (b @ a)
    new: list[int] = []
    with torch.no_grad():
        while len(new) < num_new:
            new.append(int(model(torch.tensor([tokens + new])).logits[0, -1].argmax()))
    return new


def test_the_base_model_says_its_most_likely_words(tiny_model: Path) -> None:
    expected = [{"prompt": prompt, "text": greedy(tiny_model, prompt, 12), "num_tokens": 12} for prompt in PROMPTS]
    assert answers(tiny_model) == expected


def test_the_adapter_counts_with_its_scale(tiny_model: Path, adapter: Path, adapter_files: Files) -> None:
    told = [answer["text"] for answer in answers(tiny_model, adapter)]
    assert told == [greedy(tiny_model, prompt, 12, adapter_files) for prompt in PROMPTS]
    assert told != [answer["text"] for answer in answers(tiny_model)]


def test_what_the_folder_recommends_about_sampling_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "model", {path.name: path.read_bytes() for path in tiny_model.iterdir()})
    hot = {"do_sample": True, "temperature": 9.0, "top_k": 40, "top_p": 0.9, "max_length": 5, "num_beams": 3}
    (folder / "generation_config.json").write_text(json.dumps({**hot, "repetition_penalty": 1.9}))
    assert answers(folder) == answers(tiny_model)


def test_an_answer_ends_with_the_end_of_its_turn(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model never ends a turn by itself, so what it says fourth is made the end."""
    tokens = greedy_tokens(tiny_model, "hi", 12)
    stop = tokens.index(tokens[3])
    monkeypatch.setattr(Renderer, "stop_token_ids", frozenset({tokens[stop]}))
    (answer,) = answers(tiny_model, None, 12, "hi")
    text = Renderer(tiny_model).decode(tokens[:stop])
    assert answer == {"prompt": "hi", "text": text, "num_tokens": stop + 1}


def test_an_answer_is_cut_where_the_positions_end(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (answer,) = answers(tiny_model, None, 50, "x" * 100)
    assert answer["num_tokens"] == 128 - 103
    assert "103 tokens" in capsys.readouterr().err


def test_a_prompt_that_fills_the_model_is_refused(tiny_model: Path) -> None:
    with pytest.raises(errors.BadData, match=r"128 positions.*Shorten"):
        answers(tiny_model, None, 1, "x" * 126)


def test_without_a_template_the_prompt_is_continued_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    names = ("config.json", "model.safetensors")
    folder = write_files(tmp_path / "plain", {name: (tiny_model / name).read_bytes() for name in names})
    write_byte_tokenizer(folder, chat_template=None)
    (answer,) = answers(folder, None, 8, "once")
    assert answer["text"] == greedy(folder, "once", 8)
    assert answer["text"] != answers(tiny_model, None, 8, "once")[0]["text"]


def test_an_adapter_of_another_model_is_refused(tiny_model: Path, adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_bytes())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    with pytest.raises(errors.AuditFailed, match="does not fit"):
        answers(tiny_model, adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(errors.AuditFailed, match=r"does not fit .*incomplete metadata"):
        answers(tiny_model, adapter)


# --- which adapter ---


def choose(run: RunFolder) -> tuple[Choice, list[str]]:
    said: list[str] = []
    return choose_adapter(run, said.append), said


def test_the_best_adapter_wins_then_the_final_one_then_the_newest_checkpoint(
    run: RunFolder, adapter_files: Files
) -> None:
    assert choose(run) == (
        Choice(run.checkpoints / "step-00000010-slice-0001", 10, "the newest checkpoint"),
        [],
    )
    publish(run.adapter, adapter_files, step=20)
    assert choose(run) == (Choice(run.adapter, 20, "the final adapter"), [])
    publish(run.best, adapter_files, step=15)
    assert choose(run) == (Choice(run.best, 15, "the best adapter"), [])


def test_a_damaged_adapter_is_told_and_passed_over(run: RunFolder, adapter_files: Files) -> None:
    publish(run.adapter, adapter_files, step=20)
    publish(run.best, adapter_files, step=15)
    damage(run.best)
    choice, said = choose(run)
    assert choice.folder == run.adapter and len(said) == 1 and "passed over" in said[0]
    damage(run.adapter)
    choice, said = choose(run)
    assert choice.step == 10 and len(said) == 2


def test_a_run_without_a_checkpoint_has_no_adapter(run: RunFolder) -> None:
    durable.remove_tree(run.checkpoints / "step-00000010-slice-0001")
    with pytest.raises(errors.UsageError, match="--base"):
        choose(run)


# --- the command ---


def hotlap(*args: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(generate, args, input=stdin)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The orders that a stand-in for the answering process got. It answers with the prompt, reversed."""
    orders: list[dict[str, Any]] = []

    def answer(argv: list[str], _deadline: object, on_event: Callable[[Any], None], _talk: object) -> child.ChildEnd:
        orders.append(json.loads(argv[-1]))
        for prompt in orders[-1]["prompts"]:
            on_event({"event": "answer", "prompt": prompt, "text": prompt[::-1], "num_tokens": 3})
        result = {"event": "result", "exit_code": 0, "reason": "done", "message": ""}
        return child.ChildEnd(0, 1, 0.1, result, "")

    monkeypatch.setattr(child, "run_child", answer)
    return orders


def test_the_example_in_the_help_runs(
    run: RunFolder, tiny_model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parents[1])
    help_text = hotlap("--help").stdout
    example = shlex.split(help_text.partition("Example:")[2])
    assert example[:2] == ["hotlap", "generate"]
    result = hotlap(*example[2:])
    assert result.exit_code == 0, result.output
    assert result.stdout == answers(tiny_model, adapter, 128, "Who are you?")[0]["text"] + "\n"
    choice, cut, *others = result.stderr.splitlines()
    assert choice.startswith("Asking the newest checkpoint, from step 10")
    assert cut.startswith("The prompt has 15 tokens")
    assert others == []


def test_answers_are_json_lines_with_the_adapter(run: RunFolder, asked: list[dict[str, Any]]) -> None:
    result = hotlap("my-run", "ab", "-", "--json", "--output-dir", str(run.path.parent), stdin="één\n\n".encode())
    assert result.exit_code == 0, result.output
    adapter = {"adapter": str(run.checkpoints / "step-00000010-slice-0001"), "step": 10}
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"prompt": "ab", "text": "ba", "num_tokens": 3, **adapter},
        {"prompt": "één", "text": "néé", "num_tokens": 3, **adapter},
    ]
    assert asked[0]["prompts"] == ["ab", "één"] and asked[0]["max_new_tokens"] == 128


def test_several_answers_are_told_apart(run: RunFolder, asked: list[dict[str, Any]]) -> None:
    assert hotlap(str(run.path), "ab", "cd").stdout == "> ab\nba\n\n> cd\ndc\n\n"
    assert hotlap(str(run.path), "ab").stdout == "ba\n"


def test_base_asks_without_the_adapter(run: RunFolder, tiny_model: Path, asked: list[dict[str, Any]]) -> None:
    result = hotlap(str(run.path), "ab", "--base", "--max-new-tokens", "7")
    order = {"model_folder": str(tiny_model), "adapter": None, "prompts": ["ab"], "max_new_tokens": 7}
    assert asked == [{**order, "model": {"precision": "float32"}}]
    assert "base model alone" in result.stderr


@pytest.mark.parametrize(
    ("prompt", "stdin", "words"),
    [
        ("", None, "empty"),
        ("-", b" \n", "empty"),
        ("-", b"\xff\xfe", "UTF-8"),
        ("\udcff", None, "UTF-8"),
        ("-", b"x" * 200_000, "200,"),
    ],
    ids=["empty", "blank", "bytes", "surrogate", "long"],
)
def test_a_prompt_that_cannot_be_asked_is_refused(
    run: RunFolder, asked: list[dict[str, Any]], prompt: str, stdin: bytes | None, words: str
) -> None:
    error = hotlap(str(run.path), prompt, stdin=stdin).exception
    assert isinstance(error, errors.UsageError) and words in str(error)
    assert asked == []


def test_a_run_is_asked_with_the_template_and_the_system_message_it_was_trained_with(
    run: RunFolder, tiny_model: Path, adapter_files: Files, tmp_path: Path
) -> None:
    template = tmp_path / "lines.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    identity = json.loads(run.identity.read_bytes())
    identity["trajectory"]["data"] = {"system": "Be kind.", "chat_template": str(template)}
    identity["data_pins"] = {"chat_template": artifacts.pins_to_json(artifacts.pin(template))}
    run.identity.write_text(json.dumps(identity))
    seen = list(b"system: Be kind.\nuser: hi\nassistant: ")  # token ids of the byte tokenizer
    expected = Renderer(tiny_model).decode(continued(tiny_model, seen, 8, adapter_files))

    result = hotlap(str(run.path), "hi", "--max-new-tokens", "8")
    assert result.stdout == expected + "\n", result.exception
    assert result.stdout != greedy(tiny_model, "hi", 8, adapter_files) + "\n"

    template.write_text(template.read_text() + " ")
    assert isinstance(hotlap(str(run.path), "hi").exception, errors.RunChanged)


def test_a_changed_base_model_is_refused(run: RunFolder, tiny_model: Path, asked: list[dict[str, Any]]) -> None:
    identity = json.loads(run.identity.read_bytes())
    identity["base_pins"]["config.json"] |= {"sha256": "0" * 64, "stamp": [0, 0, 0, 0]}
    run.identity.write_text(json.dumps(identity))
    error = hotlap(str(run.path), "ab").exception
    assert isinstance(error, errors.RunChanged) and "config.json has other content" in str(error)


def test_a_run_that_has_not_begun_is_refused(run: RunFolder) -> None:
    run.identity.unlink()
    error = hotlap(str(run.path), "ab").exception
    assert isinstance(error, errors.UsageError) and "has not begun" in str(error)


# --- the answering process ---


def ask_it(model_folder: Path) -> list[dict[str, Any]]:
    return ask(model_folder, None, ["hi"], 4, lambda _answer: None)


def test_its_error_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(errors.MissingArtifact, match=r"no tokenizer\.json"):
        ask_it(tmp_path)


def test_it_is_ended_when_it_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hotlap.cli.generate"], "_PATIENCE_S", 0.1)
    with pytest.raises(errors.ChildCrashed, match="Ask fewer"):
        ask_it(tmp_path)


def end_of(code: int, last_words: str = "") -> child.ChildEnd:
    return child.ChildEnd(code, 1, 0.1, None, last_words)


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (end_of(errors.INTERRUPTED), KeyboardInterrupt, "^$"),
        (end_of(-signal.SIGTERM), KeyboardInterrupt, "^$"),
        (end_of(-signal.SIGKILL), errors.ChildCrashed, "out of memory"),
        (end_of(1, "Traceback\nValueError: no"), errors.ChildCrashed, "ValueError: no"),
        (end_of(1), errors.ChildCrashed, "nothing"),
    ],
)
def test_its_other_endings(
    end: child.ChildEnd, kind: type[BaseException], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "run_child", lambda *_args: end)
    with pytest.raises(kind, match=words):
        ask_it(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_a_child_does_not_outlive_its_parent() -> None:
    sleeper = (
        "import sys, time; from hotlap.child import die_with_parent; "
        "die_with_parent(); print('up', file=sys.stderr, flush=True); time.sleep(60)"
    )
    parent = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {sleeper!r}]); "
        "print(child.pid, flush=True); child.wait()"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", parent], text=True, **pipes)
    assert process.stdout and process.stderr
    with process:
        pid = int(process.stdout.readline())
        assert process.stderr.readline() == "up\n"
        process.kill()
    until = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_what_a_library_prints_does_not_get_between_the_events() -> None:
    code = "from hotlap.train.channel import events; emit = events(); print('noise'); emit({'event': 'x', 'text': 'é'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"event": "x", "text": "é"}]
    assert done.stderr == "noise\n"
