"""Answers of a base model, with or without its adapter, greedily and one prompt after another.

`python -m hotlap.train.generate ORDER`, with the order as JSON: `model_folder`, `adapter` (a PEFT folder or null),
`prompts`, `max_new_tokens`, and perhaps `chat_template` (a file) and `system` (a message before each prompt). One
`answer` event per prompt, in their order, then the `result`.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig

from hotlap.data.readers import Message
from hotlap.data.render import Renderer
from hotlap.errors import DONE, AuditFailed, BadData, HotlapError
from hotlap.train.channel import die_with_parent, events, say
from hotlap.train.model import load_base

# T tokens of a prompt, N tokens of its answer


@dataclass(frozen=True)
class Order:
    model_folder: Path
    adapter: Path | None
    prompts: list[str]
    max_new_tokens: int
    chat_template: Path | None = None
    system: str | None = None

    def messages(self, prompt: str) -> list[Message]:
        asked = [Message("user", prompt)]
        return asked if self.system is None else [Message("system", self.system), *asked]


def main() -> None:
    """Answer the prompts of the order in the first argument, and end the process with the result's exit code."""
    emit = events()
    die_with_parent()
    fields: dict[str, Any] = json.loads(sys.argv[1])
    adapter = fields["adapter"] and Path(fields["adapter"])
    template = fields.get("chat_template") and Path(fields["chat_template"])
    place, prompts, longest = Path(fields["model_folder"]), fields["prompts"], fields["max_new_tokens"]
    order = Order(place, adapter, prompts, longest, template, fields.get("system"))
    try:
        for answer in answers(order):
            emit({"event": "answer", **answer})
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
    model = _load(order)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for prompt, tokens in zip(order.prompts, prompts, strict=True):
        num_new = _room_for_answer(len(tokens), order.max_new_tokens, longest)
        answer = _answer(model, renderer, tokens, num_new)
        is_stopped = answer[-1] in renderer.stop_token_ids
        text = renderer.decode(answer[:-1] if is_stopped else answer)
        yield {"prompt": prompt, "text": text, "num_tokens": len(answer)}


def _load(order: Order) -> Any:
    base: Any = load_base(order.model_folder)
    if order.adapter is None:
        return base.eval()
    # PEFT asks transformers for a property by the name it had before; nothing a user could change.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    try:
        return PeftModel.from_pretrained(base, str(order.adapter)).eval()
    except (RuntimeError, ValueError, KeyError) as error:
        raise AuditFailed(
            f"The adapter in {order.adapter} does not fit the model in {order.model_folder}: {error}. "
            f"Name the base model that it was trained on."
        ) from error


def _room_for_answer(num_T: int, max_new_tokens: int, longest: int | None) -> int:
    """How many tokens the answer may have in a model of `longest` positions."""
    if longest is None:
        return max_new_tokens
    if num_T >= longest:
        raise BadData(f"A prompt has {num_T:,} tokens and the model {longest:,} positions. Shorten it.")
    if num_T + max_new_tokens > longest:
        say(f"The prompt has {num_T:,} tokens, so its answer is cut at the model's {longest:,} positions.")
    return min(max_new_tokens, longest - num_T)


def _answer(model: Any, renderer: Renderer, tokens: list[int], num_new: int) -> list[int]:
    """The most likely next token, again and again, up to and with the end of the turn."""
    tokens_1T = torch.tensor([tokens], device=model.device)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=sorted(renderer.stop_token_ids) or None,
        pad_token_id=renderer.pad_token_id,
    )
    # What the model's folder recommends, sampling above all, would be mixed into ours.
    model.generation_config = settings
    with torch.inference_mode():
        output_1N = model.generate(tokens_1T, attention_mask=torch.ones_like(tokens_1T), generation_config=settings)
    return output_1N[0, len(tokens) :].tolist()


if __name__ == "__main__":
    main()
