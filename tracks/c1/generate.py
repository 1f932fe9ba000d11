"""Rows of track c1: a sentence with a date in it, and that date in ISO form. Standard library only.

Training and test share the ways of writing a date and no sentence. Every choice is a hash of (seed, row, what), so
the rows are the same under every version of Python.
"""

import argparse
import datetime
import hashlib
import json

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

SENTENCES = {
    "train": (
        "{}",
        "The invoice is dated {}.",
        "She was born on {} in Leeds.",
        "Delivery: {}",
        "We met on {}, I think.",
        "Please reply before {}.",
        "Contract signed {} by both sides.",
        "On {} the shop was closed.",
        "Next check-up: {} at noon.",
        "It has been so since {}.",
    ),
    "test": (
        "The bridge opened on {}.",
        "Date of issue: {}",
        "Our train leaves on {} at nine.",
        "{} was a rainy day.",
        "They moved here on {} with two cats.",
        "Valid until {} only.",
    ),
}


def ordinal(day: int) -> str:
    suffix = "th" if 11 <= day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{suffix}"


# Numeric dates are day first; two-digit years mean 1950 to 2049.
FORMS = (
    lambda d: f"{d.day} {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{MONTHS[d.month - 1]} {d.day}, {d.year}",
    lambda d: f"{d.day:02}/{d.month:02}/{d.year}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
    lambda d: f"{d.year}/{d.month:02}/{d.day:02}",
    lambda d: f"{MONTHS[d.month - 1][:3]} {d.day} {d.year}",
    lambda d: f"the {ordinal(d.day)} of {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{DAYS[d.weekday()]}, {d.day} {MONTHS[d.month - 1][:3]} {d.year}",
    lambda d: f"{d.day:02}-{MONTHS[d.month - 1][:3].upper()}-{d.year}",
    lambda d: f"{d.day:02}/{d.month:02}/{d.year % 100:02}",
)


def draw(below: int, *what: object) -> int:
    digest = hashlib.sha256("\0".join(map(str, what)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % below


def row(split: str, seed: str, number: int) -> dict[str, str]:
    first, last = datetime.date(1950, 1, 1).toordinal(), datetime.date(2049, 12, 31).toordinal()
    date = datetime.date.fromordinal(first + draw(last - first + 1, split, seed, number, "date"))
    text = FORMS[draw(len(FORMS), split, seed, number, "form")](date)
    sentence = SENTENCES[split][draw(len(SENTENCES[split]), split, seed, number, "sentence")].format(text)
    return {"question": sentence[0].upper() + sentence[1:], "answer": date.isoformat()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", choices=sorted(SENTENCES), required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--rows", type=int, required=True)
    given = parser.parse_args()
    for number in range(given.rows):
        print(json.dumps({"event": "row", "row": row(given.split, given.seed, number)}))


if __name__ == "__main__":
    main()
