"""Every switch of model, adapter and optimizer: a run that is cut ends with the bits of the uncut one, a switch does
what it says, and stock PEFT gives the logits of what we trained."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from test_golden import finish, state_of
from tiny import make_tiny_model, tiny_config
from zygote import Zygote

from hotlap.config import RunConfig
from hotlap.runs import RunFolder, newest_checkpoint

pytestmark = pytest.mark.torch

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"lora__rslora": True},
    "dora": {"lora__dora": True},
    "pissa": {"lora__init": "pissa"},
    "pissa rslora": {"lora__init": "pissa", "lora__rslora": True},
    "modules_to_save": {"lora__modules_to_save": ["lm_head", "embed_tokens"]},
    "lora_plus": {"optim__lora_plus_ratio": 4.0},
    "neftune": {"train__neftune_alpha": 5.0},
    "gradient_checkpointing": {"slice__gradient_checkpointing": True},
    "warmdown": {"optim__schedule": "warmdown"},
    "nf4": {"model__quantization": "nf4"},
    "nf4 single": {"model__quantization": "nf4", "model__double_quantization": False},
    "nf4 dora": {"model__quantization": "nf4", "lora__dora": True},
    "int8": {"model__quantization": "int8"},
    "adamw8bit": {"optim__kind": "adamw8bit", "lora__rank": 64},
    "bfloat16": {"model__precision": "bfloat16"},
    "float16": {"model__precision": "float16"},
}
SAME_AS_PLAIN = {"gradient_checkpointing"}
NUM_STEPS = 10


@functools.cache
def uncut(zygote: Zygote, model: Path, data: Path, scratch: Path, switch: str) -> RunConfig:
    folder = scratch / switch.replace(" ", "-")
    config = switched(model, data, folder / "runs", switch)
    process = zygote.run(config, HOTLAP_HOME=str(folder / "home"))
    assert process.status == 0, process.talk()
    return config


def switched(model: Path, data: Path, output_dir: Path, switch: str) -> RunConfig:
    settings = {"train__max_steps": NUM_STEPS, "data__eval_examples": 6, "eval__every_steps": 4, **SWITCHES[switch]}
    return tiny_config(model, data, output_dir, **settings)


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """F1; and F1 with hidden 64 for what is quantized in blocks of 64."""
    return {False: tiny_model, True: make_tiny_model(tmp_path_factory.mktemp("wide"), hidden=64)}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("switches")


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_cut_run_has_the_bits_of_the_uncut_one(
    zygote: Zygote, models: dict[bool, Path], f3: Path, tmp_path: Path, scratch: Path, switch: str
) -> None:
    model = models["nf4" in switch]
    whole = state_of(RunFolder(uncut(zygote, model, f3, scratch, switch).run_folder))
    config = switched(model, f3, tmp_path / "runs", switch)
    for step in (3, 7):
        process = zygote.run(config, "patches:as_told", TEST_STOP_AT=str(step))
        assert (process.status, process.result()["step"]) == (75, step), process.talk()
    assert finish(zygote, config) == 1
    assert state_of(RunFolder(config.run_folder)) == whole
    if switch != "plain" and "nf4" not in switch:
        plain = state_of(RunFolder(uncut(zygote, model, f3, scratch, "plain").run_folder))
        assert (plain["adapter"] == whole["adapter"]) == (switch in SAME_AS_PLAIN)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("which", ["adapter", "best"])
def test_stock_peft_gives_our_logits(
    zygote: Zygote, models: dict[bool, Path], f3: Path, scratch: Path, switch: str, which: str
) -> None:
    import torch
    from peft import PeftModel

    from hotlap.train import model

    folder = models["nf4" in switch]
    config = uncut(zygote, folder, f3, scratch, switch)
    run = RunFolder(config.run_folder)
    result = run.path / which
    tokens_BT = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        stock = PeftModel.from_pretrained(base_of(folder, config), result).eval()
        stock_BTV = stock(tokens_BT).logits.float()
        plain_BTV = base_of(folder, config)(tokens_BT).logits.float()
    ours = model.attach_lora(base_of(folder, config), config.lora, 7, "base")
    checkpoint = checkpoint_of(run, which)
    model.load_parameters(ours.parameters, model.load_tensors(checkpoint / model.ADAPTER_FILE), checkpoint)
    assert {parameter.dtype for parameter in ours.parameters.values()} == {torch.float32}
    ours.peft_model.eval()
    with torch.inference_mode():
        ours_BTV = ours.logits(ours.hidden(tokens_BT, torch.ones(2, 24, dtype=torch.int32)))
    tolerance = 1e-5 if config.model.precision == "float32" else 5e-2
    torch.testing.assert_close(ours_BTV, stock_BTV, rtol=tolerance, atol=tolerance)
    assert float((ours_BTV - plain_BTV).abs().max()) > 10 * tolerance or which == "best"
    fields = json.loads((result / "adapter_config.json").read_text())
    assert fields["init_lora_weights"] is True
    assert fields["r"] == config.lora.rank * (2 if config.lora.init == "pissa" else 1)


def base_of(folder: Path, config: RunConfig) -> Any:
    from hotlap.train import base

    return base.load_base(folder, config.model)


def checkpoint_of(run: RunFolder, which: str) -> Path:
    newest = newest_checkpoint(run, pytest.fail)
    assert newest is not None
    return newest.folder if which == "adapter" else run.checkpoints / newest.facts["best"]["checkpoint"]
