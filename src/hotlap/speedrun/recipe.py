"""A submission as a recipe: settings of hotlap's own trainer in `recipe.toml`, in place of a `train.py`.

The harness fills in what a submission may not choose (model, rows, seed, threads, length of the only slice) and runs
the whole training in one process of `hotlap.train.recipe`. Prompts are the track's own words, without a chat template.
"""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hotlap import durable
from hotlap.config import RunConfig
from hotlap.errors import ConfigError
from hotlap.speedrun.track import Row, Spec

RECIPE = "recipe.toml"
PLACE = "/recipe"
_GIVEN = ("base_model", "dataset", "output_dir", "run", "seed", "slice")
_GIVEN_BELOW = {
    "data": ("format", "columns", "files", "weight", "mix", "eval_dataset", "chat_template", "system"),
    "lora": ("init_from",),
}
_PLAIN = "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"  # noqa: E501


def read(path: Path) -> dict[str, Any]:
    """The settings of a recipe, checked as far as they can be without a model.

    Raises:
        ConfigError: they are not TOML, not settings of `hotlap train`, or of those that the harness gives.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {str(error)[:200]}") from None
    tables = {name: value for name, value in tree.items() if isinstance(value, dict)}
    taken = [name for name in _GIVEN if name in tree]
    taken += [
        f"{table}.{name}" for table, names in _GIVEN_BELOW.items() for name in names if name in tables.get(table, {})
    ]
    if taken:
        raise ConfigError(f"{path.name}: {', '.join(taken)}: the track and the verifier give that; leave it out.")
    try:
        RunConfig.model_validate({**tree, "base_model": "m", "dataset": "d"})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{path.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return tree


def write_inputs(settings: dict[str, Any], spec: Spec, rows: list[Row], model: str, seed: int, folder: Path) -> None:
    """Everything that `hotlap.train.recipe` is given, to be seen in `PLACE`. `model` is the base's place in the run."""
    asked = [{"prompt": spec.metric.prompt.format_map(row), "completion": f" {row['answer']}"} for row in rows]
    config = RunConfig.model_validate(
        {
            **settings,
            "base_model": model,
            "dataset": f"{PLACE}/train.jsonl",
            "output_dir": "/tmp/runs",
            "run": "recipe",
            "seed": seed,
            "data": {**settings.get("data", {}), "format": "completion", "chat_template": f"{PLACE}/plain.jinja"},
            "slice": {"minutes": spec.limits.time_limit_s / 60, "num_threads": spec.hardware.threads},
        }
    )
    durable.make_dirs(folder)
    lines = "".join(durable.canonical_json(row) + "\n" for row in asked)
    durable.write_synced(folder / "train.jsonl", lines.encode())
    durable.write_synced(folder / "plain.jinja", _PLAIN.encode())
    durable.write_synced(folder / "config.json", config.model_dump_json().encode())
