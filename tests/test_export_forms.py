"""From a run to what servers read: the chain on a tiny Gemma 4, FP8 where its tool is, GGUF loaded back."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import SHAPE, SLIDING, WINDOW, make_family, save_random
from fixtures_data import F4, f3_rows, write_jsonl
from tiny import tiny_config
from zygote import Zygote

from hotlap import durable, errors
from hotlap.config import RunConfig
from hotlap.export import folders, quantize, tensors, tools

pytestmark = pytest.mark.torch


def hotlap(*args: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hotlap", *args],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("gemma4"), "gemma4")


def test_train_merge_and_reload_a_tiny_gemma_4(zygote: Zygote, gemma: Path, tmp_path: Path) -> None:
    """The road as commands: a trained run, merged once and then found; the folder is a base model like any other."""
    data = write_jsonl(tmp_path / "data.jsonl", f3_rows())
    config: RunConfig = tiny_config(gemma, data, tmp_path / "runs", train__max_steps=6, optim__lr=3e-2)
    process = zygote.run(config)
    assert process.status == 0, process.talk()
    done = hotlap("export", "merge", "tiny", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    merged = tmp_path / report["folder"]
    assert report["error_to_exact_merge"] < 1e-6 < 1e-3 < report["adapter_effect"]
    assert durable.verify(merged)["step"] == 6 and report["num_adapter_tensors"] == 2 * report["kinds"]["lora"]
    towers = [name for name in tensors.all_entries(gemma) if "vision" in name or "audio" in name]
    before, after = tensors.all_entries(gemma), tensors.all_entries(merged)
    assert towers and all(list(before[name].pieces()) == list(after[name].pieces()) for name in towers)
    again = hotlap("export", "merge", "tiny", cwd=tmp_path)
    assert "is here and verified" in again.stderr and again.stdout.strip() == report["folder"]
    reloaded = tiny_config(merged, data, tmp_path / "more", train__max_steps=1)
    process = zygote.run(reloaded)
    assert process.status == 0, process.talk()


# --- FP8 ---


def test_only_products_of_the_text_decoder_are_quantized(gemma: Path) -> None:
    chosen, ignored = quantize.divided(gemma)
    assert all("language_model.layers" in name and name.endswith("_proj") for name in chosen)
    assert "lm_head" in ignored and not set(chosen) & set(ignored)
    assert any("vision" in name for name in ignored) and any("audio" in name for name in ignored)
    assert any("embed_tokens" in name for name in ignored)


@pytest.mark.long
def test_fp8_of_a_tiny_gemma_4_reloads(
    gemma: Path, tmp_path: Path, real_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real llm-compressor, where `hotlap prefetch --tool fp8` has brought it."""
    monkeypatch.setenv("HOTLAP_HOME", str(real_home))
    try:
        python = tools.locate("fp8")
    except errors.MissingArtifact as error:
        pytest.skip(str(error))
    found = quantize.quantized(python, gemma, tmp_path / "fp8", {}, lambda line: None)
    chosen, _ = quantize.divided(gemma)
    entries = tensors.all_entries(tmp_path / "fp8")
    assert {name for name, entry in entries.items() if entry.dtype == "F8_E4M3"} == {
        f"{each}.weight" for each in chosen
    }
    assert 0.01 < found["layer_error_mean"] <= found["layer_error_largest"] < 0.05
    assert abs(found["val_loss_fp8"] - found["val_loss_before"]) < 1.0
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and "lm_head" in config["ignore"]


def test_a_tool_that_is_not_here_names_the_command_that_brings_it(home: Path) -> None:
    with pytest.raises(errors.MissingArtifact, match="hotlap prefetch --tool fp8"):
        tools.locate("fp8")
    with pytest.raises(errors.UsageError, match="Tools: fp8"):
        tools.install("nonesuch", lambda line: None)


# --- GGUF ---


@pytest.fixture
def splitting() -> Callable[[Path], Path]:
    """A family's folder with a vocabulary that has a merge and splits text as GPT-2 does, and no window."""

    def change(folder: Path) -> Path:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        tokenizer["pre_tokenizer"]["use_regex"] = True
        tokenizer["model"]["vocab"]["ĠĠ"] = 263
        tokenizer["model"]["merges"] = [["Ġ", "Ġ"]]
        path.write_text(json.dumps(tokenizer))
        config = json.loads((folder / "config.json").read_text())
        plain = {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}
        (folder / "config.json").write_text(json.dumps({**config, **plain}))
        return folder

    return change


@pytest.mark.parametrize(("family", "kind", "most"), [("llama", "f16", 0.005), ("qwen2", "q8_0", 0.05)])
def test_gguf_loads_back_as_the_same_model(
    family: str, kind: str, most: float, tmp_path: Path, splitting: Callable[[Path], Path]
) -> None:
    """Rotated pairs, biases, tied heads; every matrix in its type."""
    import gguf as format

    from hotlap.export import gguf

    source = splitting(make_family(tmp_path / family, family))
    target = tmp_path / "model.gguf"
    found = gguf.work({"source": str(source), "target": str(target), "type": kind}, lambda line: None)
    assert 0 < found["error_to_source"] < most
    types = {len(each.shape): set() for each in format.gguf_reader.GGUFReader(target).tensors}
    for each in format.gguf_reader.GGUFReader(target).tensors:
        types[len(each.shape)].add(each.tensor_type.name)
    assert types == {1: {"F32"}, 2: {kind.upper()}}


