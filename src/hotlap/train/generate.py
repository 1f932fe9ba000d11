"""Answers of a base model, with or without its adapter, greedily and one prompt after another.

`python -m hotlap.train.generate ORDER`, with the order as JSON: `model_folder`, `adapter` (a PEFT folder or null),
`prompts`, `max_new_tokens`, and perhaps `chat_template` (a file), `system` (a message before each prompt) and `model`
(a run's settings of `[model]`). One `answer` event per prompt, in their order, then the `result`.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import child
from hotlap.config_model import FLOAT32, ModelConfig
from hotlap.data.readers import Message
from hotlap.data.render import Renderer
from hotlap.errors import DONE, AuditFailed, BadData, HotlapError
from hotlap.train.channel import events, say
from hotlap.train.lean import lean_imports


@dataclass(frozen=True)
class Order:
    model_folder: Path
    adapter: Path | None
    prompts: list[str]
    max_new_tokens: int
    chat_template: Path | None = None
    system: str | None = None
    settings: ModelConfig = FLOAT32

    def messages(self, prompt: str) -> list[Message]:
        asked = [Message("user", prompt)]
        return asked if self.system is None else [Message("system", self.system), *asked]


def main() -> None:
    """Answer the prompts of the order in the first argument, and end the process with the result's exit code."""
    emit = events()
    child.die_with_parent()
    fields: dict[str, Any] = json.loads(sys.argv[1])
    adapter = fields["adapter"] and Path(fields["adapter"])
    template = fields.get("chat_template") and Path(fields["chat_template"])
    place, prompts, longest = Path(fields["model_folder"]), fields["prompts"], fields["max_new_tokens"]
    settings = ModelConfig(**fields["model"]) if "model" in fields else FLOAT32
    order = Order(place, adapter, prompts, longest, template, fields.get("system"), settings)
    try:
        for each in answers(order):
            emit({"event": "answer", **each})
        result = {"exit_code": DONE, "reason": "done", "message": f"{len(order.prompts)} answered"}
    except HotlapError as error:
        result = {"exit_code": error.exit_code, "reason": error.reason, "message": str(error)}
        result["error"] = type(error).__name__
    emit({"event": "result", **result})
    sys.exit(result["exit_code"])


def answers(order: Order) -> Iterator[dict[str, Any]]:
    """`prompt`, `text` and `num_tokens` of each answer, as it is ready.

    Raises:
        BadData: a prompt cannot be rendered, or leaves no room for an answer.
        AuditFailed: the adapter does not fit the model.
    """
    renderer = Renderer(order.model_folder, chat_template=order.chat_template)
    prompts = [renderer.encode_prompt(order.messages(prompt)) for prompt in order.prompts]
    # Quantized weights need what lean imports leave out.
    with nullcontext() if order.settings.quantization else lean_imports():
        from hotlap.train.answer import answer, text_of

    model = _load(order)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for prompt, tokens in zip(order.prompts, prompts, strict=True):
        num_new = _room_for_answer(len(tokens), order.max_new_tokens, longest)
        found = answer(model, renderer, tokens, num_new)
        yield {"prompt": prompt, "text": text_of(renderer, found), "num_tokens": len(found)}


def _load(order: Order) -> Any:
    from peft import PeftModel
    from safetensors import SafetensorError

    from hotlap.train.base import load_base

    base: Any = load_base(order.model_folder, order.settings, num_tokens_of(order.adapter) if order.adapter else 0)
    if order.adapter is None:
        return base.eval()
    # PEFT asks transformers for a property by the name it had before; nothing a user could change.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    try:
        return PeftModel.from_pretrained(base, str(order.adapter)).eval()
    except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise AuditFailed(
            f"The adapter in {order.adapter} does not fit the model in {order.model_folder}: {error}. "
            f"Name the base model that it was trained on."
        ) from error


def trained_rows_of(adapter: Path) -> dict[str, list[int]]:
    """Numbers of the embedding rows that an adapter has trained one by one, by the module's name."""
    from hotlap.train.model import ADAPTER_CONFIG_FILE

    fields = json.loads((adapter / ADAPTER_CONFIG_FILE).read_bytes())
    return fields.get("trainable_token_indices") or {}


def num_tokens_of(adapter: Path) -> int:
    """Embedding rows that an adapter has trained beyond those of its base model, and all before them."""
    return max((max(rows) + 1 for rows in trained_rows_of(adapter).values()), default=0)


def _room_for_answer(num_T: int, max_new_tokens: int, longest: int | None) -> int:
    """How many tokens the answer may have in a model of `longest` positions."""
    if longest is None:
        return max_new_tokens
    if num_T >= longest:
        raise BadData(f"A prompt has {num_T:,} tokens and the model {longest:,} positions. Shorten it.")
    if num_T + max_new_tokens > longest:
        say(f"The prompt has {num_T:,} tokens, so its answer is cut at the model's {longest:,} positions.")
    return min(max_new_tokens, longest - num_T)


if __name__ == "__main__":
    main()
