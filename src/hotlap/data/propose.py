"""A first configuration for a data set, from a look at its examples; every value with its reason.

Rules of thumb, to be looked at with `hotlap preview` and changed: what is best for a data set only trying tells.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hotlap.config import CloudConfig, DataConfig
from hotlap.config_data import ColumnsConfig
from hotlap.data.estimate import shape_of
from hotlap.data.examples import BadRow, Example
from hotlap.data.readers import Source
from hotlap.data.render import Renderer
from hotlap.errors import BadData
from hotlap.translate import toml_value

_MOST_LOOKED_AT = 5000
_CHARACTERS_A_TOKEN = 3
"""English text has about four; other languages and code have fewer."""

_PROMPTS = ("prompt", "instruction", "input", "question", "query", "source", "user", "context", "text")
_ANSWERS = ("completion", "output", "response", "answer", "target", "reply", "label", "assistant", "summary")
_LONGEST, _SHORTEST, _STEP = 4096, 64, 64
_ROW_OF_SEVERAL = 512
_MOST_HELD_OUT = 200
_NUM_EVALUATIONS = 5

_RATE_OF_ANY_MODEL = 2e-4
_FITTED_RATE, _FITTED_WIDTH, _FITTED_POWER = 5e-4, 2000, 0.781
"""Others' fit for LoRA on Llama models: docs/how-to/own-data.md."""

_MOST_RATE = 2e-3
"""The highest that was compared with others here, at a width of 576."""


@dataclass(frozen=True)
class Look:
    """What the first examples are like. `lengths` are in tokens, estimated from characters without a tokenizer."""

    num_rows: int
    is_whole: bool
    """Whether these are all rows there are."""

    forms: Counter[str]
    bad: Counter[str]
    first_bad: str | None
    lengths: list[int]
    is_exact: bool
    has_template: bool | None
    """None: the base model is not here."""

    width: int | None = None
    """The base model's. None: it is not here."""

    columns: ColumnsConfig | None = None
    first_prompt: str | None = None
    """What the first short enough question of the data asks."""

    @property
    def num_examples(self) -> int:
        return len(self.lengths)


def look_at(place: Path, model_folder: Path | None, settings: DataConfig | None = None) -> Look:
    """
    Raises:
        BadData: a file cannot be read, or none of its first rows is an example and no two columns look like a pair.
        MissingArtifact: there is no such file, or the base model's folder does not tell its width.
    """
    source = Source(place, settings or DataConfig())
    rows = list(islice(source.rows(), _MOST_LOOKED_AT + 1))
    is_whole, rows = len(rows) <= _MOST_LOOKED_AT, rows[:_MOST_LOOKED_AT]
    examples = [row for row in rows if isinstance(row, Example)]
    bad = [row for row in rows if isinstance(row, BadRow)]
    if not examples:
        columns = None if settings else _columns_of(source)
        if columns is None:
            raise BadData(f"None of the first {len(rows):,} rows is an example. {bad[0].place}: {bad[0].reason}")
        return look_at(place, model_folder, DataConfig(columns=columns))
    renderer = Renderer(model_folder) if model_folder else None
    return Look(
        num_rows=len(rows),
        is_whole=is_whole,
        forms=Counter(example.form for example in examples),
        bad=Counter(row.kind for row in bad),
        first_bad=f"{bad[0].place}: {bad[0].reason}" if bad else None,
        lengths=sorted(_lengths(examples, renderer)),
        is_exact=renderer is not None,
        has_template=renderer.has_chat_template if renderer else None,
        width=shape_of(model_folder).hidden if model_folder else None,
        columns=settings.columns if settings else None,
        first_prompt=next(filter(None, map(_prompt_of, examples)), None),
    )


