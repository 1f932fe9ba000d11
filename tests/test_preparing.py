"""How hotlap gets onto a volume: the wheel, its parts, the environment, and slices that start from them."""

import ast
import json
import os
import random
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_errand_alone import STUDY
from test_rented import QuickRunpod

import hotlap
from hotlap import durable, runs
from hotlap.cloud import arrive, launcher, parcel, preparing, rental
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.money import Amount
from hotlap.cloud.provider import Where
from hotlap.cloud.runpod import TRAITS
from hotlap.cloud.runpod_shapes import create_body, in_older_words
from hotlap.cloud.volume import FolderVolume
from hotlap.config import CloudConfig, RunConfig, load_run
from hotlap.config_cloud import BudgetConfig
from hotlap.speedrun.track import EVALUATOR
from hotlap.testing.bodies import MAX_BODY_BYTES
from hotlap.testing.fake_runpod import FakeRunpod

pytestmark = pytest.mark.long


IMAGE = f"img@sha256:{0:064}"
PACKAGE = Path(hotlap.__file__).parent


@pytest.fixture(scope="module")
def sent() -> parcel.Parcel:
    return parcel.pack()


def config_of(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"base_model": "google/gemma-4-E4B-it", "dataset": "/workspace/data/train.jsonl", **changes}
    )


# --- the wheel ---


