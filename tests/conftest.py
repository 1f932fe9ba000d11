"""Fixtures of the whole suite. Every test has a HOTLAP_HOME of its own; the real model is fetched once a machine."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openapi
import pytest
import sshd
from fixtures_data import f3_rows, write_jsonl
from postgres import Server, served
from tiny import make_tiny_model, tiny_config
from zygote import Zygote

from hotlap.config import RunConfig

if TYPE_CHECKING:
    from stage import Stage

    from hotlap.testing.fake_modal import FakeModal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as slices have it; for torch in this process and its children
# Looking for plugins of pydantic's reads the metadata of all that is installed, in each of some thousand processes.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


gc.disable()


def pytest_collection_finish() -> None:
    """What was collected stays to the end, and looking through it for garbage is a tenth of what collecting takes."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests come first, so that at the end no worker is left alone with one."""
    first: dict[Path, int] = {}
    for item in items:
        marks = [item.get_closest_marker(name) is not None for name in ("real", "long", "torch")]
        weight = [*marks, True].index(True)
        first[item.path] = min(first.get(item.path, weight), weight)
    items.sort(key=lambda item: first[item.path])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh HOTLAP_HOME."""
    folder = tmp_path / "home"
    monkeypatch.setenv("HOTLAP_HOME", str(folder))
    return folder


@pytest.fixture(scope="session", autouse=True)
def requests_are_the_providers() -> Iterator[None]:
    """Where the provider's API file is, no test may send a request that it does not describe."""
    with openapi.holding_every_client() if openapi.SPEC.exists() else nullcontext():
        yield


@pytest.fixture
def stage(home: Path) -> "Iterator[Callable[..., Stage]]":
    """`stage(*faults, ...)` opens one; all are closed at the end."""
    from stage import Stage

    home.mkdir()
    opened: list[Stage] = []

    def make(*faults: object, **options: Any) -> Stage:
        opened.append(Stage(home, *faults, **options).__enter__())
        return opened[-1]

    yield make
    for each in opened:
        each.__exit__(None, None, None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def f3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("f3") / "f3.jsonl", f3_rows())


@pytest.fixture
def make_config(tiny_model: Path, f3: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """`tiny_config` on the tiny model and F3, in `tmp_path/runs` unless told otherwise."""

    def make(output_dir: Path = tmp_path / "runs", data: Path = f3, **changes: object) -> RunConfig:
        return tiny_config(tiny_model, data, output_dir, **changes)

    return make


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Zygote]:
    mine = tmp_path_factory.getbasetemp()
    shared = mine.parent if hasattr(request.config, "workerinput") else mine  # a worker's folder lies in the run's
    zygote = Zygote(tmp_path_factory.mktemp("zygote"), shared=shared)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server of this test run."""
    for server in served():
        if server is None:
            pytest.skip("PostgreSQL's initdb is not installed (Debian: apt-get install postgresql)")
        yield server


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Box]:
    """A box of this test run, reached over ssh, with this Python."""
    for box in sshd.served(tmp_path_factory.mktemp("box") / "sshd", sys.executable):
        if box is None:
            pytest.skip("sshd is not installed (Debian: apt-get install openssh-server)")
        yield box


@pytest.fixture
def modal_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["FakeModal"]:
    """A fake of Modal's server, which the SDK of this process talks to."""
    from hotlap.testing.fake_modal import FakeModal

    with FakeModal(tmp_path / "modal") as cloud:
        for name, value in cloud.environment.items():
            monkeypatch.setenv(name, value)
        yield cloud


@pytest.fixture(scope="session")
def real_home() -> Path:
    """Where the real model is kept between runs of the suite."""
    return Path(os.environ.get("HOTLAP_TEST_HOME") or Path.home() / ".cache" / "hotlap-test")


@pytest.fixture(scope="session")
def smollm2(real_home: Path) -> Path:
    """The folder of the real SmolLM2-135M-Instruct, fetched and converted if it is not there yet."""
    return _fetched("smollm2-135m", real_home)


@pytest.fixture(scope="session")
def gemma3_270m(real_home: Path) -> Path:
    """The folder of the real Gemma 3 270M; fetching and converting it takes a minute or two."""
    return _fetched("gemma3-270m", real_home)


def _fetched(name: str, home: Path) -> Path:
    from hotlap import artifacts

    before = os.environ.get("HOTLAP_HOME")
    os.environ["HOTLAP_HOME"] = str(home)
    try:
        return artifacts.fetch(name, lambda text: print(text, file=sys.stderr))
    finally:
        if before is None:
            del os.environ["HOTLAP_HOME"]
        else:
            os.environ["HOTLAP_HOME"] = before
