"""The families we train: a slice trained, cut and resumed exactly, loaded by stock PEFT, packed rows without leaks."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, PLAINLY_ATTENDING, SCALING_LOGITS, WINDOW, make_family
from fixtures_data import f4_conversations, write_jsonl
from test_golden import finish
from test_packing_loss import mean_loss, packed
from tiny import tiny_config
from zygote import Zygote

from hotlap import durable, runs
from hotlap.config import LoraConfig, RunConfig
from hotlap.errors import ConfigError
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch

TRAINED = [*FAMILIES, *PLAINLY_ATTENDING, *SCALING_LOGITS]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_family(tmp_path_factory.mktemp(family), family) for family in TRAINED}


def moved(folder: Path, seed: int = 1) -> Any:
    """A model of ours whose B is not zero, for evaluation."""
    import torch

    from hotlap.train import model

    ours = model.attach_lora(model.load_base(folder), LoraConfig(rank=4, alpha=8.0), 0, "base")
    with torch.no_grad():
        for name, parameter in ours.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    ours.peft_model.eval()
    return ours


@pytest.mark.parametrize("family", TRAINED)
def test_a_slice_is_trained_resumed_exactly_and_loaded_by_stock_peft(
    zygote: Zygote, families: dict[str, Path], f3: Path, tmp_path: Path, family: str
) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM

    from hotlap.train import model

    folder = families[family]
    before = {file.name: durable.sha256_file(file) for file in folder.iterdir()}
    changes: dict[str, Any] = {"train__max_steps": 6, "optim__lr": 3e-3}
    whole = tiny_config(folder, f3, tmp_path / "runs", run="whole", **changes)
    assert finish(zygote, whole) == 1
    config = tiny_config(folder, f3, tmp_path / "runs", run="cut", **changes)
    process = zygote.run(config, "patches:as_told", TEST_STOP_AT="3")
    assert process.status == 75, process.talk()
    assert finish(zygote, config) == 1
    assert results_of(config) == results_of(whole)
    rows = durable.read_rows(RunFolder(config.run_folder).metrics)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {file.name: durable.sha256_file(file) for file in folder.iterdir()} == before

    adapter = RunFolder(config.run_folder).adapter
    ours = model.attach_lora(model.load_base(folder), config.lora, 0, "base")
    model.load_parameters(ours.saved, model.load_tensors(adapter / model.ADAPTER_FILE), adapter)
    ours.peft_model.eval()
    stock = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    tokens_BT = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours_BTV = ours.logits(ours.hidden(tokens_BT, torch.ones_like(tokens_BT)))
        stock_BTV = stock(input_ids=tokens_BT).logits
        with stock.disable_adapter():
            base_BTV = stock(input_ids=tokens_BT).logits
    torch.testing.assert_close(ours_BTV, stock_BTV, rtol=1e-5, atol=1e-5)
    assert float((stock_BTV - base_BTV).abs().max()) > 1e-2


def results_of(config: RunConfig) -> dict[str, str]:
    run = RunFolder(config.run_folder)
    newest = runs.newest_checkpoint(run, pytest.fail)
    assert newest is not None
    files = (run.adapter / "adapter_model.safetensors", newest.folder / "optimizer.safetensors", run.metrics)
    return {file.name: durable.sha256_file(file) for file in files}


@pytest.mark.parametrize("family", TRAINED)
def test_b15_packed_rows_have_the_loss_of_the_examples_alone(
    families: dict[str, Path], tmp_path: Path, family: str
) -> None:
    folder = families[family]
    source = write_jsonl(tmp_path / "x.jsonl", f4_conversations(12))
    alone, together = packed(source, folder, "none"), packed(source, folder, "best-fit")
    assert together.num_rows < alone.num_rows == 12
    ours = moved(folder)
    loss, _, total = mean_loss(ours, alone)
    packed_loss, _, packed_total = mean_loss(ours, together)
    assert packed_total == total
    assert packed_loss == pytest.approx(loss, abs=1e-5)
    naive, _, _ = mean_loss(ours, together, is_open=True)
    assert abs(naive - loss) > 1e-4


@pytest.mark.parametrize("family", TRAINED)
def test_an_example_alone_has_the_loss_of_the_stock_model(
    families: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Masks, windows, positions and soft caps of ours against what transformers makes of a plain row of tokens."""
    import torch

    from hotlap.train.step import batch_loss, read_batch

    folder = families[family]
    alone = packed(write_jsonl(tmp_path / "x.jsonl", f4_conversations(4)), folder, "none")
    ours = moved(folder)
    stock: Any = ours.peft_model
    for row in range(alone.num_rows):
        batch = read_batch(alone, np.array([row]))
        length = int((batch.segments_BT > 0).sum())
        assert length > 2 * WINDOW
        tokens_1T, is_trained_1T = batch.tokens_BT[:, :length], batch.is_trained_BT[:, :length]
        with torch.inference_mode():
            logits_TV = stock(input_ids=tokens_1T).logits[0]
            labels_T = torch.where(is_trained_1T, tokens_1T, -100)[0]
            expected = torch.nn.functional.cross_entropy(logits_TV[:-1], labels_T[1:], reduction="sum")
            found = batch_loss(ours, batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_heeds_no_mask_is_refused(
    zygote: Zygote, families: dict[str, Path], f3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = {"Bloom": "does not work here: ", "Phimoe": "does not work here: ", "Rwkv": "is not seen to keep examples"}
    for name, words in why.items():
        family = name.lower()
        folder = make_family(tmp_path / family, family)
        process = zygote.run(tiny_config(folder, f3, tmp_path / "runs", run=family, train__max_steps=1))
        assert (process.status, process.result()["reason"]) == (2, "config"), process.talk()
        assert f"{name}ForCausalLM cannot be trained here. A mask {words}" in process.result()["message"]

    from hotlap.train import model

    for family in ("llama", *PLAINLY_ATTENDING):
        moved(families[family]).require_mask()
    # The naive way: truth values, which plain attention adds to its scores.
    monkeypatch.setattr(model, "as_summands", lambda mask, dtype: mask)
    for family in PLAINLY_ATTENDING:
        with pytest.raises(ConfigError, match=r"cannot be trained here\. A mask is not seen to keep examples"):
            moved(families[family]).require_mask()


def test_a_model_whose_logits_are_not_known_is_refused(
    zygote: Zygote, families: dict[str, Path], f3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotlap.train import model

    for family in (*FAMILIES, *SCALING_LOGITS):
        moved(families[family]).require_stock_logits()
    config = tiny_config(families["granite"], f3, tmp_path / "runs", train__max_steps=1)
    process = zygote.run(config, "patches:as_told", TEST_NAIVE="logits")
    assert (process.status, process.result()["reason"]) == (2, "config"), process.talk()
    assert "GraniteForCausalLM cannot be trained here. The model gives other logits" in process.result()["message"]
    monkeypatch.setattr(model, "logit_scale_of", lambda _config: 1.0)
    with pytest.raises(ConfigError, match="gives other logits than its output head makes"):
        moved(families["cohere"]).require_stock_logits()


def test_a_ready_mask_without_the_window_is_the_naive_way(families: dict[str, Path]) -> None:
    """transformers takes a mask of four dimensions as it is, so a window has to be in it already."""
    import torch

    from hotlap.train import masks

    tokens_BT = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(1))
    ones_BT = torch.ones_like(tokens_BT)
    for family in ("qwen2", "gemma3", "gemma4", "mistral"):
        ours = moved(families[family])
        with torch.inference_mode():
            stock_BTV = ours.peft_model(input_ids=tokens_BT).logits
            torch.testing.assert_close(ours.logits(ours.hidden(tokens_BT, ones_BT)), stock_BTV, rtol=1e-5, atol=1e-5)
            ours._window = None
            naive_BTV = ours.logits(ours.hidden(tokens_BT, ones_BT))
        assert not torch.allclose(naive_BTV, stock_BTV, atol=1e-3), family
    near = masks.masks_of(torch.tensor([[1] * 5 + [2] * 3]), masks.Window(2, is_everywhere=True))
    allowed = {(query, key) for query, key in itertools.product(range(8), repeat=2) if near[0, 0, query, key]}  # pyright: ignore
    assert allowed == {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3), (4, 4)} | {
        *((5, 5), (6, 5), (6, 6), (7, 6), (7, 7))
    }


def test_a_soft_capped_head_without_its_cap_is_the_naive_way(families: dict[str, Path]) -> None:
    import torch

    ours = moved(families["gemma3"])
    tokens_BT = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hidden_BTD = ours.hidden(tokens_BT, torch.ones_like(tokens_BT))
        capped_BTV, naive_BTV = ours.logits(hidden_BTD), ours._lm_head(hidden_BTD)
    assert float(capped_BTV.abs().max()) < 2.0 < float(naive_BTV.abs().max())


def test_gemma4_trains_the_text_tower_only(zygote: Zygote, families: dict[str, Path], f3: Path, tmp_path: Path) -> None:
    """Stock `all-linear` takes vision and audio in; ours leaves all that is not text byte for byte as it was."""
    import torch
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftModel, get_peft_model
    from safetensors.torch import load_file

    from hotlap.train import model

    folder = families["gemma4"]
    config = tiny_config(folder, f3, tmp_path / "runs", train__max_steps=3)
    assert finish(zygote, config) == 1
    adapter = RunFolder(config.run_folder).adapter
    names = set(load_file(adapter / "adapter_model.safetensors"))
    assert names and all(name.startswith("base_model.model.model.language_model.") for name in names)
    kinds = {name.split(".")[-3] for name in names}
    assert kinds >= {"q_proj", "k_proj", "o_proj", "gate_proj", "per_layer_input_gate", "per_layer_projection"}
    assert "per_layer_model_projection" in kinds and not kinds & {"embed_tokens_per_layer", "embedding_projection"}
    with_keys = {name.split(".layers.")[1].split(".")[0] for name in names if ".k_proj." in name}
    with_values = {name.split(".layers.")[1].split(".")[0] for name in names if ".v_proj." in name}
    assert (with_keys, with_values) == ({"0", "1"}, {"0"})  # 2 and 3 share them; in 1 keys are values

    merged = PeftModel.from_pretrained(model.load_base(folder), adapter).merge_and_unload().state_dict()
    plain = model.load_base(folder).state_dict()
    changed = {name for name, value in plain.items() if not torch.equal(merged[name], value)}
    assert changed and all(name.startswith("model.language_model.") for name in changed)
    towers = {name for name in plain if "vision" in name or "audio" in name}
    assert len(towers) > 20 and not towers & changed

    with pytest.raises(ValueError, match="is not supported"):  # the naive way, which meets modules it cannot wrap
        get_peft_model(model.load_base(folder), PeftLoraConfig(r=4, target_modules=["q_proj"]))  # pyright: ignore
    naive = get_peft_model(model.load_base(folder), PeftLoraConfig(r=4, target_modules="all-linear"))  # pyright: ignore
    assert any("vision_tower" in name and "lora" in name for name, _ in naive.named_parameters())


def test_gemma4_names_mean_the_text_tower_too(families: dict[str, Path]) -> None:
    from hotlap.train import model

    ours = model.attach_lora(
        model.load_base(families["gemma4"]), LoraConfig(rank=4, target_modules=("q_proj",)), 0, "base"
    )
    assert len(ours.parameters) == 2 * 4
    assert all("language_model" in name for name in ours.parameters)


def test_gemma4_quantized_leaves_the_towers_as_they_are(families: dict[str, Path]) -> None:
    import torch
    from bitsandbytes.nn import Linear4bit

    from hotlap.config import ModelConfig
    from hotlap.train import base

    settings = ModelConfig(precision="float32", quantization="nf4")
    quantized, plain = base.load_base(families["gemma4"], settings), base.load_base(families["gemma4"])
    inside = set(base.decoder_linears(plain))
    found = {name for name, module in quantized.named_modules() if isinstance(module, Linear4bit)}
    assert found == inside and len(found) == 32
    now = quantized.state_dict()
    towers = {name: value for name, value in plain.state_dict().items() if "vision" in name or "audio" in name}
    assert len(towers) > 20 and all(torch.equal(now[name], value) for name, value in towers.items())
