"""Every command that the README and the documentation show, typed in the order of reading.

    python -m benchmarks.docs [--page docs/tutorial.md]... [--whole] [--home FOLDER]

Each page in a folder of its own, all of them with one fresh HOTLAP_HOME, as a reader would. A line a command: seconds,
exit code, the command; exit status 1 if one of them failed. Studies and verifications make one trial, or run, of 5 s
where a page says more, and runs two steps, unless `--whole` is given. Where a study ends because the machine is
disturbed, this is said, and its proof is not typed: nothing of the page has failed.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from sessions import Shown, furnish, shown

_FINE = {0, 8, 75}
"""Done, not proven, and call again: a command that worked."""

_DISTURBED = "hotlap: exit 8 disturbed"

_TIMEOUT_S = 1800.0
_PREPARED = {
    "my-run": "hotlap train run.toml --run my-run",
    "lap": "hotlap train run.toml --run lap",
    "RUN": "hotlap train run.toml --run mine",
    "my-study": "hotlap research my-study.toml --trials 1",
    "submissions/001-ada": "hotlap speedrun new 001-ada --author ada --track micro",
    "submissions/002-ada": "hotlap speedrun new 002-ada --author ada --track micro --recipe",
}
"""What a page takes for granted, by the name that it uses."""

_EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio", "ray")


class Reader:
    """Somebody with a folder, who types what a page shows."""

    def __init__(self, folder: Path, home: Path, is_whole: bool, stack: ExitStack) -> None:
        self._folder, self._is_whole, self._stack = folder, is_whole, stack
        self._environment = {**os.environ, "HOTLAP_HOME": str(home)}
        self._is_served = False

    def type(self, words: list[str]) -> tuple[int, str]:
        """The exit code, and the end of what was said. A server is left running until the page is over."""
        words = self._own(words)
        is_server = words[:2] in (["hotlap", "serve"], ["hotlap", "dashboard"]) and "--dry-run" not in words
        if words[:2] == ["hotlap", "bench"] and not self._is_served:
            self.type(["hotlap", "serve", self._newest_run()])
        if is_server:
            self._is_served = True
            try:
                self._stack.enter_context(self._serving(words))
            except RuntimeError as error:
                return 1, str(error)
            return 0, "serves"
        process = subprocess.run(
            self._argv(words), cwd=self._folder, env=self._environment, capture_output=True, text=True,
            timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return process.returncode, (process.stderr.strip() or process.stdout.strip())[-1200:]

    def prepare(self, asked: str) -> None:
        """A run or a study of this name, if there is none yet; under `RUN` any will do."""
        if (self._folder / asked).exists():
            return
        folders = [self._folder / "runs", self._folder / "studies"]
        found = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
        if asked in found or (asked == "RUN" and found):
            return
        code, said = self.type(_PREPARED[asked].split())
        if code not in _FINE:
            print(f"            {_PREPARED[asked]}: {said}", flush=True)

    def _argv(self, words: list[str]) -> list[str]:
        return [sys.executable, "-m", "hotlap", *words[1:]] if words[0] == "hotlap" else [sys.executable, *words[1:]]

    def _own(self, words: list[str]) -> list[str]:
        """The reader's own names in place of the page's, and fewer trials and runs."""
        found = [self._newest_run() if word == "RUN" else word for word in words]
        found = [self._newest_report() if word.endswith("report-3.json") else word for word in found]
        for place, word in enumerate(found):
            if word in ("--trials", "--runs", "--slices") and not self._is_whole:
                found[place + 1] = "1"
        is_run = found[:2] in (["hotlap", "train"], ["hotlap", "launch"])
        return [*found, "--set", "train.max_steps=2"] if is_run and not self._is_whole else found

    def _newest_run(self) -> str:
        runs = sorted((self._folder / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
        return runs[-1].parent.name if runs else "RUN"

    def _newest_report(self) -> str:
        return next((str(path) for path in self._folder.glob("records/*/attempts/*/report-*.json")), "none.json")

    @contextmanager
    def _serving(self, words: list[str]) -> Iterator[None]:
        log = self._folder / "server.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                self._argv(words), cwd=self._folder, env=self._environment, stdout=out, stderr=out
            )
            until_s = time.monotonic() + 300.0
            while process.poll() is None and time.monotonic() < until_s and "http://" not in log.read_text():
                time.sleep(0.5)
            if "http://" not in log.read_text():
                raise RuntimeError(f"{' '.join(words)}: {log.read_text()[-600:]}")
            try:
                yield
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def why_not(line: Shown) -> str | None:
    missing = [name for name in _EXTRAS if re.search(rf"--to {name}\b|{name}\.md", f"{line.text} {line.page}")]
    if re.search(r"hotlap (serve|bench)", line.text):
        missing += ["fastapi", "openai"]  # which `transformers serve` wants
    return line.why_not or next((f"{name} is not installed" for name in missing if find_spec(name) is None), None)


def read(page: str, lines: list[Shown], home: Path, is_whole: bool) -> int:
    """Types a page's commands. Returns how many failed."""
    num_failed, is_disturbed = 0, False
    print(f"\n{page}", flush=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        furnish(Path(name), page, None if is_whole else 5.0)
        reader = Reader(Path(name), home, is_whole, stack)
        for line in lines:
            is_proof = line.text.startswith("hotlap research verify")  # a mistake before there is a baseline
            if reason := "machine disturbed" if is_disturbed and is_proof else why_not(line):
                print(f"      not run    {line.text}   ({reason})", flush=True)
                continue
            for asked in sorted(_PREPARED.keys() & set(line.words)) if line.words[1] != "train" else ():
                reader.prepare(asked)
            began_s = time.monotonic()
            code, said = reader.type(line.words)
            is_disturbed = is_disturbed or _DISTURBED in said
            note = "   (machine disturbed)" if _DISTURBED in said else ""
            print(f"{time.monotonic() - began_s:7.1f} s  {code:3}   {line.text}{note}", flush=True)
            if code not in _FINE:
                num_failed += 1
                print("\n".join(f"            {each}" for each in said.splitlines()), flush=True)
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", action="append", default=[])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--home", type=Path)
    given = parser.parse_args()
    everything = shown()
    pages = given.page or list(dict.fromkeys(line.page for line in everything))
    with tempfile.TemporaryDirectory() as fresh:
        home = (given.home or Path(fresh)).resolve()
        subprocess.run(
            [sys.executable, "-m", "hotlap", "prefetch", "smollm2-135m"],
            env={**os.environ, "HOTLAP_HOME": str(home)}, check=True, capture_output=True,
        )  # fmt: skip
        num_failed = sum(
            read(page, [line for line in everything if line.page == page], home, given.whole) for page in pages
        )
    print(f"\n{num_failed} failed")
    return min(1, num_failed)


if __name__ == "__main__":
    sys.exit(main())