def _prompt_of(example: Example) -> str | None:
    """A question alone, of one line, as people ask it; none of a text or of a longer conversation."""
    first = example.messages[0] if example.messages else None
    is_question = first is not None and first.role == "user" and len(example.messages) == 2
    is_short = first is not None and 0 < len(first.content) <= 200 and first.content.isprintable()
    return first.content if first is not None and is_question and is_short else None


def _columns_of(source: Source) -> ColumnsConfig | None:
    """Two columns of text that look like what is asked and what is answered, by their names."""
    for file in source.files:
        for row in islice(file.container.rows(file.path), 1):
            if isinstance(row, BadRow) or not isinstance(row.value, dict):
                return None
            texts = [name for name, value in row.value.items() if isinstance(value, str)]
            prompt = next((name for word in _PROMPTS for name in texts if name.lower() == word), None)
            answer = next((name for word in _ANSWERS for name in texts if name.lower() == word), None)
            if len(texts) == 2:
                prompt = prompt or next((name for name in texts if name != answer), None)
                answer = answer or next((name for name in texts if name != prompt), None)
            if prompt and answer and prompt != answer:
                return ColumnsConfig(prompt=prompt, completion=answer)
    return None


def _lengths(examples: Sequence[Example], renderer: Renderer | None) -> Iterator[int]:
    if renderer is None:
        for example in examples:
            yield sum(len(message.content) for message in example.messages) // _CHARACTERS_A_TOKEN + 8
        return
    for pieces in renderer.render_each(examples):
        if not isinstance(pieces, BadRow):
            yield sum(len(piece.tokens_L) for piece in pieces)


# --- from a look to a configuration ---


@dataclass(frozen=True)
class Setting:
    table: str
    """Empty for the settings that stand in no table."""

    key: str
    value: object
    why: str = ""


@dataclass(frozen=True)
class Proposal:
    settings: Sequence[Setting]
    notes: Sequence[str] = field(default=())
    """What was found and what to do next: comments on top of the file."""

    def as_toml(self) -> str:
        lines = [f"# {_one_line(note)}" for note in self.notes]
        table = None
        for each in self.settings:
            if each.table != table:
                lines += ["", f"[{each.table}]"] if each.table else [""]
                table = each.table
            lines += [f"# {_one_line(each.why)}"] if each.why else []
            lines.append(f"{each.key} = {toml_value(each.value)}")
        return "\n".join(lines) + "\n"


