"""Receipts: one JSON file per lease, from the intent before the create to the proof of death and the settlement."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.cloud.lease import Lease
from hotlap.config import hotlap_home

_LATELY_S = 2 * 86_400.0


class Receipt:
    """A lease's file. Every `note` is on the disk when it returns, so the next act may follow."""

    def __init__(self, path: Path, redact: Callable[[str], str] = lambda text: text) -> None:
        self.path = path
        self._redact = redact
        self.facts: dict[str, Any] = _read(path) if path.exists() else {"format": 1, "times": {}}

    def note(self, at: tuple[str, float] | None = None, **facts: Any) -> None:
        """Add facts, and the name and moment of what just happened."""
        self.facts |= facts
        if at is not None:
            self.facts["times"].setdefault(*at)
        durable.make_dirs(self.path.parent)
        text = json.dumps(self.facts, indent=1, allow_nan=False) + "\n"
        durable.replace(self.path, self._redact(text).encode())

    def settle(self, lease: Lease, proof: dict[str, Any] | None) -> None:
        self.note(
            lease_id=lease.lease_id,
            run=lease.run,
            owner=lease.owner,
            proof=proof,
            settlement={
                "state": lease.state,
                "gpu_s": lease.gpu_s,
                "usd_micros": lease.usd_micros,
                "ended_s": lease.ended_s,
                "note": lease.note,
            },
        )


def _read(path: Path) -> dict[str, Any]:
    """What is there. A damaged one says that it was, and keeps nobody from ending machines and closing leases."""
    with contextlib.suppress(ValueError):
        facts = json.loads(path.read_bytes())
        if isinstance(facts, dict) and isinstance(facts.get("times"), dict):
            return facts
    return {"format": 1, "times": {}, "was_damaged": True}


def may_be_sent(lease_id: str) -> bool:
    """Whether the create of a lease may have left: only a whole receipt that lacks the moment speaks against it."""
    path = receipt_path(lease_id)
    facts = Receipt(path).facts
    return not path.exists() or "sent" in facts["times"] or "was_damaged" in facts


def receipt_path(lease_id: str) -> Path:
    return hotlap_home() / "receipts" / f"{lease_id}.json"


def open_receipt(lease_id: str, redact: Callable[[str], str] = lambda text: text) -> Receipt:
    return Receipt(receipt_path(lease_id), redact)


def without_settlement() -> list[str]:
    """Leases of this home whose receipt was written to lately and does not say how it ended."""
    since_s = clock.wall_s() - _LATELY_S
    folder = hotlap_home() / "receipts"
    recent = [path for path in folder.glob("*.json") if path.stat().st_mtime >= since_s]
    return [path.stem for path in recent if "settlement" not in Receipt(path).facts]
