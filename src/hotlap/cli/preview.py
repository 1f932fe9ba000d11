"""`hotlap preview`: what would be trained, token by token, and what it would need, before anything is paid for."""

import html
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.text import Text

    from hotlap.data.facts import Facts
    from hotlap.data.preview import Preview, Token

_BAR_WIDTH = 40


@click.command(
    epilog="""\b
Example:
  hotlap preview run.toml --examples 2
"""
)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--base-model", help="A folder, a GGUF file, a hub id, a package, or a short name.")
@click.option("--dataset", help="A file or folder of examples.")
@click.option("--output-dir", help="Folder in which runs have theirs.  [default: runs]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting, as in lora.rank=32.")
@click.option(
    *("--examples", "num_examples"),
    default=3,
    show_default=True,
    type=click.IntRange(min=0),
    help="How many examples to show token by token.",
)
@click.option("--on", "provider", help="Price the run on what this provider offers now: local or runpod.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write a page to this file as well.")
def preview(
    config: Path | None,
    base_model: str | None,
    dataset: str | None,
    output_dir: str | None,
    overrides: tuple[str, ...],
    num_examples: int,
    provider: str | None,
    as_json: bool,
    html_path: Path | None,
) -> None:
    """Show what a run would train on, and what it would need.

    Green tokens are trained, gray ones are only read. The data is prepared on the way, without a cap on the time, so a
    slice finds it ready. Trains nothing and rents nothing.
    """
    from hotlap.cli import preview_price, written
    from hotlap.config import load_cloud, load_run
    from hotlap.data.preview import preview as look

    if html_path is not None:
        written.require_a_file(html_path)
    settings = load_run(config, overrides, base_model=base_model, dataset=dataset, output_dir=output_dir)
    found = look(settings, num_examples, lambda text: click.echo(text, err=True))
    priced = [] if provider is None else preview_price.prices(found, settings, provider, load_cloud())
    rows = [*rows_of(found), *preview_price.rows_of(priced)]
    if html_path is not None:
        written.write(html_path, page(found, rows).encode())
        click.echo(f"Written to {html_path}.", err=True)
    if as_json:
        prices = [{**asdict(price), "usd_micros": price.usd_micros} for price in priced]
        click.echo(json.dumps({**found.as_json(), "prices": None if provider is None else prices}, indent=1))
    else:
        _print(found, rows)


# --- words ---


def rows_of(found: "Preview") -> Iterator[tuple[str, str]]:
    """What is said beside the examples: a name and a finding each."""
    train, held_out = found.packing.train, found.packing.held_out
    yield "train", train.facts.in_words()[0]
    yield "forms", ", ".join(f"{form} {count:,}" for form, count in train.facts.forms.items())
    if held_out is not None:
        yield "held out", held_out.facts.in_words()[0]
    if (leak := found.packing.leak_in_words()) is not None:
        yield "leak", leak
    if (placeholders := train.facts.placeholders_in_words()) is not None:
        yield "unfilled", placeholders
    for doubt in found.doubts:
        yield "template", doubt
    if not found.is_seed_known:
        yield "seed", "drawn at the first slice: what it draws (held-out examples, say) will be other examples"
    yield "epoch", f"{train.facts.num_tokens:,} tokens, {train.num_trained_tokens:,} of them trained"
    yield "steps", f"{found.num_steps:,}, over {found.num_rows_trained:,} rows"
    yield "memory", _memory(found)
    yield "speed", f"{found.speed.tokens_per_s:,.0f} tokens/s, {found.speed.source}"
    slices = f"{found.duration.num_slices:,} slice{'s' if found.duration.num_slices > 1 else ''}"
    yield "time", f"about {_hours(found.duration.seconds)} for {found.duration.num_tokens:,} tokens, {slices}"


def _memory(found: "Preview") -> str:
    rows = found.micro_batch_rows
    gb, words = found.memory.peak_bytes(rows) / 1e9, found.memory.in_words
    peak = f"about {gb:.1f} GB in {words} with train.micro_batch_rows = {rows}"
    most, available = found.suggested_micro_batch_rows, found.available_bytes
    if most is None or available is None:
        return peak
    if most == 0:
        return f"{peak}; {available / 1e9:.1f} GB are available here, too little: lower data.seq_len"
    return f"{peak}; {available / 1e9:.1f} GB are available here, which is enough for {most:,}"


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# --- the terminal ---


