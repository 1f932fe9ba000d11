"""A tiny random model of every family, as an ordinary model folder with F2's byte tokenizer and F4's template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fixtures_data import write_byte_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
WINDOW = 6
SLIDING = ["sliding_attention", "full_attention"]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=2, tie_word_embeddings=True))


def qwen2() -> Any:
    """Qwen 2 and 2.5: biases on queries, keys and values; here with a window, as their configuration allows."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    windowed = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": SLIDING}
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_hidden_layers=2, **windowed))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=2, head_dim=16))


def mistral() -> Any:
    """No family of ours; every layer of it slides and none says so."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SHAPE, num_hidden_layers=2, sliding_window=WINDOW))


def gemma3() -> Any:
    """With a soft cap on the head, which the released ones do without."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    windowed = {"sliding_window": WINDOW, "layer_types": SLIDING, "final_logit_softcapping": 2.0}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, num_hidden_layers=2, head_dim=16, **windowed))


def gemma4_text_config() -> Any:
    """Per-layer embeddings, keys that are values too, two layers that share them, a soft cap."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **SHAPE,
        num_hidden_layers=4,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        layer_types=[*SLIDING, *SLIDING],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=64,
        vocab_size_per_layer_input=300,
        final_logit_softcapping=30.0,
    )


def gemma4() -> Any:
    """The multimodal checkpoint, with a vision and an audio tower."""
    from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4ForConditionalGeneration, Gemma4VisionConfig

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = Gemma4VisionConfig(
        **small, intermediate_size=64, num_key_value_heads=2, head_dim=16, position_embedding_size=16, patch_size=4
    )
    audio = Gemma4AudioConfig(**small, subsampling_conv_channels=[8, 4], output_proj_dims=48)
    tokens = {"image_token_id": 290, "video_token_id": 291, "audio_token_id": 292}
    config = Gemma4Config(text_config=gemma4_text_config(), vision_config=vision, audio_config=audio, **tokens)
    return Gemma4ForConditionalGeneration(config)


def gemma2() -> Any:
    """Bends its attention scores, for which transformers attends without torch's kernels."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    windowed = {"sliding_window": WINDOW, "layer_types": SLIDING, "attn_logit_softcapping": 2.0}
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, num_hidden_layers=2, head_dim=16, **windowed))


def gpt_oss() -> Any:
    """Experts, and attention with sinks, likewise without torch's kernels."""
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    windowed = {"sliding_window": WINDOW, "layer_types": SLIDING}
    return GptOssForCausalLM(GptOssConfig(**SHAPE, num_hidden_layers=2, head_dim=16, **experts, **windowed))


def granite() -> Any:
    """Divides its logits, and scales embeddings, scores and residuals."""
    from transformers import GraniteConfig, GraniteForCausalLM

    scales = {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
    }
    return GraniteForCausalLM(GraniteConfig(**SHAPE, num_hidden_layers=2, tie_word_embeddings=True, **scales))


def cohere() -> Any:
    """Multiplies its logits."""
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(**SHAPE, num_hidden_layers=2, logit_scale=0.25))


def bloom() -> Any:
    """Takes no mask that is ready."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4))


def rwkv() -> Any:
    """Has no attention: every token is made of all before it."""
    from transformers import RwkvConfig, RwkvForCausalLM

    return RwkvForCausalLM(RwkvConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2))


def gpt2() -> Any:
    """Calls its layers otherwise, and has weights the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 257, "eos_token_id": 258}
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=128, **ends))


def phimoe() -> Any:
    """Its routers are linear modules that return more than one tensor, which PEFT cannot wrap."""
    from transformers import PhimoeConfig, PhimoeForCausalLM

    return PhimoeForCausalLM(PhimoeConfig(**SHAPE, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "mistral": mistral,
}
PLAINLY_ATTENDING: dict[str, Callable[[], Any]] = {"gemma2": gemma2, "gpt_oss": gpt_oss}
SCALING_LOGITS: dict[str, Callable[[], Any]] = {"granite": granite, "cohere": cohere}
OTHERS: dict[str, Callable[[], Any]] = {
    **PLAINLY_ATTENDING,
    **SCALING_LOGITS,
    "bloom": bloom,
    "gpt2": gpt2,
    "phimoe": phimoe,
    "rwkv": rwkv,
}


def make_family(folder: Path, family: str) -> Path:
    return write_byte_tokenizer(save_random(folder, (FAMILIES | OTHERS)[family]))


def save_random(folder: Path, make: Callable[[], Any]) -> Path:
    """Random weights from seed 0, float32. Norms are not all ones, so that forgetting one is seen."""
    import torch

    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder
