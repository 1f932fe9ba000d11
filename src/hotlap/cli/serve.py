"""`hotlap serve` and `hotlap bench`: a run's model behind an OpenAI-compatible API, and how fast it answers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from hotlap.cli.export import talk, tuned_of
from hotlap.cli.runs import OUTPUT_DIR
from hotlap.errors import UsageError

if TYPE_CHECKING:
    from hotlap.export.bench import Measured
    from hotlap.export.folders import Tuned
    from hotlap.export.serve import Plan

Form = Literal["adapter", "merged", "fp8"]
_READY_S = 900.0


@click.command(
    epilog="""\b
Example:
  hotlap serve my-run --form merged --speculative ngram:4
"""
)
@click.argument("run")
@OUTPUT_DIR
@click.option(
    "--form",
    default="adapter",
    show_default=True,
    type=click.Choice(["adapter", "merged", "fp8"]),
    help="The adapter beside its base model, or what hotlap export has made.",
)
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "vllm", "transformers"]),
    help="auto: vLLM if it is installed.",
)
@click.option(
    "--vllm",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The vllm program, if it is not on the PATH.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option(
    "--speculative",
    metavar="HOW",
    help="Draft tokens ahead (vLLM): mtp:2 (the model's own drafter), ngram:4, draft:MODEL.",
)
@click.option("--dry-run", is_flag=True, help="Print the server's command line, and start nothing.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve(
    run: str,
    output_dir: Path,
    form: Form,
    engine: str,
    vllm: Path | None,
    host: str,
    port: int,
    speculative: str | None,
    dry_run: bool,
    options: tuple[str, ...],
) -> None:
    """Serve RUN's model until Ctrl-C, OpenAI-compatible; its URL is printed once it answers.

    OPTIONS after -- go to the server as they are. Nothing is trained on this machine meanwhile.
    """
    import shlex

    from hotlap.export import serve as server

    tuned = tuned_of(run, output_dir, talk)
    plan = _plan(tuned, form, host, port, speculative, options)
    kind, program = server.find_engine(engine, vllm)
    argv = (server.vllm_argv if kind == "vllm" else server.transformers_argv)(program, plan)
    if dry_run:
        click.echo(shlex.join(argv))
        return
    talk(f"Starting {kind}: {shlex.join(argv)}")
    server.run(argv, plan, _READY_S, lambda: click.echo(f"{plan.url}/v1"), talk)


def _plan(
    tuned: "Tuned", form: Form, host: str, port: int, speculative: str | None, options: tuple[str, ...]
) -> "Plan":
    from hotlap import artifacts, durable
    from hotlap.errors import CorruptFile, MissingArtifact
    from hotlap.export import folders
    from hotlap.export import serve as server

    speculation = None
    if speculative is not None:
        speculation = server.parse_speculation(
            speculative, lambda: server.drafter_of(tuned.base_ref, tuned.base), artifacts.locate_model
        )
    name = tuned.run.name
    if form == "adapter":
        return server.Plan(name, tuned.base, tuned.adapter, host, port, speculation, options)
    folder = folders.folder_of(tuned.run, form)
    try:
        found = durable.verify(folder)
    except CorruptFile as error:
        command = "merge" if form == "merged" else form
        raise MissingArtifact(f"{error} Run `hotlap export {command} {name}` first.") from None
    if {key: found.get(key) for key in tuned.identity()} != tuned.identity():
        talk(f"{folder} was made of step {found.get('step')}, and step {tuned.step} is there by now.")
    return server.Plan(name, folder, None, host, port, speculation, options)


@click.command(
    epilog="""\b
Example:
  hotlap bench http://127.0.0.1:8000 --concurrency 4
"""
)
@click.argument("url")
@click.option("--compare", metavar="URL2", help="A second server, measured in turns with the first.")
@click.option("--model", help="Name to ask for; else the adapter that is served, else the first model.")
@click.option("--concurrency", default=1, show_default=True, type=click.IntRange(min=1), help="Requests at once.")
@click.option(
    "--max-tokens", default=128, show_default=True, type=click.IntRange(min=1), help="Longest answer in tokens."
)
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="How often every prompt is asked."
)
@click.option(
    "--prompts",
    default="all",
    show_default=True,
    type=click.Choice(["all", "ordinary", "repetitive"]),
    help="Which of the frozen prompts.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="A chart as SVG (the report extra).")
@click.option("--json", "as_json", is_flag=True, help="Every figure, as JSON.")
def bench(
    url: str,
    compare: str | None,
    model: str | None,
    concurrency: int,
    max_tokens: int,
    rounds: int,
    prompts: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure the server at URL: time to first token, time per token, output tokens a second, drafts accepted.

    With --compare, two servers take turns, and the ratio of their output speeds is printed with its spread.
    """
    from hotlap.export import bench as measuring
    from hotlap.export import prompts as frozen

    urls = [url] if compare is None else [url, compare]
    for each in urls:
        if not each.startswith(("http://", "https://")):
            raise UsageError(f"{each} is no address of a server. Give one such as http://127.0.0.1:8000.")
    report: dict[str, Any] = {}
    for name, texts in frozen.load().items():
        if prompts in ("all", name):
            talk(f"{len(texts)} {name} prompts, {concurrency} at once, {rounds} rounds")
            load = measuring.Load(tuple(texts), concurrency, max_tokens, rounds)
            found = measuring.measure(urls, [model] * len(urls), load, talk)
            report[name] = {"servers": [each.as_json() for each in found]}
            if compare is not None:
                report[name]["ratio"] = measuring.ratios(*found)
            if not as_json:
                _print(name, found, report[name].get("ratio"))
    if as_json:
        click.echo(json.dumps(report))
    if plot is not None:
        from hotlap.cli import written
        from hotlap.report import chart, serving

        written.write(plot, chart.svg_of(serving.charts(report)))


_COLUMNS = (
    *("prompts", "server", "tokens/s", "ttft p50 s", "ttft p95 s", "ttft p99 s"),
    *("tpot p50 s", "tpot p95 s", "tpot p99 s", "accepted"),
)


def _print(name: str, found: "list[Measured]", ratio: dict[str, float] | None) -> None:
    from hotlap.cli.runs import print_table

    rows: list[dict[str, Any]] = []
    for each in found:
        row: dict[str, Any] = {"prompts": name, "server": each.url, "tokens/s": each.tokens_per_s}
        row |= {f"ttft {rank} s": each.ttft_s.get(rank) for rank in ("p50", "p95", "p99")}
        row |= {f"tpot {rank} s": each.tpot_s.get(rank) for rank in ("p50", "p95", "p99")}
        rows.append({**row, "accepted": each.acceptance})
    print_table(rows, _COLUMNS)
    if ratio is not None:
        click.echo(
            f"{name}: the second server gives {ratio['median']:.2f} times the output tokens/s of the first "
            f"({ratio['least']:.2f} to {ratio['most']:.2f}, by round)"
        )