def test_gguf_finds_heads_in_another_order(tmp_path: Path, splitting: Callable[[Path], Path], monkeypatch: Any) -> None:
    """The naive way writes queries and keys as they lie in the model's files."""
    from hotlap.export import gguf

    source = splitting(make_family(tmp_path / "llama", "llama"))
    monkeypatch.setattr(gguf, "_interleaved", lambda values, num_heads: np.ascontiguousarray(values))
    with pytest.raises(errors.ProofFailed, match="another model"):
        gguf.work({"source": str(source), "target": str(tmp_path / "m.gguf"), "type": "f16"}, lambda line: None)


def released_gemma3() -> Any:
    """As Gemma 3 was released, but for its size: a window in five layers of six, and two bases of positions."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**SHAPE, **ids}, num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW
        )
    )


def write_gemma_tokenizer(folder: Path) -> Path:
    """Pieces, letters, and bytes for all else; spaces are characters."""
    from transformers import GemmaTokenizer

    texts = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["▁▁", "th", "the", "▁the", "▁", *"abcdefghijklmnopqrstuvwxyz.,?\n"]
    vocab = {text: number for number, text in enumerate(texts)}
    merges = [("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the")]
    GemmaTokenizer(vocab=vocab, merges=merges).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(F4)
    return folder


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_tokenizer(save_random(tmp_path_factory.mktemp("gemma3"), released_gemma3))


def test_gguf_of_a_gemma_3_loads_back_as_the_same_model(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms that lack one, pieces with scores, windows, two bases; and the scale that no key holds."""
    from transformers import AutoTokenizer

    from hotlap.export import gguf, vocabulary
    from hotlap.train import convert

    target = tmp_path / "model.gguf"
    found = gguf.work({"source": str(gemma3), "target": str(target), "type": "f16"}, lambda line: None)
    assert 0 < found["error_to_source"] < 0.005
    convert.convert(target, tmp_path / "folder")
    texts = ["the  three\n\n   Then, Čau 你好 🙂 12", " the▁▁the", "<bos>the<eos>"]
    assert vocabulary.first_difference(gemma3, AutoTokenizer.from_pretrained(tmp_path / "folder"), texts) is None
    monkeypatch.setattr(convert, "_complete", lambda config, file: None)  # the naive way
    with pytest.raises(errors.ProofFailed, match="another model"):
        gguf.check(gemma3, target, gguf.ALLOWED["f16"], lambda line: None)


def changed(source: Path, target: Path, **fields: Any) -> Path:
    """A model folder whose configuration says something else."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"layer_types": [*SLIDING] * 3 + ["sliding_attention"]}, r"full attention in layers \[1, 3, 5\].*takes \[5\]"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0.*takes none"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 64.*takes 16"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "positions of type linear.*takes default"),
        ({"rope_parameters": None, "rope_local_base_freq": 5000.0}, "rope_local_base_freq 5000.0.*takes 10000.0"),
    ],
)
def test_gguf_refuses_a_gemma_3_that_no_key_describes(
    fields: dict[str, Any], why: str, gemma3: Path, tmp_path: Path
) -> None:
    from hotlap.export import gguf

    with pytest.raises(errors.ConfigError, match=f"{why}.*convert_hf_to_gguf.py"):
        gguf.write(changed(gemma3, tmp_path / "other", **fields), tmp_path / "m.gguf", "f16")


def test_gguf_refuses_what_it_cannot_say(gemma: Path, gemma3: Path, tmp_path: Path) -> None:
    from hotlap.export import gguf

    with pytest.raises(errors.ConfigError, match=r"gemma4 model.*convert_hf_to_gguf.py"):
        gguf.write(gemma, tmp_path / "m.gguf", "f16")
    source = make_family(tmp_path / "mistral", "mistral")
    with pytest.raises(errors.ConfigError, match=f"a window of {WINDOW}.*takes none"):
        gguf.write(source, tmp_path / "m.gguf", "f16")
    # Who reads such a text cannot outgrow the window; but it is not split at all.
    with pytest.raises(errors.ConfigError, match="splits text by a rule"):
        gguf.write(changed(source, tmp_path / "wide", sliding_window=128), tmp_path / "m.gguf", "f16")
    tokenizer = json.loads((gemma3 / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].reverse()
    disordered = changed(gemma3, tmp_path / "disordered")
    (disordered / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(errors.ConfigError, match="merges in another order"):
        gguf.write(disordered, tmp_path / "m.gguf", "f16")
    tokenizer["normalizer"] = {"type": "Prepend", "prepend": "▁"}
    (disordered / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(errors.ConfigError, match="neither a byte-level BPE nor Gemma's"):
        gguf.write(disordered, tmp_path / "m.gguf", "f16")


@pytest.mark.long
def test_q4_k_m_by_the_user_s_llama_cpp(tmp_path: Path, splitting: Callable[[Path], Path]) -> None:
    program = shutil.which("llama-quantize")
    if program is None:
        pytest.skip("llama.cpp's llama-quantize is not on the PATH")
    from hotlap.export import gguf

    source = splitting(make_family(tmp_path / "qwen2", "qwen2"))
    gguf.write(source, tmp_path / "f16.gguf", "f16")
    subprocess.run([program, str(tmp_path / "f16.gguf"), str(tmp_path / "q4.gguf"), "Q4_K_M"], check=True)
    assert gguf.check(source, tmp_path / "q4.gguf", 1.0, lambda line: None)["error_to_source"] > 0


def test_q4_k_m_without_llama_cpp_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    nothing = folders.Tuned(tmp_path, "b", tmp_path, tmp_path, 1, {}, None, {})
    with pytest.raises(errors.MissingArtifact, match="no llama-quantize on the PATH"):
        quantize.gguf(nothing, "q4_k_m", None, lambda line: None)
