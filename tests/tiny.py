"""F1, the tiny Llama of the bug reports, as an ordinary model folder; and a run of it."""

from pathlib import Path
from typing import Any

from fixtures_data import write_byte_tokenizer

from hotlap.config import RunConfig


def make_tiny_model(folder: Path, *, tied: bool = False, hidden: int = 32) -> Path:
    """2 layers, hidden 32, feed-forward twice that, 4 heads, 300 vocabulary rows, 128 positions, float32, seed 0, with
    F2's byte tokenizer and F4's template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def tiny_config(model: Path, data: Path, output_dir: Path, **changes: object) -> RunConfig:
    """A run of seconds: rank 4, 30 steps of 2 rows. `changes` are `section__key=value`."""
    tree: dict[str, Any] = {
        "base_model": str(model),
        "dataset": str(data),
        "output_dir": str(output_dir),
        "run": "tiny",
        "seed": 7,
        "data": {"seq_len": 64},
        "model": {"precision": "float32"},
        "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
        "optim": {"lr": 1e-2, "warmup_steps": 5},
        "train": {"max_steps": 30, "micro_batch_rows": 1, "grad_accumulation": 2},
        "slice": {"num_threads": 1},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            tree[section] = {**tree.get(section, {}), key: value}
        else:
            tree[section] = value
    return RunConfig.model_validate(tree)
