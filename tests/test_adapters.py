"""What the switches of adapter and optimizer do, each against an independent computation, and what is refused."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures_data import NUM_ENTRIES, write_byte_tokenizer, write_jsonl
from tiny import make_tiny_model, tiny_config
from zygote import Zygote

from hotlap.config import LoraConfig, OptimConfig, RunConfig
from hotlap.errors import AuditFailed, ConfigError
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch

MakeConfig = Callable[..., RunConfig]


def attach(folder: Path, lora: LoraConfig, **named: Any) -> Any:
    from hotlap.train import model

    return model.attach_lora(model.load_base(folder), lora, 0, "base", **named)


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


# --- the learning rate ---


def test_warmdown_is_constant_and_then_falls_to_its_floor() -> None:
    from hotlap.train.optim import lr_at

    config = OptimConfig(lr=1.0, schedule="warmdown", warmup_steps=2, warmdown_ratio=0.25, final_lr_ratio=0.2)
    rates = [lr_at(step, 20, config) for step in range(1, 24)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:15] == [1.0] * 13  # steps 3 to 15; the last quarter begins after them
    assert rates[15:20] == pytest.approx([1.0, 0.84, 0.68, 0.52, 0.36])
    assert rates[20:] == pytest.approx([0.2, 0.2, 0.2])


def test_lora_plus_groups_are_those_of_peft(tiny_model: Path) -> None:
    import torch
    from peft.optimizers import create_loraplus_optimizer

    from hotlap.train import optim

    ours = attach(tiny_model, LoraConfig(rank=4))
    optimizer = optim.build(ours.parameters, OptimConfig(lr=1e-3, lora_plus_ratio=16.0))
    optim.set_lr(optimizer, 1e-3)
    theirs = create_loraplus_optimizer(ours.peft_model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)

    def rates(built: Any) -> dict[int, float]:
        return {id(parameter): group["lr"] for group in built.param_groups for parameter in group["params"]}

    assert rates(optimizer) == rates(theirs)
    assert set(rates(optimizer).values()) == {1e-3, 16e-3}


# --- the adapter ---


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8.0 / 4), (True, 8.0 / 4**0.5)])
def test_scale_of_the_update(tiny_model: Path, rslora: bool, scale: float) -> None:
    ours = attach(tiny_model, LoraConfig(rank=4, alpha=8.0, rslora=rslora))
    layers = [module for module in ours.peft_model.modules() if hasattr(module, "lora_A")]
    found = {layer.scaling["default"] for layer in layers}
    assert found == {scale}


def test_dora_and_pissa_change_nothing_before_the_first_step(tiny_model: Path) -> None:
    import torch

    from hotlap.train import model

    tokens_BT = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain_BTV = model.load_base(tiny_model)(tokens_BT).logits  # pyright: ignore
        for lora in (LoraConfig(rank=4, dora=True), LoraConfig(rank=4, init="pissa")):
            ours = attach(tiny_model, lora)
            ours.peft_model.eval()
            logits_BTV = ours.logits(ours.hidden(tokens_BT, torch.ones_like(tokens_BT)))
            torch.testing.assert_close(logits_BTV, plain_BTV, rtol=1e-5, atol=1e-5)


def test_pissa_takes_the_largest_directions_out_of_the_base(tiny_model: Path) -> None:
    """What is left of a weight has its singular values but the four largest, which are the adapter's."""
    import torch

    from hotlap.train import model

    name = "model.layers.0.self_attn.q_proj"
    before = torch.linalg.svdvals(model.load_base(tiny_model).get_submodule(name).weight)
    ours = attach(tiny_model, LoraConfig(rank=4, init="pissa"))
    layer = ours.peft_model.get_base_model().get_submodule(name)
    left = torch.linalg.svdvals(layer.base_layer.weight)
    torch.testing.assert_close(left[:28], before[4:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(left[28:], torch.zeros(4), rtol=0, atol=1e-5)


def test_neftune_noise_is_bounded_by_the_example_and_absent_from_evaluation(tiny_model: Path) -> None:
    """alpha / sqrt(tokens of the example x width), whether it has a row of its own or shares one."""
    import torch

    ours = attach(tiny_model, LoraConfig(rank=4), neftune_alpha=5.0)
    seen: list[torch.Tensor] = []
    embed = ours.peft_model.get_input_embeddings()
    embed.register_forward_hook(lambda _module, _given, output: seen.append(output))
    tokens_BT = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    segments_BT = torch.tensor([[1] * 30 + [2] * 10])
    clean_BTD = embed.weight[tokens_BT]
    ours.peft_model.train()
    ours.hidden(tokens_BT, segments_BT)
    noise_TD = (seen[-1] - clean_BTD)[0].abs()
    for part, length in ((noise_TD[:30], 30), (noise_TD[30:], 10)):
        most = 5.0 / (length * 32) ** 0.5
        assert 0.95 * most < float(part.max()) <= most * (1 + 1e-5)
        assert float(part.mean()) == pytest.approx(most / 2, rel=0.1)
    ours.peft_model.eval()
    ours.hidden(tokens_BT, segments_BT)
    assert torch.equal(seen[-1], clean_BTD)


def test_b31_an_adapter_on_a_head_that_is_the_embedding_is_refused(tiny_model: Path, tied_model: Path) -> None:
    """Merged in place, the naive way changes what the model reads as well."""
    import torch
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    from hotlap.train import model

    with pytest.warns(UserWarning, match="tie"):
        naive = get_peft_model(model.load_base(tied_model), PeftLoraConfig(r=4, target_modules=["lm_head"]))  # pyright: ignore
        before = naive.get_input_embeddings().weight.detach().clone()
        torch.nn.init.normal_(naive.base_model.model.lm_head.lora_B["default"].weight)
        merged = naive.merge_and_unload()
    assert not torch.equal(merged.get_input_embeddings().weight, before)

    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(
            ConfigError, match=f"names {name}, and this model's input embedding and output head are one"
        ):
            attach(tied_model, LoraConfig(rank=4, target_modules=("q_proj", name)))
    untied = attach(tiny_model, LoraConfig(rank=4, target_modules=("lm_head",)))
    assert len(untied.parameters) == 2


def test_tied_embeddings_that_are_trained_in_full_stay_tied(tied_model: Path, tmp_path: Path) -> None:
    """One tensor of ours; stock PEFT loads it into both places."""
    import torch
    from peft import PeftModel

    from hotlap.train import model

    ours = attach(tied_model, LoraConfig(rank=4, modules_to_save=("embed_tokens",)))
    (whole,) = [name for name in ours.parameters if "lora" not in name]
    assert whole == "base_model.model.model.embed_tokens.weight"
    with torch.no_grad():
        ours.parameters[whole].add_(0.1 * torch.randn(300, 32, generator=torch.Generator().manual_seed(1)))
    (tmp_path / model.ADAPTER_FILE).write_bytes(
        model.save_tensors({name: value.detach().clone() for name, value in ours.saved.items()})
    )
    (tmp_path / model.ADAPTER_CONFIG_FILE).write_bytes(ours.adapter_config_json())
    tokens_BT = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(1))
    ours.peft_model.eval()
    stock = PeftModel.from_pretrained(model.load_base(tied_model), tmp_path).eval()
    with torch.inference_mode():
        ours_BTV = ours.logits(ours.hidden(tokens_BT, torch.ones_like(tokens_BT)))
        torch.testing.assert_close(ours_BTV, stock(tokens_BT).logits, rtol=1e-5, atol=1e-5)


def test_a_module_to_save_that_is_not_there_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.modules_to_save names nonesuch"):
        attach(tiny_model, LoraConfig(modules_to_save=("nonesuch",)))


def test_b48_gradients_with_recomputed_activations_are_the_same(tiny_model: Path) -> None:
    """The naive way, re-entrant and behind a frozen embedding, leaves every layer without a gradient."""
    import torch
    from torch.utils.checkpoint import checkpoint

    tokens_BT = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(1))

    def gradients(prepare: Callable[[Any], None]) -> dict[str, Any]:
        ours = attach(tiny_model, LoraConfig(rank=4, dropout=0.1))
        for name, parameter in ours.parameters.items():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(2))
        prepare(ours)
        ours.peft_model.train()
        torch.manual_seed(3)
        loss = ours.hidden(tokens_BT, torch.ones_like(tokens_BT)).square().sum()
        if loss.requires_grad:
            loss.backward()
        return {name: parameter.grad for name, parameter in ours.parameters.items()}

    def naive(ours: Any) -> None:
        reentrant = functools.partial(checkpoint, use_reentrant=True)
        ours.peft_model.get_base_model()._set_gradient_checkpointing(True, reentrant)

    plain = gradients(lambda ours: None)
    again = gradients(lambda ours: ours.recompute_activations())
    assert all(torch.equal(again[name], gradient) and bool(gradient.any()) for name, gradient in plain.items())
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert all(gradient is None for gradient in gradients(naive).values())