def test_the_same_files_make_the_same_wheel_and_pip_s_own_reader_accepts_it(
    tmp_path: Path, sent: parcel.Parcel
) -> None:
    assert parcel.pack() == sent
    with zipfile.ZipFile(BytesIO(sent.wheel)) as archive:
        assert archive.read("hotlap/speedrun/evaluate.py") == EVALUATOR.read_bytes()
        assert archive.read("hotlap/cli/demo_identity.jsonl")
    (tmp_path / sent.file_name).write_bytes(sent.wheel)
    argv = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", "there", sent.file_name]
    subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    # All that jobs there begin with, from what was sent alone.
    begin = (
        "import hotlap.cli.prefetch, hotlap.cli.preview, hotlap.cli.research, hotlap.cloud.worker, "
        "hotlap.cloud.errand, hotlap.research.study, hotlap.speedrun.remote, hotlap.train.slice; print(hotlap)"
    )
    asked, env = [sys.executable, "-c", begin], {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    said = subprocess.run(asked, cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=60).stdout
    assert f"'{tmp_path / 'there' / 'hotlap' / '__init__.py'}'" in said


def test_what_is_sent_imports_nothing_that_stays(sent: parcel.Parcel) -> None:
    """But for what a function imports: of these, no job there calls any."""
    there = zipfile.ZipFile(BytesIO(sent.wheel)).namelist()
    for name in filter(lambda name: name.endswith(".py"), there):
        for node in ast.parse((PACKAGE.parent / name).read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hotlap"):
                places = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                files = [f"{place.replace('.', '/')}.py" for place in places]
                assert [file for file in files if (PACKAGE.parent / file).exists() and file not in there] == [], name


class WithoutTexts(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            body = [each for each in node.body if not parcel._is_text(each)]
            node.body = body or [ast.Expr(ast.Constant(...), lineno=node.body[0].lineno)]
        return node


def test_without_docstrings_it_is_the_same_program_line_by_line() -> None:
    for path in [*PACKAGE.glob("[a-z]*.py"), *PACKAGE.glob("train/[a-z]*.py")]:
        source = path.read_text()
        wanted, found = WithoutTexts().visit(ast.parse(source)), ast.parse(parcel.bare(source))
        assert ast.dump(found) == ast.dump(wanted), path
        lines = [[node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)] for tree in (found, wanted)]
        assert lines[0] == lines[1], path


def test_constraints_are_the_versions_here_without_the_image_s_torch() -> None:
    from importlib.metadata import version

    lines = dict(line.split("==") for line in parcel.constraints().splitlines())
    for name in ("pydantic", "transformers", "peft", "safetensors", "sqlalchemy", "numpy"):
        assert lines[name] == version(name)
    # Wanted by torch or by the tests alone.
    assert not {"torch", "sympy", "pytest", "ruff", "psycopg", "hotlap"} & set(lines)


def test_every_request_of_a_preparation_fits_and_the_parts_make_the_wheel_in_any_order(
    tmp_path: Path, sent: parcel.Parcel
) -> None:
    plan = preparing.preparation(config_of(), sent, "vol1", "img@sha256:0", TRAITS)
    assert len(plan.jobs) == len(sent.parts()) > 1
    offer = rental.Offer("runpod", "NVIDIA L40S", "EU-RO-1", 860_000, cloud="SECURE")
    for job in plan.jobs:
        body = create_body(offer, rental_tags(), job.start)
        for shape in (body, in_older_words(body)):
            assert len(json.dumps(shape).encode()) < MAX_BODY_BYTES - 2000
    wheel = tmp_path / ".hotlap" / "parcels" / sent.digest / sent.file_name
    orders = [json.loads(job.start.argv[-1]) for job in plan.jobs]
    assert ["install" in order for order in orders] == [*[False] * (len(orders) - 1), True]
    random.Random(7).shuffle(orders)
    for number, order in enumerate(orders, start=1):
        assert arrive.main([str(tmp_path), sent.digest, sent.file_name, json.dumps({"part": order["part"]})]) == 0
        assert wheel.exists() == (number == len(orders))
    assert wheel.read_bytes() == sent.wheel and [path.name for path in wheel.parent.iterdir()] == [sent.file_name]


def rental_tags() -> Any:
    from test_runpod import TAGS

    return TAGS


def test_parts_of_something_else_are_refused_and_removed(
    tmp_path: Path, sent: parcel.Parcel, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = sent.parts()
    for number, text in enumerate([*parts[:-1], parts[-1][:-500]]):
        order = json.dumps({"part": [number, len(parts), text], "install": ["", []]})
        code = arrive.main([str(tmp_path), sent.digest, sent.file_name, order])
    assert code == 5 and '"reason": "provisioning"' in capsys.readouterr().out
    assert list((tmp_path / ".hotlap" / "parcels" / sent.digest).iterdir()) == []


def test_with_keys_to_the_volume_the_wheel_is_put_there_and_one_machine_installs(
    tmp_path: Path, sent: parcel.Parcel, home: Path
) -> None:
    there = FolderVolume(tmp_path)
    plan = preparing.preparation(config_of(), sent, "vol1", IMAGE, TRAITS, volume=there)
    (job,) = plan.jobs
    assert json.loads(job.start.argv[-1]).keys() == {"install"}
    plan.carry()
    assert (tmp_path / ".hotlap" / "parcels" / sent.digest / sent.file_name).read_bytes() == sent.wheel
    plan.note()
    assert preparing.preparation(config_of(), sent, "vol1", IMAGE, TRAITS, volume=there).carried is None


def test_the_run_of_the_volume_is_the_run_that_was_asked_for(home: Path) -> None:
    """Settings travel as words for another hotlap's --set, and come out the same."""
    mix = [{"dataset": "/workspace/a.jsonl", "weight": 0.5}, {"dataset": '/workspace/b "quoted".jsonl'}]
    config = config_of(run="r", data={"mix": mix, "seq_len": 256}, lora={"rank": 8}, optim={"max_grad_norm": None})
    prefetch, preview = preparing.commands_of(config)
    assert prefetch == ["-m", "hotlap", "prefetch", "google/gemma-4-E4B-it"]
    overrides = [word for word in preview if "=" in word]
    assert all(tomllib.loads(f"x = {word.partition('=')[2]}") for word in overrides if "none" not in word)
    assert load_run(None, overrides) == config


def test_what_a_slice_leaves_lies_on_the_volume(sent: parcel.Parcel) -> None:
    job = preparing.slice_job(config_of(), sent, "vol1", "img@sha256:0", TRAITS)
    env_python, *_, order = job.start.argv[-4:]
    assert env_python == f"/workspace/.hotlap/envs/{sent.digest[:16]}/bin/python"
    assert json.loads(order)["config"]["output_dir"] == "/workspace/runs"
    assert job.start.env["HOTLAP_HOME"] == "/workspace/.hotlap/home" and job.start.volume_id == "vol1"


# --- for real ---


class Ground:
    """An emulated cloud whose image has this Python, a volume in it, and a launcher."""

    def __init__(self, folder: Path, python: str) -> None:
        self.cloud = FakeRunpod(folder=folder / "cloud", python=python, per_minute=100_000)
        self.client = QuickRunpod("full-key", self.cloud.url)
        self.settings = CloudConfig(budget=BudgetConfig(gpu_minutes_per_day=600.0, gpu_minutes_per_run=600.0))
        self.ledger = Ledger(self.settings)
        self.volume = folder / "cloud" / "volume"
        self.events: list[dict[str, Any]] = []
        self.words: list[str] = []

    def __enter__(self) -> "Ground":
        self.cloud.__enter__()
        body = {"name": "data", "size": 10, "dataCenter": "EU-RO-1"}
        answer = httpx.post(
            f"{self.cloud.url}/network-volumes", json=body, headers={"Authorization": "Bearer full-key"}
        )
        self.volume_id: str = answer.json()["id"]
        self.offers = rental.offers_for(self.client, (), Where(self.volume_id))
        return self

    def __exit__(self, *error: Any) -> None:
        self.client.close()
        self.cloud.__exit__(None, None, None)

    def launcher(self) -> launcher.Launcher:
        stops = launcher.Stops()
        return rental.launcher_of(self.client, self.ledger, self.settings, stops, self.events.append, self.words.append)

    def steps(self) -> list[str]:
        return [event["step"] for event in self.events if event["event"] == "arrived"]


def bare_image(folder: Path) -> Path:
    """The Python of a new virtual environment with nothing but pip in it: the one that is here, which need not be
    unpacked and compiled anew."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    pip = find_spec("pip")
    assert pip is not None and pip.origin is not None
    (packages / "pip").symlink_to(Path(pip.origin).parent)
    return folder / "bin" / "python"


@pytest.mark.real
def test_an_empty_image_gets_hotlap_and_only_once(tmp_path: Path, sent: parcel.Parcel) -> None:
    """What is installed is this very hotlap, in the versions that run here."""
    with Ground(tmp_path, str(bare_image(tmp_path / "image"))) as ground:
        # `train` would bring gigabytes; how hotlap arrives does not depend on it.
        plan = preparing.preparation(config_of(), sent, ground.volume_id, "img", TRAITS, extra="")
        look = (
            "import hotlap.errors, pydantic, sys; print('here', hotlap.errors.__file__, pydantic.VERSION, sys.prefix)"
        )
        ready = preparing.prepare(ground.launcher(), looking(plan, look), ground.offers, lambda _end: None)
        assert ready.is_whole, (ready.leases[-1].end, ground.words)
        num_parts = len(plan.jobs)
        assert ground.steps() == [
            *(f"part {number + 1} of {num_parts}" for number in range(num_parts)),
            "environment",
            f"-c {look}"[:60],
        ]
        env = ground.volume / ".hotlap" / "envs" / sent.digest[:16]
        (said,) = (line for line in ground.words if line.startswith("here "))
        _, where, version, prefix = said.split()
        assert Path(where).is_relative_to(env) and Path(prefix) == env
        assert f"pydantic=={version}" in parcel.constraints().splitlines()
        for name in ("errors.py", "cloud/worker.py", "train/slice.py"):
            (installed,) = env.glob(f"lib/*/site-packages/hotlap/{name}")
            assert installed.read_text() == parcel.bare((PACKAGE / name).read_text())
        assert ready.cost.usd_micros >= ground.cloud.usd_micros() > 0 and ground.cloud.alive() == []
        # Again: nothing is sent and nothing is installed; the environment is found by its marker.
        ground.events.clear()
        again = preparing.preparation(config_of(), sent, ground.volume_id, "img", TRAITS, extra="")
        assert [job.cap_s for job in again.jobs] == [plan.jobs[-1].cap_s]
        assert preparing.is_prepared(ground.volume_id, plan.run, sent)
        assert not preparing.is_prepared("another", plan.run, sent)
        second = preparing.prepare(ground.launcher(), looking(again, look), ground.offers, lambda _end: None)
        assert second.is_whole and ground.steps() == [f"-c {look}"[:60]]
        assert second.cost != Amount()
        # Somebody emptied the volume: the machine says so, and the next time the wheel is brought again.
        durable.remove_tree(ground.volume / ".hotlap")
        third = preparing.prepare(ground.launcher(), looking(again, look), ground.offers, lambda _end: None)
        assert not third.is_whole
        assert len(preparing.preparation(config_of(), sent, ground.volume_id, "img", TRAITS).jobs) == len(plan.jobs)


def looking(plan: preparing.Preparation, code: str) -> preparing.Preparation:
    """The same with a line of Python in the place of fetching the model and packing the data."""
    *parts, last = plan.jobs
    order = json.loads(last.start.argv[-1]) | {"install": ["", [["-c", code]]]}
    # Few of the modules are imported. By pip's own logic, 0 is what switches compiling off.
    env = {**last.start.env, "PIP_NO_COMPILE": "0"}
    start = replace(last.start, argv=(*last.start.argv[:-1], json.dumps(order)), env=env)
    return replace(plan, jobs=(*parts, replace(last, start=start)))


@pytest.mark.torch
def test_the_founding_form_prepares_trains_and_resumes(
    tmp_path: Path, home: Path, tiny_model: Path, f3: Path, sent: parcel.Parcel
) -> None:
    """`hotlap launch --volume-id V --base-model M --dataset D` against the emulator, as a user types it. The image is
    one that has torch and its friends; what is on the volume afterwards trains, and the same command goes on."""
    folder = tmp_path / "cloud"
    volume = folder / "volume"
    (volume / "data").mkdir(parents=True)
    (volume / "data" / "train.jsonl").write_bytes(f3.read_bytes())
    subprocess.run(["cp", "-r", tiny_model, volume / "model"], check=True)
    home.mkdir()
    (home / "cloud.toml").write_text("[budget]\ngpu_minutes_per_day = 600\ngpu_minutes_per_run = 600\n")
    server = subprocess.Popen(
        [sys.executable, "-m", "hotlap.testing.fake_runpod", "--port", "0", "--folder", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout
    try:
        settings = dict(word.split("=", 1) for word in server.stdout.readline().split())
        url, key = settings["HOTLAP_RUNPOD_URL"], {"Authorization": f"Bearer {settings['RUNPOD_API_KEY']}"}
        body = {"name": "data", "size": 10, "dataCenter": "EU-RO-1"}
        volume_id = httpx.post(f"{url}/network-volumes", json=body, headers=key).json()["id"]
        words = [
            "launch",
            "--job",
            "qlora",
            "--volume-id",
            volume_id,
            "--image",
            "img@sha256:0000000000000000000000000000000000000000000000000000000000000000",
            "--json",
        ]
        words += ["--base-model", "/workspace/model", "--dataset", "/workspace/data/train.jsonl"]
        words += ["--set", "train.max_steps=6", "--set", "data.seq_len=64", "--set", "slice.num_threads=1"]

        def launch(*more: str) -> tuple[dict[str, Any], str]:
            argv = [sys.executable, "-m", "hotlap", *words, *more]
            done = subprocess.run(argv, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)
            assert done.stdout, done.stderr
            return json.loads(done.stdout), done.stderr

        prepared, talk = launch("--prepare")
        assert prepared["reason"] == "done", talk
        assert "preparing the volume cost" in talk and len(prepared["leases"]) == len(sent.parts())
        assert list((volume / ".hotlap" / "home").rglob("packed*")), "the data is packed before any slice"
        first, talk = launch()
        assert (first["exit_code"], len(first["leases"])) == (0, 1), talk
        folder = runs.RunFolder(volume / "runs" / first["run"])
        assert runs.is_finished(folder) and (folder.path / "adapter").exists()
        again, _ = launch()
        assert (again["reason"], again["leases"]) == ("done", [])
        # A study on the same volume finds hotlap there, and leaves its journal there.
        (tmp_path / "lr.toml").write_text(STUDY)
        words = ["launch", str(tmp_path / "lr.toml"), "--job", "research", "--volume-id", volume_id, "--image", IMAGE]
        searched, talk = launch("--json", "--trials", "1")
        assert searched["exit_code"] == 0, talk
        assert "decision" in {row["kind"] for row in durable.read_rows(volume / "studies" / "lr" / "experiments.jsonl")}
    finally:
        server.terminate()
        server.wait(timeout=20)
        server.stdout.close()
