"""What a contest shows: the page with its chart, the README's block, and claims that were measured otherwise."""

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hotlap.speedrun import claims
from hotlap.speedrun.leaderboard import END, START, Board, Entry, chart, page, progression, with_block

EVIL = "<script>alert('1')</script> | x `c` [a](javascript:1)"


def entry(date: str, time_s: float, author: str = "ada", rank: int = 1) -> Entry:
    return Entry(rank, time_s, 0.5, 0.9, "-", author, EVIL, date, "warm", "report.json")


def board(*entries: Entry, is_provisional: bool = False) -> Board:
    others = ((EVIL, "fail"),)
    return Board("micro", EVIL, 0.8, True, "hotlap/tiny", is_provisional, entries, (), others)


def test_only_what_was_faster_than_all_before_is_progress() -> None:
    slow, fast, slower, fastest = (
        entry("2026-01-01", 100.0), entry("2026-01-03", 50.0), entry("2026-02-01", 60.0), entry("2026-03-01", 9.0)
    )  # fmt: skip
    assert progression(board(fastest, fast, slower, slow)) == [slow, fast, fastest]


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))


def test_the_page_runs_nothing_and_fetches_nothing() -> None:
    text = page([board(entry("2026-01-01", 100.0, EVIL), entry("2026-01-05", 50.0)), board()])
    tags = Tags(text).found
    assert {"table", "svg", "path", "circle"} <= {tag for tag, _ in tags}
    assert not {"script", "link", "img", "iframe", "a", "image", "use"} & {tag for tag, _ in tags}
    assert not [name for _, attrs in tags for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
    assert "default-src 'none'" in text and "url(" not in text
    assert text.count("&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;") >= 3
    assert "No record yet." in text


@pytest.mark.parametrize("dates", [["2026-01-01"], ["2026-01-01", "2026-01-01"], ["2026-01-01", "2026-06-30"]])
def test_the_chart_is_well_formed_and_stays_inside(dates: list[str]) -> None:
    steps = [entry(date, 800.0 / 5**number, EVIL) for number, date in enumerate(dates)]
    root = ElementTree.fromstring(chart(steps))
    width, height = (float(text) for text in root.attrib["viewBox"].split()[2:])
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("circle")]
    assert len(circles) == len(dates)
    assert all(0 < x < width and 0 < y < height for x, y in circles)
    assert [y for _, y in circles] == sorted(y for _, y in circles)  # faster is lower
    assert EVIL in str(root.findtext("circle/title"))


def test_a_readme_gets_its_block_between_the_marks_and_nowhere_else() -> None:
    readme = f"# Ours\n\n{START}old{END}\n\nafter\n"
    text = with_block(readme, [board(entry("2026-01-01", 12.34)), board(is_provisional=True)])
    assert text.startswith(f"# Ours\n\n{START}\n| track |") and text.endswith(f"{END}\n\nafter\n")
    assert "| micro | ≥ 0.8 | 12.3 s | 0.9000 | ada | 2026-01-01 |" in text and "| provisional |" in text
    assert "old" not in text
    assert with_block(text, [board(entry("2026-01-01", 12.34)), board(is_provisional=True)]) == text
    assert with_block("# No marks\n", [board()]) == "# No marks\n"


MEASURED = {"time_seconds_mean": 20.0, "time_seconds_interval": [19.0, 23.0], "score_mean": 0.58}


@pytest.mark.parametrize(
    ("config", "notes", "told"),
    [
        ({}, "It took 5 s at first.\nTimes vary.", []),
        ({"self_reported": {"mean_train_seconds": 22.9, "accuracies": [0.57, 0.60]}}, "", []),
        (
            {"self_reported": {"mean_train_seconds": 17.9}},
            "",
            ["config.yaml claims a time of 17.9 s; measured was 20 s"],
        ),
        (
            {"self_reported": {"accuracies": [0.61, 0.63]}},
            "",
            ["config.yaml claims a score of 0.62; measured was 0.58"],
        ),
        ({}, "# x\n- Time: 12.5 s\n**Score**: 58.4 %", ["NOTES.md:2 claims a time of 12.5 s; measured was 20 s"]),
        ({}, "score: 0.7", ["NOTES.md:1 claims a score of 0.7; measured was 0.58"]),
    ],
)
def test_claims_are_held_against_what_was_measured(config: dict[str, object], notes: str, told: list[str]) -> None:
    assert claims.disagreements(claims.claims(config, notes), MEASURED) == told
