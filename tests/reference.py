"""The reference pages, made from the code: `mkdocs build` calls `on_files`, and a test reads what comes out."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).parent))
import readme

from hotlap import checkpoint, durable, runs
from hotlap.cli import cli
from hotlap.cloud import receipts
from hotlap.config import CloudConfig, RunConfig
from hotlap.research import board, history
from hotlap.research.space import StudyConfig
from hotlap.speedrun import records
from hotlap.speedrun.track import Spec

FILES: dict[str, ModuleType] = {
    "A run": runs,
    "A checkpoint": checkpoint,
    "Published directories and logs": durable,
    "A receipt": receipts,
    "A study": history,
    "A study's board": board,
    "A track's records": records,
}
"""What is on a disk, and the module whose docstring tells it."""


@cache
def pages() -> dict[str, str]:
    """Every reference page, by its path below `docs`."""
    return {
        "reference/cli.md": _command_line(),
        "reference/config.md": _configuration(),
        "reference/files.md": _files(),
        "reference/exit-codes.md": _exit_codes(),
    }


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' hook: adds the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs' hook: links to what is in the repository and not on the site become plain text."""
    folder = Path(config["docs_dir"]) / Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        is_page = target.is_relative_to(config["docs_dir"]) and target.is_file()
        return match[1] if target.exists() and not is_page else match[0]

    return re.sub(r"\[([^\]]+)\]\(([^)#:]+)\)", link, markdown)


# --- command line ---


def _command_line() -> str:
    return "\n".join(["# Command line", "", *_commands(cli, "hotlap", None)])


def _commands(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, info_name=name.split()[-1], parent=parent, max_content_width=100)
    yield from ["", f"## `{name}`", "", "```text", command.get_help(context), "```"]
    if isinstance(command, click.Group):
        for child in sorted(command.commands):
            yield from _commands(command.commands[child], f"{name} {child}", context)


# --- configuration ---


def _configuration() -> str:
    parts = [
        ("A run", "A TOML file for `hotlap train`, `preview` and `launch`, or `--set KEY=VALUE`.", RunConfig),
        ("Limits and providers", "`$HOTLAP_HOME/cloud.toml`. Nothing but an edit of it changes a limit.", CloudConfig),
        ("A study", "The file that `hotlap research` is given; this is its `[study]`.", StudyConfig),
        ("A track", "`tracks/ID/spec.toml` of a contest.", Spec),
    ]
    lines = ["# Configuration", "", "Unknown keys are errors. A setting that is absent is off, or as its row says."]
    for title, text, model in parts:
        lines += ["", f"## {title}", "", text, *_tables(model, "")]
    return "\n".join(lines) + "\n"


def _tables(model: type[BaseModel], prefix: str) -> Iterator[str]:
    told = docstrings(model)
    nested: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for name, field in model.model_fields.items():
        inner = _models_in(field)
        if inner and field.annotation is inner[0]:
            nested.append((f"{prefix}{name}", inner[0]))
            continue
        rows.append(f"| `{prefix}{name}` | {_kind(field)} | {_default(field)} | {_cell(told.get(name, ''))} |")
        nested += [(f"{prefix}{name}[]", each) for each in inner]
    if rows:
        yield from ["", "| key | value | default | meaning |", "| --- | --- | --- | --- |", *rows]
    for name, inner_model in nested:
        is_variant = sum(name == other for other, _ in nested) > 1
        yield from ["", f"### `{name.removesuffix('[]')}`{f': {inner_model.__name__}' if is_variant else ''}"]
        yield from _tables(inner_model, f"{name.removesuffix('[]')}.")


def _models_in(field: FieldInfo) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    waiting: list[Any] = [field.annotation]
    while waiting:
        each = waiting.pop()
        if inspect.isclass(each) and issubclass(each, BaseModel):
            found.append(each)
        waiting += get_args(each)
    return found


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """What stands below each field in the source."""
    found: dict[str, str] = {}
    for kind in reversed([each for each in model.__mro__ if issubclass(each, BaseModel) and each is not BaseModel]):
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[union-attr]
    return found


def _kind(field: FieldInfo) -> str:
    text = inspect.formatannotation(field.annotation)
    for long, short in (("typing.", ""), ("None", "absent"), ("pathlib.", "")):
        text = text.replace(long, short)
    text = text.rpartition(".")[2] if "." in text and "[" not in text else text
    bounds = [str(item) for item in field.metadata if type(item).__name__ in ("Ge", "Gt", "Le", "Lt")]
    signs = {"Ge(ge=": "≥ ", "Gt(gt=": "> ", "Le(le=": "≤ ", "Lt(lt=": "< "}
    told = [
        sign + item.removeprefix(start).rstrip(")") for item in bounds for start, sign in signs.items() if start in item
    ]
    return _cell(", ".join([f"`{text}`", *told]))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "absent" if value is None else f"`{_cell(repr(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- files, exit codes ---


def _files() -> str:
    lines = [
        "# Files",
        "",
        "As the modules that write them tell it. A directory without a valid manifest does not exist.",
    ]
    for title, module in FILES.items():
        lines += ["", f"## {title}", "", "```text", inspect.cleandoc(module.__doc__ or ""), "```"]
    return "\n".join(lines) + "\n"


def _exit_codes() -> str:
    head = (
        "# Exit codes\n\nPart of the contract. The reason stands in the last line on standard error, and in `--json`."
    )
    return f"{head}\n\n| code | reason words | meaning |\n| --- | --- | --- |\n{readme.exit_codes()}\n"


if __name__ == "__main__":
    for text in pages().values():
        print(text)
