"""The page about the emulator: its code runs."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PAGE = Path(__file__).parent.parent / "docs" / "emulator.md"


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert code.count("assert ") >= 1, "the example says what comes of it"
    exec(compile(code, str(PAGE), "exec"), {})
