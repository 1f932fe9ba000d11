"""The most likely answer to a prompt: for `hotlap generate`, and for the samples at an evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from hotlap.config import RunConfig
from hotlap.data.readers import Message
from hotlap.data.render import Renderer
from hotlap.errors import ConfigError
from hotlap.train.model import AdaptedModel

# T tokens of a prompt, N tokens of its answer


def answer(
    model: Any, renderer: Renderer, tokens: list[int], num_new: int, check_time: Callable[[], None] = lambda: None
) -> list[int]:
    """The most likely next token, again and again, up to and with the end of the turn. `check_time` may give up by
    raising after each of them."""

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: Any, *_given: Any, **_named: Any) -> Any:
            check_time()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

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
        output_1N = model.generate(
            input_ids=tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([Clock()]),
        )
    return output_1N[0, len(tokens) :].tolist()


def text_of(renderer: Renderer, tokens: list[int]) -> str:
    """An answer without the token that ended it."""
    is_stopped = tokens[-1] in renderer.stop_token_ids
    return renderer.decode(tokens[:-1] if is_stopped else tokens)


class Sampler:
    """Answers a run's `eval.sample_prompts` as training goes on. It draws no random number."""

    def __init__(self, model: AdaptedModel, config: RunConfig, model_folder: Path) -> None:
        """
        Raises:
            BadData: a prompt cannot be rendered.
        """
        template = config.data.chat_template
        self._model = model
        self._renderer = Renderer(model_folder, config.data, Path(template) if template else None)
        self._num_new = config.eval.sample_tokens
        first = [] if config.data.system is None else [Message("system", config.data.system)]
        self._prompts = [
            (prompt, self._renderer.encode_prompt([*first, Message("user", prompt)]))
            for prompt in config.eval.sample_prompts
        ]

    def answers(self, check_time: Callable[[], None]) -> list[tuple[str, str]]:
        """Every prompt with its answer."""
        self._model.peft_model.eval()
        with self._model.autocast():
            return [
                (prompt, text_of(self._renderer, self._answer(tokens, check_time))) for prompt, tokens in self._prompts
            ]

    def _answer(self, tokens: list[int], check_time: Callable[[], None]) -> list[int]:
        return answer(self._model.peft_model, self._renderer, tokens, self._num_new, check_time)


def sampler_for(model: AdaptedModel, config: RunConfig, model_folder: Path, has_evaluations: bool) -> Sampler | None:
    """None: no samples are wanted.

    Raises:
        BadData: a prompt cannot be rendered.
        ConfigError: what happens at evaluations is asked for, and there are none.
    """
    if not has_evaluations and (config.eval.sample_prompts or config.eval.patience):
        raise ConfigError(
            "eval.patience and eval.sample_prompts need evaluations. Hold examples out with data.eval_examples."
        )
    return Sampler(model, config, model_folder) if config.eval.sample_prompts else None
