"""Leases for tests."""

from typing import Any

from hotlap.cloud.lease import Lease
from hotlap.cloud.money import Rate

NOON_S = 1_800_014_400.0
"""Noon of a UTC day."""


def make_lease(lease_id: str = "a" * 16, **changes: Any) -> Lease:
    """A lease of a machine at $3.60 an hour, 100 s long, held at noon."""
    fields: dict[str, Any] = {
        "lease_id": lease_id,
        "run": f"run-{lease_id}",
        "owner": "me",
        "provider": "local",
        "gpu": "local",
        "nonce": "n",
        "usd_micros_per_hour": 3_600_000,
        "num_gpus": 1,
        "billing_unit_s": 1,
        "began_s": NOON_S,
        "not_after_s": int(NOON_S) + 100,
        "gpu_s": 100,
        "usd_micros": 100_000,
        **changes,
    }
    return Lease(**fields)


def hold_of(seconds: float, **changes: Any) -> dict[str, int]:
    """What a lease of that length holds."""
    cost = Rate(**{"usd_micros_per_hour": 3_600_000, "num_gpus": 1, "billing_unit_s": 1, **changes}).cost(seconds)
    return {"gpu_s": cost.gpu_s, "usd_micros": cost.usd_micros}