def test_b33_modules_trained_in_full_are_part_of_what_is_saved(zygote: Zygote, make_config: MakeConfig) -> None:
    """Embedding and head of F1, which are two tensors: both trained, both in the file, both loaded by stock PEFT."""
    import torch
    from peft import PeftModel

    from hotlap.train import model

    config = make_config(train__max_steps=10, lora__modules_to_save=["embed_tokens", "lm_head"])
    assert zygote.run(config).status == 0
    adapter = RunFolder(config.run_folder).adapter
    tensors = model.load_tensors(adapter / model.ADAPTER_FILE)
    base: Any = model.load_base(Path(config.base_model))
    before = base.state_dict()
    names = {"model.embed_tokens.weight", "lm_head.weight"}
    pairs_only = {name for name in tensors if "lora_" in name}
    assert len(pairs_only) == 28 and {name.removeprefix("base_model.model.") for name in tensors} - names == {
        name.removeprefix("base_model.model.") for name in pairs_only
    }
    trained = {name: tensors[f"base_model.model.{name}"].clone() for name in names}
    assert not any(torch.equal(trained[name], before[name]) for name in names)
    loaded = PeftModel.from_pretrained(base, adapter)
    assert torch.equal(loaded.get_input_embeddings().weight, trained["model.embed_tokens.weight"])
    assert torch.equal(loaded.get_output_embeddings().weight, trained["lm_head.weight"])


