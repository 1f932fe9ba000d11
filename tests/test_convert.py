"""GGUF to a model folder: tiny files written here, damaged ones, killed conversions, and the real SmolLM2."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures_data import byte_characters

from hotlap import artifacts, durable
from hotlap.errors import ChildCrashed, CorruptFile, DiskFull, MissingArtifact
from hotlap.train import convert

pytestmark = pytest.mark.torch

HIDDEN, FEED_FORWARD, NUM_HEADS, NUM_LAYERS = 64, 96, 2, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path, architecture: str = "llama", without: str = "", num_extra_tokens: int = 0) -> dict[str, Any]:
    """A Llama of two layers with a byte-level vocabulary and its digits apart; the weights as they were written."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), architecture)
    tokens = SPECIALS + list(byte_characters().values()) + ["ĠĠ"] + [f"x{i}" for i in range(num_extra_tokens)]
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    weights = random_weights(len(tokens) - num_extra_tokens)
    for name, weight in weights.items():
        if name == without:
            continue
        if name.endswith("ffn_up.weight"):
            quantized = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            weights[name] = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def random_weights(num_tokens: int) -> dict[str, Any]:
    import numpy as np

    shapes = {"token_embd.weight": (num_tokens, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        shapes |= {
            **{
                f"blk.{layer}.{name}.weight": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")
            },
            **{f"blk.{layer}.{name}.weight": (FEED_FORWARD, HIDDEN) for name in ("ffn_gate", "ffn_up")},
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
            **{f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")},
        }
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape, dtype=np.float32) * 0.1 for name, shape in shapes.items()}


def hidden_files(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "artifacts").glob(".*") if not path.name.endswith(".lock"))


# --- a whole conversion, in its own process ---


