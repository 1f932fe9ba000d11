"""A journal as it goes to a machine without a volume: with what judging needs, and whole again when it comes home."""

import json

from hotlap import durable
from hotlap.research.executor import NUMBERS

_GOES = frozenset(("val_search_nats_per_byte", "val_lock_nats_per_byte", "params", "floors"))
"""Losses and sizes decide, and whoever proposes is told the floors."""

_STAYS = frozenset(NUMBERS) - _GOES
"""What else was measured of a run, for people and charts: three quarters of its row."""


def thinned(journal: bytes) -> bytes:
    """The same rows without what stays here."""
    return b"".join(map(_thinned, journal.splitlines(keepends=True)))


def _thinned(line: bytes) -> bytes:
    try:
        row = json.loads(line)
    except ValueError:  # a torn last line
        return line
    less = {key: None if key in _STAYS else value for key, value in row.items()}
    return durable.canonical_json(less).encode() + b"\n"


def restored(here: bytes, came: bytes) -> bytes:
    """What came home, each row that went from here as it is here."""
    mine, theirs = here.splitlines(keepends=True), came.splitlines(keepends=True)
    mine += theirs[len(mine) :]
    return b"".join(
        whole if whole != line and _thinned(whole) == line else line for whole, line in zip(mine, theirs, strict=False)
    )
