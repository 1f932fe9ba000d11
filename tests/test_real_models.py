"""The real SmolLM2-135M in 4 bits and the real Gemma 3 270M: trained, cut, resumed exactly, loaded by stock PEFT."""

from pathlib import Path
from typing import Any

import pytest
from fixtures_data import f3_rows, write_jsonl
from zygote import Zygote

from hotlap import durable
from hotlap.config import RunConfig
from hotlap.runs import RunFolder

pytestmark = [pytest.mark.torch, pytest.mark.real]

NUM_STEPS = 3


def short_run(base: Path, data: Path, output_dir: Path, name: str, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({
        "base_model": str(base),
        "dataset": str(data),
        "output_dir": str(output_dir),
        "run": name,
        "seed": 7,
        "data": {"seq_len": 64},
        "lora": {"rank": 4},
        "optim": {"lr": 2e-3},
        "train": {"max_steps": NUM_STEPS},
        "slice": {"num_threads": 1},
        **sections,
    })  # fmt: skip


def train(zygote: Zygote, config: RunConfig, *stops: int) -> None:
    for step in stops:
        process = zygote.run(config, "patches:as_told", TEST_STOP_AT=str(step))
        assert process.status == 75, process.talk()
    process = zygote.run(config)
    assert process.status == 0, process.talk()


def learned(config: RunConfig) -> tuple[str, list[float]]:
    run = RunFolder(config.run_folder)
    losses = [row["loss"] for row in durable.read_rows(run.metrics)]
    return durable.sha256_file(run.adapter / "adapter_model.safetensors"), losses


def logits(model: Any, tokens_BT: Any, **settings: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=tokens_BT, **settings).logits.float()


def test_smollm2_in_4_bits(zygote: Zygote, smollm2: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    from hotlap.config import ModelConfig
    from hotlap.train import base

    data = write_jsonl(tmp_path / "f3.jsonl", f3_rows())
    settings = {"precision": "float32", "quantization": "nf4"}
    cut, whole = (short_run(smollm2, data, tmp_path / "runs", name, model=settings) for name in ("cut", "whole"))
    train(zygote, cut, 2)
    train(zygote, whole)
    assert learned(cut) == learned(whole)
    losses = learned(whole)[1]
    assert losses[-1] < losses[0]

    quantized: Any = base.load_base(smollm2, ModelConfig(**settings))  # pyright: ignore
    plain: Any = base.load_base(smollm2)
    assert quantized.get_memory_footprint() < 0.45 * plain.get_memory_footprint()
    tokens_BT = torch.arange(1000, 1040)[None]
    difference = (logits(quantized, tokens_BT) - logits(plain, tokens_BT)).square().mean().sqrt()
    assert 1e-3 < float(difference) < 0.5 * float(logits(plain, tokens_BT).std())
    adapted = PeftModel.from_pretrained(quantized, RunFolder(whole.run_folder).adapter).eval()
    assert float((logits(adapted, tokens_BT) - logits(plain, tokens_BT)).abs().max()) > 1e-2


def test_gemma3_270m(zygote: Zygote, gemma3_270m: Path, tmp_path: Path) -> None:
    """Its chat template is none, so prompt and completion are plain text; its layers slide with a window of 512."""
    import torch
    from peft import PeftModel

    from hotlap.train import base, model

    data = write_jsonl(tmp_path / "f3.jsonl", f3_rows(1) * 8)
    settings = {"precision": "float32"}
    cut, whole = (short_run(gemma3_270m, data, tmp_path / "runs", name, model=settings) for name in ("cut", "whole"))
    train(zygote, cut, 2)
    train(zygote, whole)
    assert learned(cut) == learned(whole)
    losses = learned(whole)[1]
    assert losses[-1] < losses[0]

    adapter = RunFolder(whole.run_folder).adapter
    tokens_BT = torch.arange(1000, 1600)[None]  # longer than the window
    ours = model.attach_lora(base.load_base(gemma3_270m), whole.lora, 0, "base")
    model.load_parameters(ours.saved, model.load_tensors(adapter / model.ADAPTER_FILE), adapter)
    ours.peft_model.eval()
    with torch.inference_mode():
        ours_BTV = ours.logits(ours.hidden(tokens_BT, torch.ones_like(tokens_BT))[:, -50:])
    del ours
    stock = PeftModel.from_pretrained(base.load_base(gemma3_270m), adapter).eval()
    torch.testing.assert_close(ours_BTV, logits(stock, tokens_BT, logits_to_keep=50), rtol=1e-3, atol=1e-3)
