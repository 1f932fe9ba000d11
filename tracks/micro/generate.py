"""Rows of track micro: a short word, and `y` if its last letter is a vowel, else `n`. Standard library only."""

import argparse
import hashlib
import json

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw(below: int, *what: object) -> int:
    digest = hashlib.sha256("\0".join(map(str, what)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % below


def row(split: str, seed: str, number: int) -> dict[str, str]:
    wants_vowel = draw(2, split, seed, number, "class")
    letters = [letter for letter in LETTERS if (letter in "aeiou") == bool(wants_vowel)]
    first = LETTERS[draw(len(LETTERS), split, seed, number, "first")]
    last = letters[draw(len(letters), split, seed, number, "last")]
    return {"question": first + last, "answer": "y" if wants_vowel else "n"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", choices=("train", "test"), required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--rows", type=int, required=True)
    given = parser.parse_args()
    for number in range(given.rows):
        print(json.dumps({"event": "row", "row": row(given.split, given.seed, number)}))


if __name__ == "__main__":
    main()
