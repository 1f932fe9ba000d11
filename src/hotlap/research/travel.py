"""A journal as it goes to a machine without a volume: with what judging needs, and whole again when it comes home."""

import json

from hotlap import durable
from hotlap.errors import CorruptFile
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
    """What is here, and the rows that came behind it. A machine may be a stranger's, so nothing here is changed by it.

    Raises:
        CorruptFile: it is no continuation of what is here.
    """
    mine = [line for line in here.splitlines(keepends=True) if line.endswith(b"\n")]  # a torn last line is none
    theirs = came.splitlines(keepends=True)
    if [_thinned(line) for line in mine] != [_thinned(line) for line in theirs[: len(mine)]]:
        raise CorruptFile("the journal that came is no continuation of the one here, which is left as it is")
    return b"".join([*mine, *theirs[len(mine) :]])
