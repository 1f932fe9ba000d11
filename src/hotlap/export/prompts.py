"""The frozen prompts: what models and servers are asked when they are compared."""

import json
from pathlib import Path


def load() -> dict[str, list[str]]:
    """Prompts by set: `ordinary`, and `repetitive` ones whose answers repeat what stands in them."""
    return json.loads(Path(__file__).with_name("prompts.json").read_bytes())
