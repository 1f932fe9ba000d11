"""The seed firewall: every seed and every coin of a study is a hash of its secret and of what it is for.

Nobody who chooses a configuration can choose or repeat a seed. The secret lies in the study's folder; the journal's
first line holds its hash, so that it can be shown later that it was not exchanged.
"""

import hashlib
import random


def number(secret: bytes, *purpose: object) -> int:
    """31 bits, the same for the same purpose for ever."""
    return int.from_bytes(_digest(secret, purpose)[:4], "big") >> 1


def word(secret: bytes, *purpose: object) -> str:
    """A salt of 16 letters."""
    return _digest(secret, purpose).hex()[:16]


def source(secret: bytes, *purpose: object) -> random.Random:
    """A generator of its own for one purpose."""
    return random.Random(int.from_bytes(_digest(secret, purpose), "big"))


def commitment(salt: str, is_placebo: bool) -> str:
    """What is written before a run; salt and answer are revealed with the decision."""
    return hashlib.sha256(f"{salt}:{'placebo' if is_placebo else 'change'}".encode()).hexdigest()


def _digest(secret: bytes, purpose: tuple[object, ...]) -> bytes:
    return hashlib.sha256(secret + b"|" + "|".join(map(str, purpose)).encode()).digest()
