"""`hotlap export`: a run's model in the form that a server reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hotlap.cli.runs import OUTPUT_DIR

if TYPE_CHECKING:
    from hotlap.export.folders import Tuned

Form = Literal["merge", "fp8", "gguf"]


@click.command(
    epilog="""\b
Example:
  hotlap export merge my-run
"""
)
@click.argument("form", type=click.Choice(["merge", "fp8", "gguf"]))
@click.argument("run")
@OUTPUT_DIR
@click.option(
    "--precision",
    default="base",
    show_default=True,
    type=click.Choice(["base", "float32", "bfloat16", "float16"]),
    help="Of the merged weights.",
)
@click.option(
    "--type",
    "kind",
    default="q8_0",
    show_default=True,
    type=click.Choice(["f16", "q8_0", "q4_k_m"]),
    help="Of the matrices in a GGUF file; q4_k_m by your llama.cpp.",
)
@click.option(
    "--llama-quantize", type=click.Path(path_type=Path, exists=True), help="llama.cpp's program, if not on the PATH."
)
@click.option("--json", "as_json", is_flag=True, help="Folder and report as JSON.")
def export(
    form: Form, run: str, output_dir: Path, precision: str, kind: str, llama_quantize: Path | None, as_json: bool
) -> None:
    """Make a model of RUN's best adapter, in RUN's folder under export/.

    merge: one ordinary model folder; its logits are those of base and adapter, or it is not published. fp8: weights in
    FP8 for vLLM, half as large, by llm-compressor (hotlap prefetch --tool fp8). gguf: one file for llama.cpp, loaded
    back and compared. What is here already is verified.
    """
    tuned = tuned_of(run, output_dir, talk)
    if form == "merge":
        from hotlap.export import folders

        made = folders.merged(tuned, precision, talk)
    elif precision != "base":
        raise click.UsageError(f"--precision is for merge; {form} has a precision of its own.")
    else:
        from hotlap.export import quantize

        made = quantize.fp8(tuned, talk) if form == "fp8" else quantize.gguf(tuned, kind, llama_quantize, talk)
    if as_json:
        click.echo(json.dumps({"folder": str(made.folder), **made.facts}))
    else:
        click.echo(made.folder)


def tuned_of(run: str, output_dir: Path, say: Callable[[str], None]) -> "Tuned":
    """A run's base model and its best adapter.

    Raises:
        UsageError: there is no such run, or it has no adapter yet.
        RunChanged: the base model is not what the run was trained on.
    """
    from hotlap.cli.generate import asked_as_trained, base_model, choose_adapter
    from hotlap.export.folders import Tuned
    from hotlap.runs import find_run, read_identity

    folder = find_run(run, output_dir)
    base, model = base_model(folder)
    identity = read_identity(folder)
    assert identity is not None  # `base_model` has read it
    choice = choose_adapter(folder, say)
    say(f"Taking {choice.in_words}.")
    template = asked_as_trained(folder).get("chat_template")
    return Tuned(
        run=folder.path,
        base_ref=identity.trajectory["base_model"],
        base=base,
        adapter=choice.folder.absolute(),
        step=choice.step,
        model=model,
        chat_template=Path(template) if template else None,
        packed=identity.packed,
    )


def talk(line: str) -> None:
    from hotlap.cli.progress import plain

    click.echo(plain(line), err=True)
