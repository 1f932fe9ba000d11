"""What there is to say about packed rows without reading them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotlap.data.left_out import NO_ANSWER, TOO_LONG, LeftOut, left_out_from_json


@dataclass(frozen=True)
class Facts:
    """Of one packed data set. Examples are pieces: what the chat template made two of counts as two."""

    seq_len: int
    num_rows: int
    num_read: int
    """Rows of the sources that this data set is chosen from."""

    num_examples: int
    """Examples in rows, repeated ones as often as they stand there."""

    num_tokens: int
    num_trained_tokens: int
    longest_tokens: int
    """Tokens of the longest example that is in a row."""

    largest_token_id: int
    """Padding included: a model with no more embedding rows than this cannot be trained on these."""

    num_cut: int = 0
    num_cut_trained_tokens: int = 0
    num_pruned: int = 0
    num_unweighted: int = 0
    num_rewritten: int = 0
    num_with_placeholder: int = 0
    """Examples of the sources whose text holds one, whether they are in a row or held out."""

    placeholder: str | None = None
    forms: dict[str, int] = field(default_factory=dict[str, int])
    histogram: tuple[int, ...] = ()
    """Examples by their tokens, in the bins of `rows.histogram_edges`."""

    left_out: tuple[LeftOut, ...] = ()

    @property
    def fill(self) -> float:
        """Share of the positions that hold a token."""
        return self.num_tokens / max(1, self.num_rows * self.seq_len)

    @property
    def too_long(self) -> tuple[LeftOut, ...]:
        return tuple(entry for entry in self.left_out if entry.kind == TOO_LONG)

    @property
    def no_answer(self) -> tuple[LeftOut, ...]:
        return tuple(entry for entry in self.left_out if entry.kind == NO_ANSWER)

    @property
    def bad(self) -> tuple[LeftOut, ...]:
        return tuple(entry for entry in self.left_out if entry.is_bad)

    def in_words(self) -> list[str]:
        """A sentence on what is trained, and one on each reason for which something is not."""
        is_alone = 1 < self.num_rows == self.num_examples
        rows = (
            f", each in a row of its own, of {self.seq_len:,} tokens at most" if is_alone
            else f" in {self.num_rows:,} rows of {self.seq_len:,} tokens ({self.fill:.0%} filled)"
        )  # fmt: skip
        sentences = [
            f"{self.num_examples:,} of {self.num_read:,} examples{rows}; "
            f"{self.num_trained_tokens:,} of {self.num_tokens:,} tokens are trained.",
            f"Read as {' and '.join(f'{form} ({count:,})' for form, count in self.forms.items())}.",
        ]
        if self.num_rewritten:
            sentences.append(
                f"{self.num_rewritten:,} conversations became several examples, because the chat template rewrites "
                f"earlier answers: each of those is trained as the template writes it when it is the last."
            )
        if self.num_cut:
            sentences.append(
                f"Cut {self.num_cut:,} examples to data.seq_len, {self.seq_len:,} tokens; "
                f"{self.num_cut_trained_tokens:,} trained tokens are lost."
            )
        if self.num_pruned:
            sentences.append(f"Left out {self.num_pruned:,} examples by data.prune.")
        if self.num_unweighted:
            sentences.append(f"Left out {self.num_unweighted:,} examples by weights below 1.")
        if (placeholders := self.placeholders_in_words()) is not None:
            sentences.append(placeholders)
        return sentences + [self._dropped(entry) for entry in self.left_out]

    def placeholders_in_words(self) -> str | None:
        if not self.num_with_placeholder:
            return None
        return (
            f"{self.num_with_placeholder:,} examples hold a placeholder, such as {self.placeholder}. Nothing fills it "
            f"in: it is trained as it stands. If it is not meant, put the text in its place in the data, or in "
            f"answers with data.clean."
        )

    def _dropped(self, entry: LeftOut) -> str:
        """Why, and where: the source is named by its place only, since most runs have one."""
        if entry.kind == TOO_LONG:
            reason = f"being longer than data.seq_len, {self.seq_len:,} tokens"
        elif entry.kind == NO_ANSWER:
            reason = "having no assistant's message to train"
        else:
            reason = f"being no example: {entry.kind}"
        where = f"{Path(entry.source).name} {entry.where}"
        return f"Dropped {entry.count:,} of {self.num_read:,} examples for {reason} ({where})."


def facts_from_json(written: dict[str, Any]) -> Facts:
    """The facts that `dataclasses.asdict` and JSON made of `Facts`."""
    facts: dict[str, Any] = {
        **written,
        "histogram": tuple(written["histogram"]),
        "left_out": left_out_from_json(written["left_out"]),
    }
    return Facts(**facts)
