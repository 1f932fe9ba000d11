"""What machines really cost: the oracle that a ledger is held against. It knows nothing of the emulator's states."""

import math
from dataclasses import dataclass

_HOUR_S = 3600
_DISK_USD_MICROS_PER_GB_HOUR = 139
"""0.10 dollars per GB and month of 720 hours, rounded up."""


@dataclass
class _Stretch:
    """Of a machine's life: it computes, then keeps its disk, then is gone or computes again."""

    begins_s: float
    usd_micros_per_hour: int
    disk_gb: int
    computes_until_s: float = math.inf
    ends_s: float = math.inf

    def computed_s(self, now_s: float) -> int:
        return max(0, math.ceil(min(now_s, self.ends_s, self.computes_until_s) - self.begins_s))

    def usd_micros(self, now_s: float) -> int:
        kept_s = max(0.0, min(now_s, self.ends_s) - self.computes_until_s)
        disk = math.ceil(kept_s) * self.disk_gb * _DISK_USD_MICROS_PER_GB_HOUR
        return -(-(self.computed_s(now_s) * self.usd_micros_per_hour + disk) // _HOUR_S)


class Meter:
    """Seconds times price for every machine, from its creation to its end; every begun second counts whole.

    A machine that stopped computing pays for its disk until it is deleted. While it computes, its price includes it.
    """

    def __init__(self) -> None:
        self._stretches: dict[str, list[_Stretch]] = {}

    def begin(self, machine_id: str, at_s: float, usd_micros_per_hour: int, disk_gb: int) -> None:
        stretches = self._stretches.setdefault(machine_id, [])
        if stretches:
            stretches[-1].ends_s = min(stretches[-1].ends_s, at_s)
        stretches.append(_Stretch(at_s, usd_micros_per_hour, disk_gb))

    def stop_computing(self, machine_id: str, at_s: float) -> None:
        stretch = self._stretches[machine_id][-1]
        stretch.computes_until_s = min(stretch.computes_until_s, at_s)

    def end(self, machine_id: str, at_s: float) -> None:
        stretch = self._stretches[machine_id][-1]
        stretch.ends_s = min(stretch.ends_s, at_s)

    def usd_micros(self, now_s: float, machine_id: str | None = None) -> int:
        """Of one machine, or of all."""
        names = self._stretches if machine_id is None else [machine_id]
        return sum(stretch.usd_micros(now_s) for name in names for stretch in self._stretches[name])

    def seconds(self, now_s: float, machine_id: str) -> int:
        """For how long it computed."""
        return sum(stretch.computed_s(now_s) for stretch in self._stretches[machine_id])

    def rows(self, now_s: float) -> list[dict[str, object]]:
        return [
            {"machine_id": name, "seconds": self.seconds(now_s, name), "usd_micros": self.usd_micros(now_s, name)}
            for name in self._stretches
        ]