# --- added tokens ---


@pytest.fixture(scope="module")
def added_tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """F1 untied and tied: 300 rows, and a tokenizer of 304 tokens."""
    folders = {tied: make_tiny_model(tmp_path_factory.mktemp("added"), tied=tied) for tied in (False, True)}
    for folder in folders.values():
        write_byte_tokenizer(folder, num_entries=304)
    return folders


@pytest.mark.parametrize("tied", [False, True])
def test_b30_added_tokens_are_trained_and_reload_without_manual_steps(
    zygote: Zygote, added_tokens: dict[bool, Path], tmp_path: Path, tied: bool
) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    from hotlap.train import model
    from hotlap.train.generate import Order, answers

    folder = added_tokens[tied]
    rows = [{"prompt": f"q{i}<unused300>", "completion": f"<unused{300 + i % 4}>a"} for i in range(20)]
    data = write_jsonl(tmp_path / "new.jsonl", rows)
    config = tiny_config(folder, data, tmp_path / "runs", train__max_steps=6)
    cut = zygote.run(config, "patches:as_told", TEST_STOP_AT="3")
    assert cut.status == 75, cut.talk()
    process = zygote.run(config)
    assert process.status == 0, process.talk()
    assert "4 tokens more than the model has embedding rows" in process.talk()
    whole = tiny_config(folder, data, tmp_path / "runs", train__max_steps=6, run="whole")
    assert zygote.run(whole).status == 0
    adapter, other = (RunFolder(each.run_folder).adapter for each in (config, whole))
    tensors = model.load_tensors(adapter / model.ADAPTER_FILE)
    assert (adapter / model.ADAPTER_FILE).read_bytes() == (other / model.ADAPTER_FILE).read_bytes()
    trained = {name.split(".")[-3]: value for name, value in tensors.items() if "trainable_tokens" in name}
    assert {name: tuple(value.shape) for name, value in trained.items()} == dict.fromkeys(
        ("embed_tokens",) if tied else ("embed_tokens", "lm_head"), (4, 32)
    )

    with pytest.raises((RuntimeError, IndexError)):  # the naive way: onto the base as it is
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)(torch.tensor([[303]]))
    tokens_BT = torch.tensor([[113, 49, 300, 260, 303, 301, 302]])
    stock = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    base: Any = model.load_base(folder, num_tokens=304)
    ours = model.attach_lora(base, config.lora, 7, "base", new_rows=[300, 301, 302, 303])
    model.load_parameters(ours.parameters, tensors, adapter)
    ours.peft_model.eval()
    with torch.inference_mode():
        ours_BTV = ours.logits(ours.hidden(tokens_BT, torch.ones_like(tokens_BT)))
        torch.testing.assert_close(stock(tokens_BT).logits, ours_BTV, rtol=1e-5, atol=1e-5)
    (answer,) = answers(Order(folder, adapter, ["q1<unused300>"], 4))
    assert answer["num_tokens"] >= 1


