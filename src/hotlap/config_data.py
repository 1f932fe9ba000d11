"""The configuration of a run's data: where examples come from, which of them are trained, and how rows are made."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hotlap.config_base import Config


class ColumnsConfig(Config):
    prompt: str
    """The column, or key, of what is asked."""

    completion: str
    """The column of what is to be answered."""

    system: str | None = None
    """The column of a system prompt, where a row has one."""


class CleanConfig(Config):
    pattern: str
    """A regular expression, looked for in what the assistant says."""

    replace: str = ""
    """What each match becomes; `\\1` is the first group."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _replaces(self) -> "CleanConfig":
        try:
            # What takes a pattern's place is read before anything is looked for.
            re.sub(self.pattern, self.replace, "")
        except (re.error, IndexError) as error:
            raise ValueError(f"replace does not fit the pattern: {error}") from None
        return self


class PruneConfig(Config):
    by: Literal["first", "shortest", "seed"]
    """Which examples stay: the first, the shortest in tokens, or those that the run's seed draws."""

    keep: int = Field(ge=1)
    """How many stay to train on."""


FormatName = Literal["auto", "completion", "alpaca", "sharegpt", "messages", "question-answer", "text"]


class MixConfig(Config):
    dataset: str
    """A further data set, given as `dataset` is."""

    weight: float = Field(default=1.0, gt=0, le=1000)
    """How often each of its examples stands in an epoch: 2 repeats all, 0.5 takes a half that the seed draws."""

    format: FormatName = "auto"
    files: str | None = None


class DataConfig(Config):
    format: FormatName = "auto"
    """The form of the examples. `auto` looks at the keys of every row and says what it found."""

    columns: ColumnsConfig | None = None
    """Names of the columns, for a data set of no known form. It takes the place of `format`."""

    files: str | None = None
    """Which files of a folder or hub data set are read, as a pattern (`data/train-*`). Absent: those of `train`."""

    weight: float = Field(default=1.0, gt=0, le=1000)
    """How often each example of `dataset` stands in an epoch, beside those of `mix`."""

    mix: Annotated[tuple[MixConfig, ...], Field(strict=False)] = ()
    """Further data sets to train on."""

    eval_dataset: str | None = None
    """Examples held out in a file of their own. Absent: see `eval_examples`."""

    eval_examples: int = Field(default=0, ge=0)
    """How many examples to hold out of the data sets themselves, drawn by the run's seed. 0 holds out none."""

    seq_len: int = Field(default=512, ge=8, le=2**20)
    """Length of a row in tokens. Several examples are packed into a row; none is split."""

    too_long: Literal["drop", "cut", "refuse"] = "drop"
    """What becomes of an example that is longer than a row. `cut` takes tokens off its end."""

    bad_rows: Literal["refuse", "drop"] = "refuse"
    """What becomes of a row that is no example. Dropped ones are counted and listed with their reasons."""

    prune: PruneConfig | None = None
    """Train on a part of the examples only."""

    clean: Annotated[tuple[CleanConfig, ...], Field(strict=False)] = ()
    """Patterns to replace in what the assistant says, one after another."""

    system: str | None = Field(default=None, min_length=1)
    """System prompt of the conversations that have none."""

    chat_template: str | None = None
    """A file with a chat template that takes the place of the model's own."""

    tools: Literal["template", "text"] = "template"
    """Who writes tools and calls: the chat template, or hotlap, as JSON in `<tool_call>` in the text."""

    turns: Literal["all", "last"] = "all"
    """Which of a conversation's answers are trained."""

    append_end: bool = True
    """Whether an end token follows an answer or a text that no chat template ends."""


class PackingConfig(Config):
    method: Literal["next-fit", "best-fit", "none"] = "next-fit"
    """`next-fit` fills row after row, `best-fit` the fullest open one; with `none` each example has its own."""

    attention: Literal["blocked", "open"] = "blocked"
    """Whether examples of a row see each other in training. `open` is cheaper and trains on foreign context."""
