"""The frozen base model: loaded in the precision that was chosen, quantized if asked, grown for added tokens."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hotlap.config_model import FLOAT32, ModelConfig
from hotlap.errors import ConfigError, CorruptFile
from hotlap.train import direct, probe

_BLOCK = 64

# V rows of an embedding, D model width


def choose_precision(settings: ModelConfig, say: Callable[[str], None]) -> str:
    """The precision asked for, or what this machine computes well; said aloud in either case."""
    if settings.precision != "auto":
        say(f"Precision: {settings.precision}, as model.precision says.")
        return settings.precision
    device = probe.best_device()
    product = probe.measure(device)
    uses_bfloat16, verdict = probe.judge(product["float32_s"], product["bfloat16_s"])
    precision = "bfloat16" if uses_bfloat16 else "float32"
    say(f"Precision: {precision}, measured on this machine ({device.type}). {verdict}. model.precision sets another.")
    return precision


def load_base(
    folder: Path,
    settings: ModelConfig = FLOAT32,
    num_tokens: int = 0,
    say: Callable[[str], None] = lambda _text: None,
    is_direct: bool = True,
) -> torch.nn.Module:
    """The frozen base model on the best device, from an ordinary model folder, offline.

    `settings.precision` is one of the three, not `auto`. With more than the model's own `num_tokens`, its embeddings
    grow to so many rows (`grow`). With `is_direct` it is mapped from its files where that can be done (`direct`), and
    `say` is told where not.

    Raises:
        ConfigError: it is to be quantized, and cannot be here; or transformers knows no such language model.
        CorruptFile: its weights cannot be read, or are not all there.
    """
    try:
        if settings.quantization:
            model: Any = _load_quantized(folder, settings)
        else:
            model = _load_plain(folder, dtype_of(settings), say, is_direct)
    except SafetensorError as error:
        raise CorruptFile(f"Weights in {folder} cannot be read: {error}. Fetch or copy the model again.") from error
    except ValueError as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"transformers {importlib.metadata.version('transformers')} makes no language model of {folder}: {why} "
            f"Name another model, or install a version that knows it."
        ) from error
    grow(model, num_tokens)
    return model.requires_grad_(False)


def _load_plain(folder: Path, dtype: torch.dtype, say: Callable[[str], None], is_direct: bool) -> torch.nn.Module:
    device = probe.best_device()
    if is_direct:
        try:
            return direct.load(folder, dtype, device)
        except direct.NotDirect as reason:
            say(f"The base model is read by transformers' own loader, which takes longer: {reason}.")
    return _from_pretrained(folder, dtype=dtype).to(device)


def _load_quantized(folder: Path, settings: ModelConfig) -> torch.nn.Module:
    try:
        config = _quantization(folder, settings)
        model = _from_pretrained(folder, dtype=dtype_of(settings), quantization_config=config)
    except ImportError as error:
        raise ConfigError(
            f"model.quantization needs a library: {error}. Run: pip install 'hotlap[train]', or leave it out."
        ) from error
    _keep_as_quantized(model)
    _require_right_products(model)
    return model


def _from_pretrained(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # What the files lack would be drawn at random, and anew in every slice.
    given = {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True, **options}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **given)
    model, report = loaded
    lacking = sorted([*report["missing_keys"], *(str(key) for key, *_ in report["mismatched_keys"])])
    if lacking:
        raise CorruptFile(
            f"The weights in {folder} are not those of its config.json: {len(lacking)} tensors are not there in the "
            f"model's size, as {lacking[0]}. Fetch or copy the model again."
        )
    return model


def _keep_as_quantized(model: torch.nn.Module) -> None:
    """bitsandbytes repacks 4-bit weights at the first pass without gradients on a processor with bfloat16 units, and
    rounds their scales: an evaluation would change what is trained."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  (no attribute that torch knows)


def _require_right_products(model: torch.nn.Module) -> None:
    """
    Raises:
        ConfigError: bitsandbytes 0.50 takes the scales of other blocks on a processor when rows are no whole blocks.
    """
    quantized = {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    for name, module in quantized.items():
        num_inputs: Any = module.in_features
        if next(module.parameters()).device.type == "cpu" and num_inputs % _BLOCK:
            raise ConfigError(
                f"model.quantization = 'nf4' would compute {name} wrongly on this processor: it has {num_inputs:,} "
                f"inputs, no multiple of {_BLOCK}. Leave quantization out, or use a GPU."
            )


def dtype_of(settings: ModelConfig) -> torch.dtype:
    return getattr(torch, settings.precision)


def _quantization(folder: Path, settings: ModelConfig) -> Any:
    from transformers import BitsAndBytesConfig

    skipped = _outside_decoder(folder)
    if settings.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=settings.double_quantization,
        bnb_4bit_compute_dtype=dtype_of(settings),
        llm_int8_skip_modules=skipped,
    )


def _outside_decoder(folder: Path) -> list[str]:
    """Linear modules that stay as they are: the output head, and whatever is no part of the text decoder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    inside = set(decoder_linears(skeleton))
    return [name for name, module in skeleton.named_modules() if is_linear(module) and name not in inside]


def decoder_linears(model: Any) -> list[str]:
    """Full names of the linear modules of the text decoder, of a model that may have other towers beside it."""
    decoder = model.get_decoder()
    (prefix,) = [name for name, module in model.named_modules() if module is decoder]
    return [f"{prefix}.{name}" for name, module in decoder.named_modules() if is_linear(module)]


def is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def grow(model: Any, num_tokens: int) -> list[int]:
    """Give embeddings with fewer rows than `num_tokens` the missing ones, each the mean of those there are. Embeddings
    with more rows than the tokenizer has tokens stay as they are. Returns the new rows' numbers."""
    num_rows = model.get_input_embeddings().weight.shape[0]
    if num_tokens <= num_rows:
        return []
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        raise ConfigError(
            f"The tokenizer has {num_tokens:,} tokens and the model {num_rows:,} embedding rows, and "
            f"embeddings in every layer, which cannot be grown. Use the tokenizer that belongs to the model."
        )
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[num_rows:] = module.weight[:num_rows].float().mean(dim=0)
    return list(range(num_rows, num_tokens))
