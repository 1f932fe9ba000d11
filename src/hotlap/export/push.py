"""A run's adapter or merged model on a model hub, with a card that says what it is and how it came about.

The token comes from `HF_TOKEN` and goes nowhere else; no path of this machine goes into the card.
"""

import html
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from hotlap import durable, runs
from hotlap.errors import FetchFailed, UsageError
from hotlap.export.folders import Tuned
from hotlap.export.task import Say

_PLACES = ("base_model", "dataset", "seed")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Cost:
    """What a run's machines were charged, by the ledger of this home."""

    num_machines: int
    gpu_s: int
    usd_micros: int


def push(tuned: Tuned, folder: Path, repo_id: str, is_private: bool, card: str, say: Say) -> str:
    """Put a published folder of a run into a repository, made if it is not there, as one commit. Its address.

    Raises:
        CorruptFile: the folder is not what was published.
        UsageError: that is no repository's name, or there is no token.
        FetchFailed: the hub did not take it.
    """
    if not _HUB_ID.fullmatch(repo_id):
        raise UsageError(f"{repo_id!r} is no repository's name. Say org/name.")
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise UsageError("Pushing needs a token that may write. Set HF_TOKEN.")
    durable.verify(folder)
    files = files_of(folder)
    api = HfApi(token=token, endpoint=os.environ.get("HF_ENDPOINT"))
    operations = [CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=card.encode())]
    operations += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in files.items()]
    say(f"Pushing {len(operations)} files, {sum(path.stat().st_size for path in files.values()) / 1e6:,.1f} MB.")
    try:
        api.create_repo(repo_id, private=is_private, exist_ok=True)
        done = api.create_commit(
            repo_id, operations, commit_message=f"hotlap: {tuned.run.name}, step {tuned.step}", num_threads=2
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        way_out = "Check that HF_TOKEN may write there" if status in (401, 403) else "Wait a moment"
        raise FetchFailed(
            f"The hub answered {status} for {repo_id}. {way_out}, then run the same command again."
        ) from error
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FetchFailed(
            f"{repo_id} was not pushed ({why[:300]}). Check the network, and run the command again."
        ) from error
    return str(done.commit_url)


def files_of(folder: Path) -> dict[str, Path]:
    """What is pushed of a published folder: everything that its manifest lists, but for a checkpoint's own state."""
    names: list[str] = sorted(durable.read_manifest(folder)["files"])
    is_adapter = "adapter_config.json" in names
    state = {name for name in names if is_adapter and not name.startswith(("adapter_", "tokenizer", "chat_template"))}
    return {name: folder / name for name in names if name not in state | {"README.md"}}


# --- the card ---


def card_of(
    tuned: Tuned, identity: runs.Identity, facts: dict[str, Any], slices: list[runs.SliceState], cost: Cost | None
) -> str:
    """A model card: base, data, recipe, metrics, slices, cost. `facts` are those of the pushed folder's manifest."""
    run = runs.RunFolder(tuned.run)
    head: dict[str, Any] = {
        "tags": ["hotlap", "lora"],
        "library_name": "peft" if "kind" not in facts else "transformers",
    }
    if _HUB_ID.fullmatch(tuned.base_ref.partition("@")[0]):
        head["base_model"] = tuned.base_ref.partition("@")[0]
    tables = {
        "Base model": {"base": _name(tuned.base_ref), **_hashes(identity.base_pins, (".safetensors",))},
        "Data": _data(identity),
        "Metrics": _metrics(run, tuned.step),
        "Slices": _slices(slices),
        "Cost": _cost(cost),
        "Proof": {key: value for key, value in facts.items() if key.startswith(("error_to", "val_loss"))},
    }
    text = f"# {_plain(tuned.run.name)}\n\nFine-tuned in time-boxed slices by hotlap"
    text += f"; step {tuned.step} of {identity.num_steps}, seed {identity.seed}.\n"
    for title, rows in tables.items():
        if rows:
            text += f"\n## {title}\n\n| | |\n| --- | --- |\n"
            text += "".join(f"| {_plain(key)} | {_plain(value)} |\n" for key, value in rows.items())
    text += f"\n## Recipe\n\n```json\n{json.dumps(_recipe(identity), indent=1)}\n```\n"
    return f"---\n{yaml.safe_dump(head, sort_keys=True)}---\n\n{text}"


def _recipe(identity: runs.Identity) -> dict[str, Any]:
    """What was set, without what says where things lie."""
    recipe = {key: value for key, value in identity.trajectory.items() if key not in _PLACES}
    data: dict[str, Any] = recipe.get("data", {})
    kept = {key: value for key, value in data.items() if key not in ("mix", "eval_dataset", "chat_template")}
    lora = {key: value for key, value in recipe.get("lora", {}).items() if key != "init_from"}
    return {**recipe, "data": kept, "lora": lora}


def _data(identity: runs.Identity) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, pins in identity.data_pins.items():
        found |= {f"{place}: {name}": f"sha256 {entry['sha256']}" for name, entry in pins.items()}
    return {**found, **{f"packed {name}": fingerprint for name, fingerprint in identity.packed.items()}}


def _hashes(pins: dict[str, Any], suffixes: tuple[str, ...]) -> dict[str, str]:
    return {name: f"sha256 {entry['sha256']}" for name, entry in pins.items() if name.endswith(suffixes)}


def _metrics(run: runs.RunFolder, step: int) -> dict[str, Any]:
    rows = [row for row in durable.read_rows(run.metrics) if row["step"] <= step]
    last = {key: row[key] for row in rows for key in ("loss", "val_loss") if key in row}
    return {f"{key} (nats per trained token)": f"{value:.4f}" for key, value in last.items()}


def _slices(slices: list[runs.SliceState]) -> dict[str, Any]:
    if not slices:
        return {}
    seconds = [state.exit["wall_s"] for state in slices if state.exit is not None and "wall_s" in state.exit]
    return {"slices": len(slices), "seconds in them": f"{sum(seconds):.0f}", "last ended with": slices[-1].ending}


def _cost(cost: Cost | None) -> dict[str, Any]:
    if cost is None:
        return {"charged": "nothing: no rented machine stands in the ledger for this run"}
    return {
        "rented machines": cost.num_machines,
        "GPU minutes": f"{cost.gpu_s / 60:.1f}",
        "charged": f"${cost.usd_micros / 1e6:.4f}",
    }


def _name(ref: str) -> str:
    """A reference without this machine's folders."""
    return Path(ref).name if ref.startswith(("/", ".", "~")) else ref


def _plain(value: Any) -> str:
    text = re.sub(r"[\s|`]+", " ", str(value))
    return html.escape(text if not isinstance(value, float) else f"{value:.4g}", quote=False)