def propose(look: Look, base_model: str, dataset: str, cloud: CloudConfig, notes: Sequence[str] = ()) -> Proposal:
    seq_len, why = _seq_len(look)
    num_fitting = sum(length <= seq_len for length in look.lengths)
    held_out = min(_MOST_HELD_OUT, num_fitting // 20) if num_fitting >= 40 else 0
    num_rows = max(1, math.ceil(sum(length for length in look.lengths if length <= seq_len) / seq_len))
    epochs = 5.0 if num_fitting < 200 else 3.0 if num_fitting < 2000 else 1.0
    rows_a_step = max(1, min(16, num_rows // 16))
    num_steps = max(1, math.ceil(num_rows * epochs / rows_a_step))
    minutes = cloud.limits.max_slice_minutes
    lr, why_lr = _lr(look.width)
    settings = [
        Setting("", "base_model", base_model),
        Setting("", "dataset", dataset),
        *_data(look, seq_len, why, held_out),
        Setting("lora", "rank", 16, "Width of the adapter; more for a task that is far from what the model can do."),
        Setting("optim", "lr", lr, f"{why_lr} It matters most of all; hotlap research searches for the best."),
        Setting("optim", "warmup_steps", max(1, min(20, num_steps // 20))),
        Setting("train", "epochs", epochs, f"{num_fitting:,}{'' if look.is_whole else ' or more'} examples fit."),
        Setting("train", "grad_accumulation", rows_a_step, f"Rows in a step, of about {num_rows:,} in an epoch."),
        *(_eval(look, num_steps) if held_out else ()),
        Setting("slice", "minutes", minutes, "The cap of a slice, everything included; limits.max_slice_minutes."),
    ]
    return Proposal(settings, [*_notes(look), *notes])


def _data(look: Look, seq_len: int, why: str, held_out: int) -> Iterator[Setting]:
    yield from _form(look)
    yield Setting("data", "seq_len", seq_len, why)
    if look.bad:
        yield Setting("data", "bad_rows", "drop", "Counted and listed; remove this line to refuse them.")
    if held_out:
        yield Setting("data", "eval_examples", held_out, "Held out: their loss says what it learned.")


def _lr(width: int | None) -> tuple[float, str]:
    """LoRA wants a higher rate the narrower its model is, and nearly the same at any rank: docs/how-to/own-data.md has
    the source, and what was measured."""
    if width is None:
        return _RATE_OF_ANY_MODEL, "Careful: once the base model is here, init proposes a rate for its width."
    rate = min(_MOST_RATE, _FITTED_RATE * (_FITTED_WIDTH / width) ** _FITTED_POWER)
    formula = f"{_FITTED_RATE:g} x ({_FITTED_WIDTH} / {width}) ^ {_FITTED_POWER}, at most {_MOST_RATE:g}"
    return float(f"{rate:.2g}"), f"By the base model's width: {formula}."


def _eval(look: Look, num_steps: int) -> Iterator[Setting]:
    every = max(1, num_steps // _NUM_EVALUATIONS)
    yield Setting(
        "eval", "every_steps", every, "The step with the lowest held-out loss is kept in best/, besides the last."
    )
    if look.first_prompt is not None:
        why = "Answered before training and at every evaluation; hotlap report shows the answers side by side."
        yield Setting("eval", "sample_prompts", [look.first_prompt], why)


def _form(look: Look) -> Iterator[Setting]:
    if look.columns is not None:
        columns = {"prompt": look.columns.prompt, "completion": look.columns.completion}
        yield Setting("data", "columns", columns, "No known form; these columns look like a pair. Is it so?")
        return
    if len(look.forms) == 1:
        (form,) = look.forms
        yield Setting("data", "format", form, "Found by looking; a row of another form is then a bad row.")


def _seq_len(look: Look) -> tuple[int, str]:
    """As long as 99 of 100 examples; of short ones, several to a row, so that little of it stays empty."""
    longest = look.lengths[-1] if look.lengths else _SHORTEST
    nearly_all = look.lengths[math.ceil(0.99 * len(look.lengths)) - 1] if look.lengths else _SHORTEST
    several = min(_ROW_OF_SEVERAL, 4 * look.lengths[len(look.lengths) // 2]) if look.lengths else _SHORTEST
    seq_len = max(_SHORTEST, min(_LONGEST, math.ceil(max(nearly_all, several) / _STEP) * _STEP))
    num_longer = sum(length > seq_len for length in look.lengths)
    how = "" if look.is_exact else ", estimated from characters: the base model's tokenizer is not here"
    return (
        seq_len,
        f"The longest has {longest:,} tokens{how}; {num_longer:,} of {len(look.lengths):,} would be dropped.",
    )


def _notes(look: Look) -> Iterator[str]:
    forms = ", ".join(f"{form} {count:,}" for form, count in look.forms.items())
    yield f"Of the {'' if look.is_whole else 'first '}{look.num_rows:,} rows: {forms}."
    if look.bad:
        yield f"No examples: {', '.join(f'{kind} {count:,}' for kind, count in look.bad.items())}."
        yield f"The first: {look.first_bad}"
    if look.has_template is True:
        yield "The base model's own chat template is used."
    elif look.has_template is False:
        yield "The base model has no chat template: conversations need data.chat_template, pairs and texts do not."
    else:
        yield "The base model is not here yet: hotlap prefetch brings it, and hotlap preview then counts its tokens."


def _one_line(text: str) -> str:
    """Strangers' text in a comment."""
    return "".join(char if char.isprintable() else " " for char in text)