def _print(found: "Preview", rows: Iterable[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hotlap.data.preview import histogram_of, left_out_rows

    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else 240
    for number, example in enumerate(found.examples, start=1):
        num_trained = sum(token.is_trained for token in example)
        console.print(Text(f"example {number}: {len(example)} tokens, {num_trained} trained", style="bold"))
        console.print(_colored(example) if console.is_terminal else Text(_marked(example)))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, finding in rows:
        table.add_row(name, Text(finding))
    for count, kind, where, reason in left_out_rows(found.packing.train.facts):
        table.add_row("left out", Text(f"{count:,} x {kind} ({where}). {_printable(reason)}"))
    console.print(table)
    largest = max((count for _, count in histogram_of(found.packing.train.facts)), default=0)
    for edge, count in histogram_of(found.packing.train.facts):
        console.print(Text(f"{edge:>6} tokens {'█' * _bar(count, largest)} {count:,}"))


def _bar(count: int, largest: int) -> int:
    return -(-count * _BAR_WIDTH // largest) if largest else 0


def _colored(example: "list[Token]") -> "Text":
    from rich.text import Text

    text = Text()
    for number, token in enumerate(example):
        color = "green" if token.is_trained else "bright_black"
        text.append(_printable(token.text), style=color if number % 2 else f"{color} underline")
    return text


def _marked(example: "list[Token]") -> str:
    """Without colors: trained stretches in double brackets."""
    pieces: list[str] = []
    was_trained = False
    for token in example:
        if token.is_trained != was_trained:
            pieces.append("[[" if token.is_trained else "]]")
        pieces.append(_printable(token.text))
        was_trained = token.is_trained
    return "".join([*pieces, "]]" if was_trained else ""])


def _printable(text: str) -> str:
    """Strangers' text without what would move a terminal's cursor; line ends stay."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


# --- the page ---


_STYLE = (
    "body{font:14px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{white-space:pre-wrap;border:1px solid #ccc;padding:.6rem}span{color:#777;border-right:1px solid #eee}"
    "span.t{color:#064;background:#cfe8d5}td{vertical-align:top;padding-right:1rem}"
    "i{display:inline-block;height:.8em;background:#69c}"
)


def page(found: "Preview", rows: Iterable[tuple[str, str]]) -> str:
    """A page that needs nothing else. Every text of a stranger's is escaped."""
    findings = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(finding)}</td></tr>" for name, finding in rows
    )
    examples = "".join(f"<pre>{_spans(example)}</pre>" for example in found.examples)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(found.run)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(found.run)}</h1><table>{findings}</table>"
        f"<h2>Examples</h2><p>Green tokens are trained, gray ones are only read.</p>{examples}"
        f"<h2>Tokens of an example</h2><table>{_bars(found.packing.train.facts)}</table>"
        f"<h2>Left out</h2><table>{_left_out(found.packing.train.facts)}</table></html>\n"
    )


def _spans(example: "list[Token]") -> str:
    return "".join(
        f'<span class="{"t" if token.is_trained else "u"}" title="{" ".join(map(str, token.ids))}">'
        f"{html.escape(token.text)}</span>"
        for token in example
    )


def _bars(facts: "Facts") -> str:
    from hotlap.data.preview import histogram_of

    bins = histogram_of(facts)
    largest = max((count for _, count in bins), default=0)
    return "".join(
        f'<tr><td>up to {edge}</td><td><i style="width:{_bar(count, largest) / 2}em"></i> {count:,}</td></tr>'
        for edge, count in bins
    )


def _left_out(facts: "Facts") -> str:
    from hotlap.data.preview import left_out_rows

    return "".join(
        f"<tr><td>{count:,}</td><td>{html.escape(kind)}</td><td>{html.escape(where)}</td>"
        f"<td>{html.escape(reason)}</td></tr>"
        for count, kind, where, reason in left_out_rows(facts)
    )
