"""Rows of track c2: an order as somebody writes it, and its fields as `number; amount; goods; city`. Standard library
only.

Training and test share the goods, and neither a sentence nor a city. Every choice is a hash of (seed, row, what), so
the rows are the same under every version of Python.
"""

import argparse
import hashlib
import json

MATERIALS = ("oak", "steel", "glass", "linen", "copper", "wool", "pine", "marble", "leather", "bamboo")
THINGS = (
    *("doors", "chairs", "lamps", "shelves", "bowls", "tables", "blankets", "frames", "handles", "baskets"),
    *("mirrors", "benches", "trays", "curtains", "hooks", "vases"),
)

CITIES = {
    "train": (
        *("Lyon", "Leeds", "Porto", "Turin", "Ghent", "Bergen", "Graz", "Malaga", "Gdansk", "Aarhus", "Cork", "Basel"),
        *("Nantes", "Bremen", "Tampere", "Utrecht", "Bilbao", "Verona", "Brno", "Varna", "Lausanne", "Dundee"),
    ),
    "test": (
        *("Seville", "Dresden", "Bologna", "Malmo", "Rouen", "Cardiff", "Linz", "Antwerp", "Krakow", "Braga"),
        *("Toulouse", "Trieste", "Galway", "Odense", "Zaragoza", "Maribor"),
    ),
}

# {n} order number, {q} amount, {g} goods, {c} city
SENTENCES = {
    "train": (
        "Order {n}: {q} {g} to {c}.",
        "Please send {q} {g} to {c}, order {n}.",
        "We need {q} {g} in {c}; the order is {n}.",
        "For {c}, order {n}, ship {q} {g} this week.",
        "Customer in {c} wants {q} {g} (no. {n}).",
        "No. {n} is for {c}: {q} {g}.",
        "{q} {g} go to our shop in {c} under order {n}.",
        "Ship to {c}: {q} {g}. Reference {n}.",
        "Reference {n}, {q} {g}, destination {c}.",
        "Our branch in {c} has asked for {q} {g}, number {n}.",
    ),
    "test": (
        "Could you deliver {q} {g} to {c}? It is order {n}.",
        "The {c} warehouse is waiting for {q} {g} from order {n}.",
        "Under number {n} we promised {q} {g} to a client in {c}.",
        "To {c} by Friday, please: {q} {g}, order no. {n}.",
        "Order no. {n} was changed to {q} {g}; it still goes to {c}.",
        "{c} has paid for {q} {g}, see order {n}.",
    ),
}


def draw(below: int, *what: object) -> int:
    digest = hashlib.sha256("\0".join(map(str, what)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % below


def row(split: str, seed: str, number: int) -> dict[str, str]:
    def pick(options: tuple[str, ...], what: str) -> str:
        return options[draw(len(options), split, seed, number, what)]

    order = str(1000 + draw(9000, split, seed, number, "order"))
    amount = str(2 + draw(98, split, seed, number, "amount"))
    goods = f"{pick(MATERIALS, 'material')} {pick(THINGS, 'thing')}"
    city = pick(CITIES[split], "city")
    text = pick(SENTENCES[split], "sentence").format(n=order, q=amount, g=goods, c=city)
    return {"question": text, "answer": f"{order}; {amount}; {goods}; {city}"}


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
