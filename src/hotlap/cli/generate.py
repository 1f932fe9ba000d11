"""`hotlap generate`: ask a run's model, or its base model, and print the answers as they come."""

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from hotlap import errors
from hotlap.cli.runs import OUTPUT_DIR

if TYPE_CHECKING:
    from hotlap.child import ChildEnd
    from hotlap.runs import RunFolder

_PATIENCE_S = 600.0
# Linux takes no single argument of a process that is longer.
_MOST_ORDER_BYTES = 131_000


@click.command(
    epilog="""\b
Example:
  hotlap generate my-run "Who are you?"
"""
)
@click.argument("run")
@click.argument("prompts", metavar="PROMPT...", nargs=-1, required=True)
@OUTPUT_DIR
@click.option(
    "--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=1), help="Longest answer in tokens."
)
@click.option("--base", "only_base", is_flag=True, help="Ask the base model, without the run's adapter.")
@click.option("--json", "as_json", is_flag=True, help="Answers as JSON lines.")
def generate(
    run: str, prompts: tuple[str, ...], output_dir: Path, max_new_tokens: int, only_base: bool, as_json: bool
) -> None:
    """Answer each PROMPT with the run's best adapter, always with the most likely words.

    The best adapter is the one with the lowest held-out loss, else the final one, else the newest checkpoint's.
    PROMPT - is read from standard input.
    """
    from hotlap.cli.progress import plain
    from hotlap.runs import find_run

    folder = find_run(run, output_dir)
    texts = [_text_of(prompt) for prompt in prompts]
    model_folder, settings = base_model(folder)
    choice = None if only_base else choose_adapter(folder, _talk)
    _talk(f"Asking {choice.in_words if choice else 'the base model alone'}.")
    facts = {"adapter": str(choice.folder), "step": choice.step} if choice else {"adapter": None, "step": None}

    def show(answer: dict[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps({**answer, **facts}))
        else:
            text = f"> {answer['prompt']}\n{answer['text']}\n" if len(texts) > 1 else answer["text"]
            click.echo(plain(text))

    asked_as = {"model": settings, **asked_as_trained(folder)}
    ask(model_folder, choice and choice.folder, texts, max_new_tokens, show, asked_as)


def ask(
    model_folder: Path,
    adapter: Path | None,
    prompts: Sequence[str],
    max_new_tokens: int,
    on_answer: Callable[[dict[str, Any]], None],
    asked_as: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """`prompt`, `text` and `num_tokens` of every answer, in the prompts' order; `on_answer` gets each as it comes.
    `asked_as` may name a `chat_template` file, a `system` message, and as `model` the settings of `[model]` with the
    precision that was chosen; without these the model is float32 and not quantized.

    Raises:
        HotlapError: what the answering process ended with, of the same class.
        ChildCrashed: it was killed, or ended without a word.
        KeyboardInterrupt: somebody asked to stop.
    """
    from hotlap import child, clock, durable

    order = {"model_folder": str(model_folder), "adapter": adapter and str(adapter), "prompts": list(prompts)}
    text = durable.canonical_json({**order, **asked_as, "max_new_tokens": max_new_tokens})
    if (num_bytes := len(text.encode())) > _MOST_ORDER_BYTES:
        raise errors.UsageError(f"The prompts have {num_bytes:,} bytes, and {_MOST_ORDER_BYTES:,} fit. Ask fewer.")
    answers: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> None:
        answer = {key: value for key, value in event.items() if key != "event"}
        answers.append(answer)
        on_answer(answer)

    argv = [sys.executable, "-m", "hotlap.train.generate", text]
    end = child.run_child(argv, clock.Deadline(clock.monotonic_s() + _PATIENCE_S), on_event, _talk)
    _require_done(end)
    return answers


def _require_done(end: "ChildEnd") -> None:
    if end.exit_code in (errors.INTERRUPTED, -signal.SIGTERM):
        raise KeyboardInterrupt
    if end.exit_code == errors.OVERRAN:
        raise errors.ChildCrashed(
            f"The answers were not there after {_PATIENCE_S / 60:.0f} minutes, so the process was ended. "
            f"Ask fewer prompts at a time, or lower --max-new-tokens."
        )
    end.raise_if_killed("The answering process")
    if end.exit_code == errors.DONE:
        return
    if end.result is None:
        last_line = (end.last_words.splitlines() or ["it said nothing"])[-1]
        raise errors.ChildCrashed(f"The answering process ended with exit code {end.exit_code}: {last_line}")
    kind: type[errors.HotlapError] = getattr(errors, end.result["error"])
    raise kind(end.result["message"])


# --- which adapter ---


@dataclass(frozen=True)
class Choice:
    """An adapter that verified. `kind` says why it was chosen."""

    folder: Path
    step: int
    kind: str

    @property
    def in_words(self) -> str:
        return f"{self.kind}, from step {self.step} ({self.folder})"


def choose_adapter(run: "RunFolder", say: Callable[[str], None]) -> Choice:
    """The best adapter of a run, else the final one, else the newest checkpoint's; damaged ones are told.

    Raises:
        UsageError: the run has none.
    """
    from hotlap import durable
    from hotlap.runs import newest_checkpoint

    for folder, kind in ((run.best, "the best adapter"), (run.adapter, "the final adapter")):
        if not folder.exists():
            continue
        try:
            return Choice(folder, durable.verify(folder)["step"], kind)
        except errors.CorruptFile as error:
            say(f"{error} It is passed over.")
    checkpoint = newest_checkpoint(run, say)
    if checkpoint is None:
        raise errors.UsageError(
            f"{run.name} has no checkpoint yet. Train it with hotlap train, or ask its base model with --base."
        )
    return Choice(checkpoint.folder, checkpoint.step, "the newest checkpoint")


def base_model(run: "RunFolder") -> tuple[Path, dict[str, Any]]:
    """The base model of a run, if it is still what the run was trained on, and how the run loads it."""
    from hotlap import artifacts
    from hotlap.runs import read_identity

    identity = read_identity(run)
    if identity is None:
        raise errors.UsageError(
            f"{run.name} has not begun: its first slice ended before it had read base model and data. "
            f"Run hotlap train again."
        )
    folder = artifacts.locate_model(identity.trajectory["base_model"])
    if differences := artifacts.changed(folder, artifacts.pins_from_json(identity.base_pins)):
        raise errors.RunChanged(
            f"{folder} is not the base model that {run.name} was trained on: {'; '.join(differences)}. Put it back."
        )
    return folder, {**identity.trajectory.get("model", {}), "precision": identity.precision}


def asked_as_trained(run: "RunFolder") -> dict[str, str]:
    """What a run was trained with and is asked with too: its own chat template, its system message."""
    from hotlap import artifacts
    from hotlap.runs import read_identity

    identity = read_identity(run)
    if identity is None:
        return {}
    data: dict[str, Any] = identity.trajectory.get("data", {})
    asked_as = {"system": data["system"]} if data.get("system") else {}
    if "chat_template" not in identity.data_pins:
        return asked_as
    path: str = data["chat_template"]
    if differences := artifacts.changed(Path(path), artifacts.pins_from_json(identity.data_pins["chat_template"])):
        raise errors.RunChanged(f"{path} is not what {run.name} was trained with: {'; '.join(differences)}.")
    return {**asked_as, "chat_template": path}


def _text_of(prompt: str) -> str:
    try:
        text = sys.stdin.buffer.read().decode().rstrip("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise errors.UsageError("A prompt is not UTF-8. Save it as UTF-8, or set a UTF-8 locale.") from None
    if not text.strip():
        raise errors.UsageError("A prompt is empty. Ask something.")
    return text


def _talk(line: str) -> None:
    from hotlap.cli.progress import plain

    click.echo(plain(line), err=True)