@pytest.fixture(scope="module")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("gguf") / "Tiny_Model.Q8.gguf"
    return path, write_gguf(path)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def converted(tiny_home: Path, gguf_file: tuple[Path, dict[str, Any]], said: list[str]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLAP_HOME", str(tiny_home))
        return artifacts.fetch(str(gguf_file[0]), said.append)


@pytest.fixture
def same_home(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTLAP_HOME", str(tiny_home))
    return tiny_home


def test_the_folder_loads_and_holds_the_files_weights(converted: Path, gguf_file: tuple[Path, dict[str, Any]]):
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    state, weights = model.state_dict(), gguf_file[1]
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        assert torch.equal(state[ours], torch.from_numpy(weights[theirs])), ours
    # GGUF keeps each head's rotary halves interleaved, transformers one after the other.
    rows = torch.from_numpy(weights["blk.0.attn_q.weight"]).view(NUM_HEADS, HIDDEN // NUM_HEADS // 2, 2, HIDDEN)
    expected = rows.transpose(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], expected)


def test_the_files_say_nothing_of_gguf_and_tied_weights_are_written_once(converted: Path):
    from safetensors import safe_open

    config = json.loads((converted / "config.json").read_text())
    assert config["dtype"] == "float32" and config["architectures"] == ["LlamaForCausalLM"]
    assert (converted / "model.safetensors").stat().st_mode == (converted / "config.json").stat().st_mode
    assert "quantization_config" not in config and "_model_name_or_path" not in config
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == 2
    with safe_open(converted / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - this is no mapping


def test_the_tokenizer_comes_back_with_its_template_and_splits_digits(converted: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.chat_template == TEMPLATE and tokenizer.model_max_length == 64
    assert tokenizer.tokenize("<|im_start|>a  12") == ["<|im_start|>", "a", "ĠĠ", "1", "2"]
    text = "Čau,  světe!\n\t你好 🙂 2024 "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_artifact_is_found_by_the_files_content(
    converted: Path,
    same_home: Path,
    gguf_file: tuple[Path, dict[str, Any]],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    path = gguf_file[0]
    assert converted.name.startswith("tiny-model-q8-") and hidden_files(same_home) == []
    assert said[0].startswith("Converting") and "dequantizing the weights" in said
    assert durable.verify(converted)["source_sha256"] == durable.sha256_file(path)
    os.utime(path)
    assert artifacts.locate_model(str(path)) == converted
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sha256_file", lambda _path: pytest.fail("hashed although its stamp is known"))
        stamp = durable.read_manifest(converted)["facts"]["source_stamp"]
        patch.setattr(artifacts, "stamp_of", lambda _path: tuple(stamp))
        assert artifacts.locate_model(str(path)) == converted
    with path.open("ab") as file:
        file.write(b"edited")
    with pytest.raises(MissingArtifact, match="hotlap prefetch"):
        artifacts.locate_model(str(path))


# --- killed ---


def test_a_killed_conversion_leaves_nothing(tmp_path: Path, home: Path):
    write_gguf(tmp_path / "a.gguf")

    def say(text: str) -> None:
        if text.startswith("reading"):
            tasks = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(tasks[-1]), signal.SIGKILL)

    with pytest.raises(ChildCrashed, match=r"conversion of a.gguf was ended by SIGKILL.*run the same command again"):
        artifacts.fetch(str(tmp_path / "a.gguf"), say)
    assert [path for path in (home / "artifacts").iterdir() if not path.name.endswith(".lock")] == []
    with pytest.raises(MissingArtifact):
        artifacts.locate_model(str(tmp_path / "a.gguf"))


FETCHER = """
import sys
from hotlap import artifacts
artifacts.fetch(sys.argv[1], lambda text: print(text, flush=True))
"""


def test_what_a_killed_fetch_leaves_is_not_used_and_goes_with_the_next_one(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "a.gguf")
    with subprocess.Popen(
        [sys.executable, "-c", FETCHER, tmp_path / "a.gguf"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as fetcher:
        assert fetcher.stdout
        for line in fetcher.stdout:
            if line.startswith("reading"):
                break
        os.killpg(fetcher.pid, signal.SIGKILL)
    assert len(hidden_files(home)) == 1
    with pytest.raises(MissingArtifact):
        artifacts.locate_model(str(tmp_path / "a.gguf"))
    monkeypatch.setattr(durable, "free_bytes", lambda _folder: 0)
    with pytest.raises(DiskFull):
        artifacts.fetch("smollm2-135m", lambda _text: None)
    assert hidden_files(home) == []


# --- what cannot be converted ---


def test_what_the_child_says_is_what_the_parent_raises(tmp_path: Path, home: Path):
    (tmp_path / "a.gguf").write_bytes(b"this is no model")
    with pytest.raises(CorruptFile, match=r"a\.gguf cannot be read as a GGUF model \(ValueError: GGUF magic invalid\)"):
        artifacts.fetch(str(tmp_path / "a.gguf"), lambda _text: None)
    assert hidden_files(home) == []


# The rest in this process, for speed.


@pytest.fixture
def library() -> Iterator[None]:
    """A conversion changes two libraries for its whole process; put them back."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, getattr(gguf, name))
        patch.setenv("TQDM_DISABLE", "1")
        yield
    gc.enable()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        ("torn", CorruptFile, "cannot be read as a GGUF model"),
        ("no_tensor", CorruptFile, "no weights for model.layers.1.self_attn.v_proj.weight"),
        ("unknown", MissingArtifact, "architecture starcoder99 is not supported.*safetensors folder"),
        ("tokens", CorruptFile, "cannot be read as a GGUF model"),
        ("absent", MissingArtifact, "does not exist"),
    ],
)
def test_what_cannot_be_converted_is_one_clear_line(tmp_path: Path, spoil: str, kind: type[Exception], words: str):
    path = tmp_path / "a.gguf"
    if spoil == "torn":
        write_gguf(path)
        path.write_bytes(path.read_bytes()[:-5000])
    elif spoil == "no_tensor":
        write_gguf(path, without="blk.1.attn_v.weight")
    elif spoil == "unknown":
        write_gguf(path, architecture="starcoder99")
    elif spoil == "tokens":
        write_gguf(path, num_extra_tokens=5)
    with pytest.raises(kind, match=words) as failure:
        convert.convert(path, tmp_path / "out")
    assert "\n" not in str(failure.value)


def test_what_transformers_leaves_in_the_file_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scaled positions and the largest Gemma 3's attention scale, and heads of another width than Qwen 3's."""
    import gguf
    from transformers import AutoConfig

    monkeypatch.setattr(gguf, "GGUFReader", gguf.gguf_reader.GGUFReader)  # a conversion in this process changes it

    def completed(architecture: str, num_layers: int) -> Any:
        path = tmp_path / f"{architecture}-{num_layers}.gguf"
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.add_block_count(num_layers)
        writer.add_embedding_length(640)
        writer.add_head_count(4)
        writer.add_key_length(64)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_token_list(["a"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
        convert._complete(config, gguf.GGUFReader(path))
        return config

    gemma3 = completed("gemma3", 34)
    assert gemma3.query_pre_attn_scalar == gemma3.head_dim == 64
    assert gemma3.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    assert completed("gemma3", 62).query_pre_attn_scalar == 160
    assert completed("qwen3", 2).head_dim == 64


@pytest.mark.usefixtures("library")
def test_a_full_disk_is_told_from_other_errors_of_the_writing_libraries(tmp_path: Path):
    write_gguf(tmp_path / "a.gguf")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DiskFull, match="run the same command again"):
            convert.convert(tmp_path / "a.gguf", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- the real one ---


@pytest.mark.real
def test_smollm2_answers_in_its_own_words(smollm2: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    text = "In  2024, čau 你好 🙂\n\n    return 12 "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real
def test_smollm2_is_pinned_file_by_file(smollm2: Path):
    facts = durable.read_manifest(smollm2)["facts"]
    assert facts["source_sha256"].startswith("b179c9523d0e")
    pins = artifacts.pin(smollm2)
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(pins)
    assert artifacts.changed(smollm2, pins) == []
