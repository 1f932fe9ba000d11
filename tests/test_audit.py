"""The audit of produced weights, against adapters written byte by byte; and one that PEFT itself wrote."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contest import floats, micro, micro_contest, safetensors

from hotlap.speedrun import inputs
from hotlap.speedrun.audit import CONFIG, MAGNITUDE, WEIGHTS, Audit, audit, linear_shapes
from hotlap.speedrun.track import Limits

pytestmark = pytest.mark.long

Q = "base_model.model.model.layers.0.self_attn.q_proj"
LIMITS = Limits(adapter_params=2000, time_limit_s=1, memory_bytes=1, num_processes=1, max_lora_rank=8)
GOOD_CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
GOOD = {f"{Q}.lora_A.weight": floats(4, 32), f"{Q}.lora_B.weight": floats(32, 4)}
LISTED = [{"name": name, "kind": "file", "bytes": 1} for name in (CONFIG, WEIGHTS)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return inputs.base_model(micro(micro_contest(tmp_path / "contest")), lambda _text: None)


@pytest.fixture
def inspect(tmp_path: Path, model: Path) -> Callable[..., Audit]:
    def run(
        tensors: dict[str, Any] | bytes = GOOD,
        config: dict[str, Any] | bytes = GOOD_CONFIG,
        output: list[dict[str, Any]] = LISTED,
        limits: Limits = LIMITS,
    ) -> Audit:
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / WEIGHTS).write_bytes(tensors if isinstance(tensors, bytes) else safetensors(tensors))
        (folder / CONFIG).write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
        return audit(folder, output, model, limits)

    return run


def test_a_plain_adapter_is_accepted_and_counted(inspect: Callable[..., Audit]) -> None:
    found = inspect()
    assert found.complaints == ()
    assert found.num_params == 4 * 32 + 32 * 4
    assert set(found.sha256) == {CONFIG, WEIGHTS}


def test_the_base_model_s_linear_modules(model: Path) -> None:
    shapes = linear_shapes(model)
    assert shapes["model.layers.1.mlp.gate_proj"] == (64, 32)
    assert len(shapes) == 2 * 7 + 2


BAD_TENSORS: list[tuple[Any, str]] = [
    ({}, "holds no tensor"),
    ({**GOOD, "extra": floats(1)}, "'extra' is no LoRA weight"),
    ({**GOOD, f"{Q}.weight": floats(32, 32)}, "is no LoRA weight"),
    ({f"{Q}.lora_A.weight": floats(4, 32)}, "lacks B of its update"),
    ({**GOOD, f"{Q}.lora_A.weight": floats(5, 32)}, "has shape [5, 32], not [4, 32]"),
    ({**GOOD, f"{Q}.lora_B.weight": floats(4, 32)}, "has shape [4, 32], not [32, 4]"),
    ({name.replace("q_proj", "x_proj"): value for name, value in GOOD.items()}, "is no LoRA weight"),
    ({name.replace("layers.0", "layers.9"): value for name, value in GOOD.items()}, "is no LoRA weight"),
    ({name.replace("base_model.model.", ""): value for name, value in GOOD.items()}, "is no LoRA weight"),
    ({**GOOD, f"{Q}.lora_A.weight": floats(4, 32, value=float("nan"))}, "not finite"),
    ({**GOOD, f"{Q}.lora_A.weight": floats(4, 32, value=float("inf"))}, "not finite"),
    ({**GOOD, f"{Q}.lora_A.weight": ("BF16", [4, 32], b"\x80\x7f" * 128)}, "not finite"),
    ({**GOOD, f"{Q}.lora_A.weight": ("F16", [4, 32], b"\x00\x7c" * 128)}, "not finite"),
    ({**GOOD, f"{Q}.lora_A.weight": ("F64", [4, 32], bytes(8 * 128))}, "has kind 'F64'"),
    ({**GOOD, f"{Q}.lora_A.weight": ("F32", [4, 32], bytes(100))}, "a size that does not fit"),
    (safetensors(GOOD, padding=b"hidden"), "bytes after the last tensor"),
    (b"", "header's length is wrong"),
    (b"\x80\x04pickle", "header's length is wrong"),
    (struct.pack("<Q", 1 << 60) + b"{}", "header's length is wrong"),
    (struct.pack("<Q", 4) + b"nope", "is not JSON"),
    (struct.pack("<Q", 12) + b'{"a":1,"a":2', "is not JSON"),
    (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "twice"),
    (struct.pack("<Q", 7) + b'{"a":1}', "is incomplete"),
]


@pytest.mark.parametrize(("tensors", "reason"), BAD_TENSORS, ids=[reason for _, reason in BAD_TENSORS])
def test_weights_that_are_refused(tensors: Any, reason: str, inspect: Callable[..., Audit]) -> None:
    (complaint,) = inspect(tensors).complaints
    assert reason in complaint


def test_overlapping_tensors_are_refused(inspect: Callable[..., Audit]) -> None:
    header = {
        f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]},
        f"{Q}.lora_B.weight": {"dtype": "F32", "shape": [32, 4], "data_offsets": [256, 768]},
    }
    text = json.dumps(header).encode()
    (complaint,) = inspect(struct.pack("<Q", len(text)) + text + bytes(768)).complaints
    assert "to no tensor, or to two" in complaint


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"r": 0}, "r is '0'"),
        ({"r": 9}, "1 to 8 is allowed"),
        ({"r": True}, "r is 'True'"),
        ({"bias": "all"}, "without bias"),
        ({"lora_alpha": "8"}, "lora_alpha is no number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is no number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is no number"),
        ({"lora_alpha": 10**400}, "lora_alpha is no number"),
        ({"target_modules": "(a+)+$"}, "target_modules is no list"),
        ({"target_modules": [1]}, "target_modules is no list"),
        ({"use_rslora": "yes"}, "true or false"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save'"),
        ({"auto_mapping": {"base_model_class": "X"}}, "'auto_mapping'"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication'"),
        ({"rank_pattern": {"q_proj": 64}}, "'rank_pattern'"),
        ({"init_lora_weights": "pissa_niter_4"}, "plain LoRA of twice the rank"),
        ({"RESULT accuracy=1.0": "x"}, "'RESULT accuracy=1.0'"),
        ({"use_dora": 1}, "true or false"),
        ({"use_dora": True}, "lacks magnitude of its update"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], reason: str, inspect: Callable[..., Audit]) -> None:
    (complaint,) = inspect(config={**GOOD_CONFIG, **change}).complaints
    assert reason in complaint


def test_a_configuration_that_is_no_object(inspect: Callable[..., Audit]) -> None:
    assert "is not an object" in inspect(config=b"[]").complaints[0]


def test_a_cap_on_parameters_is_kept(inspect: Callable[..., Audit]) -> None:
    found = inspect(limits=LIMITS.model_copy(update={"adapter_params": 255}))
    assert found.complaints == ("256 parameters, and 255 are allowed",)
    assert found.num_params == 256


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "adapter_model.bin", "kind": "file", "bytes": 1},
        {"name": "x_adapter_model.safetensors", "kind": "file", "bytes": 1},
        {"name": "checkpoint-1", "kind": "folder", "bytes": 1},
        {"name": WEIGHTS, "kind": "special", "bytes": 1},
    ],
)
def test_anything_else_in_the_output_is_refused(entry: dict[str, Any], inspect: Callable[..., Audit]) -> None:
    (complaint,) = inspect(output=[*LISTED, entry]).complaints
    assert "has no place in an adapter" in complaint


def test_files_that_did_not_come_out(tmp_path: Path, model: Path) -> None:
    found = audit(tmp_path, [], model, LIMITS)
    assert found.complaints == tuple(f"{name} is missing, no plain file, or too large" for name in (CONFIG, WEIGHTS))


DORA = {**GOOD, f"{Q}.lora_magnitude_vector": floats(32)}
DORA_CONFIG = {**GOOD_CONFIG, "use_dora": True}


def test_magnitudes_count_and_are_held_against_their_module(inspect: Callable[..., Audit]) -> None:
    found = inspect(DORA, DORA_CONFIG)
    assert found.complaints == () and found.num_params == 4 * 32 + 32 * 4 + 32


@pytest.mark.parametrize(
    ("tensors", "config", "dora", "reason"),
    [
        (DORA, DORA_CONFIG, False, "takes no DoRA"),
        (DORA, GOOD_CONFIG, True, "says nothing of use_dora"),
        ({**GOOD, f"{Q}.lora_magnitude_vector": floats(31)}, DORA_CONFIG, True, "has shape [31], not [32]"),
    ],
)
def test_magnitudes_that_are_refused(
    tensors: Any, config: Any, dora: bool, reason: str, inspect: Callable[..., Audit]
) -> None:
    (complaint,) = inspect(tensors, config, limits=LIMITS.model_copy(update={"dora": dora})).complaints
    assert reason in complaint


@pytest.mark.torch
def test_a_dora_adapter_of_peft_is_accepted_and_its_magnitudes_are_applied(tmp_path: Path, model: Path) -> None:
    """The frozen evaluator calls magnitudes ignored, because PEFT renames them when it loads them; they are not."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def logits(adapter: Path) -> torch.Tensor:
        with torch.inference_mode():
            return PeftModel.from_pretrained(base(), adapter).eval()(input_ids=torch.tensor([[1, 2, 3]])).logits

    folder = tmp_path / "adapter"
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True)
    get_peft_model(base(), config).save_pretrained(folder)
    listed = [{"name": path.name, "kind": "file", "bytes": 1} for path in folder.iterdir()]
    assert {entry["name"] for entry in listed} == {CONFIG, WEIGHTS, "README.md"}
    found = audit(folder, listed, model, LIMITS.model_copy(update={"adapter_params": 100_000}))
    assert found.complaints == ()
    before = logits(folder)
    tensors = load_file(folder / WEIGHTS)
    save_file({n: t * 1.5 if n.endswith(MAGNITUDE) else t for n, t in tensors.items()}, folder / WEIGHTS)
    assert (logits(folder) - before).abs().max() > 1e-3


@pytest.mark.torch
def test_what_peft_writes_is_accepted(tmp_path: Path, model: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    peft.save_pretrained(tmp_path / "adapter")
    trained = sum(p.numel() for p in peft.parameters() if p.requires_grad)
    found = audit(tmp_path / "adapter", LISTED, model, LIMITS.model_copy(update={"adapter_params": 100_000}))
    assert found.complaints == ()
    assert found.num_params == trained == 2 * (4 * 8 * 64 + 3 * 8 * 96)
