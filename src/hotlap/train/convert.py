"""GGUF to an ordinary model folder, as a child process: `python -m hotlap.train.convert SOURCE.gguf TARGET_DIR`.

Weights are written dequantized, in float32. The folder is not published: whoever started this process checks, syncs
and publishes it, and throws it away if the process did not end with 0. Progress goes to standard error, a line each;
an error of ours is the last line, as JSON on standard output.
"""

import functools
import gc
import json
import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import CorruptFile, HotlapError, MissingArtifact, storage_errors
from hotlap.sources import PROGRESS

# These vocabularies learned their merges with every digit alone. transformers splits them like GPT-2's, which differs
# where several spaces stand before a digit.
_DIGIT_BY_DIGIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_TOKENIZER_BYTES = 64_000_000
# Without digits, for which the written tokenizer may differ on purpose.
_PROBE = "It's  good!\n\n   Café\ttables: čau 你好 🙂 "


def main() -> int:
    os.environ["TQDM_DISABLE"] = "1"
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except HotlapError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        return error.exit_code
    return 0


def convert(source: Path, target: Path) -> None:
    """Write the model in `source` as a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Raises:
        MissingArtifact: there is no such file, its architecture is not known here, or a library is not installed.
        CorruptFile: the file is damaged, or its tokenizer would not come back as it was.
        StorageFailed: it cannot be written.
    """
    if not source.is_file():
        raise MissingArtifact(f"{source} does not exist. Check the path.")
    durable.make_dirs(target)
    try:
        model, tokenizer, splitting = read(source)
    except ImportError as error:
        raise MissingArtifact(
            f"Converting {source} needs a library: {error}. Run: pip install 'hotlap[train]'"
        ) from error
    except Exception as error:  # the libraries fail in any way on a damaged file
        raise _unreadable(source, error) from error
    _write(model, tokenizer, target, is_digit_by_digit=splitting in _DIGIT_BY_DIGIT)
    _check_tokenizer(tokenizer, model, target)


def read(source: Path) -> tuple[Any, Any, str]:
    """The model, the tokenizer, and the name of the rule by which the tokenizer splits text."""
    _tell(f"reading {source.name}")
    # Millions of small objects are made here and none is garbage; looking for it takes a third of the time.
    gc.disable()
    file = _read_once(source)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, options = str(source.parent), {"gguf_file": source.name}
    config = AutoConfig.from_pretrained(folder, **options)
    _complete(config, file)
    _tell("dequantizing the weights")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True, **options
    )
    model, report = loaded
    if lacking := sorted(report["missing_keys"]):
        raise ValueError(f"it has no weights for {lacking[0]}, and {len(lacking)} are missing in all")
    _tell("rebuilding the tokenizer")
    return model, AutoTokenizer.from_pretrained(folder, **options), str(_field(file, "tokenizer.ggml.pre") or "")


def _read_once(source: Path) -> Any:
    """Let transformers have one parsed copy of the file and of gguf's tables instead of a fresh one for each look,
    which takes most of the time. Returns that copy."""
    import gguf
    import numpy as np

    class Reader(gguf.gguf_reader.GGUFReader):
        """Holds the file as a plain array: slicing a `memmap` takes twice as long, and there are a million slices."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = mapped.view(np.ndarray)

    reader = Reader(source)
    gguf.GGUFReader = lambda *_args, **_options: reader
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    return reader


def _field(file: Any, name: str) -> Any:
    field = file.get_field(name)
    return field.contents() if field else None


def _complete(config: Any, file: Any) -> None:
    """What the file says of the model and transformers does not take from it, as llama.cpp has it."""
    if config.model_type == "qwen3":
        config.head_dim = _field(file, "qwen3.attention.key_length") or config.head_dim
    if config.model_type == "gemma3_text":
        config.query_pre_attn_scalar = gemma3_scalar(config.to_dict())
        if _field(file, "gemma3.rope.scaling.type") == "linear":
            scaling = {"rope_type": "linear", "factor": _field(file, "gemma3.rope.scaling.factor")}
            config.rope_parameters["full_attention"] |= scaling


def gemma3_scalar(config: dict[str, Any]) -> int:
    """By whose root llama.cpp divides a Gemma 3's attention scores. No key says it; the largest, which it knows by its
    layers, is an exception."""
    is_27b = config["num_hidden_layers"] == 62
    return config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]


def _unreadable(source: Path, error: Exception) -> HotlapError:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "not supported" in why:
        return MissingArtifact(f"{source} cannot be converted: {why} Name a safetensors folder of that model.")
    return CorruptFile(
        f"{source} cannot be read as a GGUF model ({type(error).__name__}: {why}). "
        f"Fetch or copy it again, or name a safetensors folder of that model."
    )


def _write(model: Any, tokenizer: Any, target: Path, is_digit_by_digit: bool) -> None:
    needs_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    durable.require_free(target, needs_bytes + _TOKENIZER_BYTES)
    _tell(f"writing {needs_bytes / 1e6:,.0f} MB")
    # The weights are plain by now, but transformers refuses to save a model that it read from GGUF.
    model.hf_quantizer = None
    del model.config.quantization_config
    vars(model.config).pop("_model_name_or_path", None)
    tokenizer.model_max_length = model.config.max_position_embeddings
    for how_it_was_read in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(how_it_was_read, None)
    with storage_errors(target), _errors_from_rust():
        tokenizer.save_pretrained(target)
        if is_digit_by_digit:
            _split_digits(target / "tokenizer.json")
        model.save_pretrained(target)
        # safetensors lets only the owner read what it writes; a shared home has readers.
        for weights in target.glob("*.safetensors"):
            weights.chmod((target / "config.json").stat().st_mode)


@contextmanager
def _errors_from_rust() -> Generator[None]:
    """What safetensors and tokenizers say of a full disk, as the error of the operating system it was."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if number := re.search(r"(?:os error|code:) (\d+)", str(error)):
            raise OSError(int(number[1]), str(error)) from error
        raise


def _split_digits(path: Path) -> None:
    tokenizer = json.loads(path.read_bytes())
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    durable.replace(path, json.dumps(tokenizer, ensure_ascii=False, indent=2).encode())


def _check_tokenizer(tokenizer: Any, model: Any, target: Path) -> None:
    """
    Raises:
        CorruptFile: the folder's tokenizer is not the file's, or has tokens that the model does not know.
    """
    from transformers import AutoTokenizer

    written = AutoTokenizer.from_pretrained(str(target))
    num_embeddings = model.get_input_embeddings().num_embeddings
    if written(_PROBE)["input_ids"] != tokenizer(_PROBE)["input_ids"] or len(written) > num_embeddings:
        raise CorruptFile(
            f"The tokenizer in this GGUF file cannot be kept: it has {len(tokenizer)} tokens, {len(written)} when read "
            f"back, for {num_embeddings} embeddings. Name a safetensors folder of that model."
        )


def _tell(progress: str) -> None:
    print(f"{PROGRESS}{progress}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