def test_b30_a_model_with_more_rows_than_tokens_is_never_shrunk(tiny_model: Path) -> None:
    from hotlap.train import base

    model: Any = base.load_base(tiny_model, num_tokens=NUM_ENTRIES)
    assert model.get_input_embeddings().weight.shape[0] == model.get_output_embeddings().weight.shape[0] == 300


def test_b30_another_size_is_refused_with_both_sizes(tiny_model: Path, tmp_path: Path) -> None:
    import torch

    from hotlap.train import model

    ours = attach(tiny_model, LoraConfig(rank=4, modules_to_save=("embed_tokens",)))
    tensors = {name: value.detach() for name, value in ours.parameters.items()}
    tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(304, 32)
    with pytest.raises(AuditFailed, match=r"has shape \(304, 32\), not \(300, 32\)"):
        model.load_parameters(ours.parameters, tensors, tmp_path)


# --- warm start ---


def test_a_warm_start_begins_with_the_values_and_a_fresh_optimizer(
    zygote: Zygote, make_config: MakeConfig, tmp_path: Path
) -> None:
    from hotlap import durable, runs

    first = make_config(run="first", train__max_steps=5)
    assert zygote.run(first).status == 0
    start = first.run_folder / "adapter"
    warm = make_config(run="warm", train__max_steps=4, lora__init_from=str(start), seed=9)
    process = zygote.run(warm, "patches:as_told", TEST_STOP_AT="2")
    assert process.status == 75, process.talk()
    assert f"Warm start: the adapter begins with the values of {start}" in process.talk()
    assert zygote.run(warm).status == 0
    whole = make_config(run="whole", train__max_steps=4, lora__init_from=str(start), seed=9)
    assert zygote.run(whole).status == 0
    cold = make_config(run="cold", train__max_steps=4, seed=9)
    assert zygote.run(cold).status == 0
    rows = {each.run: durable.read_rows(RunFolder(each.run_folder).metrics) for each in (warm, whole, cold)}
    assert rows["warm"] == rows["whole"]
    assert [row["step"] for row in rows["warm"]] == [1, 2, 3, 4]
    assert rows["warm"][0]["loss"] < rows["cold"][0]["loss"] - 0.05
    identity = runs.read_identity(RunFolder(warm.run_folder))
    assert identity is not None
    file = "adapter_model.safetensors"
    assert identity.init_pins[file]["sha256"] == durable.sha256_file(start / file)


def test_a_warm_start_from_something_else_is_refused(zygote: Zygote, make_config: MakeConfig, tmp_path: Path) -> None:
    first = make_config(run="first", train__max_steps=2)
    assert zygote.run(first).status == 0
    start = first.run_folder / "adapter"
    other = zygote.run(make_config(run="other", train__max_steps=2, lora={"rank": 8, "init_from": str(start)}))
    assert other.status == 2
    assert "lora.init_from" in other.result()["message"] and "(4, " in other.result()["message"]
    for name, lora in (("alpha", {"rank": 4, "alpha": 16.0}), ("rslora", {"rank": 4, "alpha": 8.0, "rslora": True})):
        scaled = zygote.run(make_config(run=name, train__max_steps=2, lora={**lora, "init_from": str(start)}))
        assert (scaled.status, scaled.result()["reason"]) == (2, "config"), scaled.talk()
        assert "was trained at a scale of 2, and lora.alpha and lora.rslora of this run make 4" in scaled.talk()
    half = tmp_path / "half"
    half.mkdir()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        data = (start / file).read_bytes()
        (half / file).write_bytes(data[: len(data) // 2])
    broken = zygote.run(make_config(run="broken", train__max_steps=2, lora__init_from=str(half)))
    assert (broken.status, broken.result()["reason"]) == (2, "config"), broken.talk()
    absent = zygote.run(make_config(run="absent", lora__init_from=str(tmp_path / "nothing")))
    assert (absent.status, absent.result()["reason"]) == (2, "missing")

    warm = make_config(run="warm", train__max_steps=4, lora__init_from=str(start))
    assert zygote.run(warm, "patches:as_told", TEST_STOP_AT="2").status == 75
    changed = start / "adapter_model.safetensors"
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    refused = zygote.run(warm)
    assert (refused.status, refused.result()["reason"]) == (3, "changed")
    assert "lora.init_from: adapter_model.safetensors has other content" in refused.result()["message"]
