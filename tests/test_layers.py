"""Guards of the structure: who may import whom, who may touch the disk, who may read a clock.

Each rule is a function of modules that returns complaints, and is shown to be able to complain.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from textwrap import dedent

import measure
import pytest
from source_tree import (
    PACKAGE,
    Call,
    Module,
    calls_of,
    dotted,
    find_cycle,
    graph_of,
    imports_of,
    load_modules,
    mutual_imports,
    names_of,
)

from hotlap import errors

Rule = Callable[[Sequence[Module]], list[str]]

# --- the picture: DESIGN 2, as data ---

CORE = {
    "errors": "",
    "durable": "errors",
    "config_base": "",
    "config_data": "config_base",
    "config_model": "config_base",
    "config_techniques": "config_base config_model",
    "config_cloud": "config_base",
    "config": "config_base config_cloud config_data config_model config_techniques durable errors secrecy",
    "clock": "config errors",
    "checkpoint": "clock durable errors",
    "child": "clock errors tether",
    "runs": "checkpoint clock config durable errors",
    "supervise": "child clock config durable errors runs",
    "hub": "clock config durable errors",
    "sources": "child clock config durable errors hub",
    "pins": "durable errors",
    "artifacts": "child clock config durable errors hub pins sources",
    "guard": "clock config durable errors",
    "translate": "config errors",
    "tether": "",
    "secrecy": "",
}
"""A core module, and the core modules below it. The widest name wins: everything above core may import all of it."""

PACKAGES = {
    "__init__": "",
    "__main__": "cli",
    "data": "",
    "train": "data",
    "cloud": "",
    "cloud.boot": None,
    "cloud.arrive": None,
    "research": "cloud data",
    "research.gpt": None,
    "speedrun": "cloud data",
    "speedrun.evaluate": None,
    "speedrun.jail": None,
    "export": "data train",
    "export.compress": None,
    "report": "cloud data research speedrun export",
    "cli": "data cloud research speedrun export report",
    "testing": "cloud",
}
"""A package (or a module with a rule of its own), and what it may import besides itself and core. None: nothing of
ours at all, because it is run alone."""

OWNERS = {
    "pydantic": "config config_base config_cloud config_data config_model config_techniques translate speedrun.recipe "
    "speedrun.track research.space",
    "optuna": "research.ask_optuna",
    "ray": "research.ray_executor",
    "click": "cli",
    "rich": "cli",
    "httpx": "cloud.runpod export.bench",
    "sqlalchemy": "cloud.database cloud.ledger",
    "psycopg": "cloud.database",
    "packaging": "cloud.parcel",
    "boto3": "cloud.volume",
    "botocore": "cloud.volume",
    "modal": "cloud.modal",
    "google": "testing.fake_modal",
    "modal_proto": "testing.fake_modal",
    "grpclib": "testing.fake_modal",
    "yaml": "translate speedrun.submission speedrun.inputs speedrun.transfer export.push",
    "numpy": "data train research speedrun report export",
    "tokenizers": "data",
    "pyarrow": "data speedrun.inputs",
    "datasets": "data",
    "huggingface_hub": "hub export",
    "transformers": "data train export speedrun.evaluate research.gpt",
    "torch": "train export speedrun.evaluate research.gpt",
    "peft": "train export speedrun.evaluate",
    "safetensors": "train export speedrun.evaluate",
    "bitsandbytes": "train export speedrun.evaluate",
    "gguf": "train export",
    "jinja2": "data.placeholders data.verbatim report",
    "llmcompressor": "export.compress",
    "plotly": "report",
    "matplotlib": "report",
    "starlette": "report",
    "uvicorn": "report",
    "tensorboard": "report.sink",
    "wandb": "report.sink",
    "mlflow": "report.sink",
    "trackio": "report.sink",
}
"""DESIGN 4: a third-party package, and the modules or packages that may import it."""

IN_CLI = {"click", "rich"}
"""Third-party packages that `cli` may load on import."""

BEFORE_ANY_COMMAND = {"click"}
"""Of these, what may be loaded before it is known which command runs, so that `hotlap --help` answers at once."""


def is_within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def unit_of(name: str) -> str | None:
    """The entry of the picture that speaks for a module: the longest that fits."""
    fitting = [unit for unit in (*CORE, *PACKAGES) if is_within(name, unit)]
    return max(fitting, key=len, default=None)


def may_import(name: str, target: str) -> bool:
    unit = unit_of(name)
    if unit is None:
        return False
    if unit in CORE:
        return target in CORE[unit].split()
    below = PACKAGES[unit]
    if below is None:
        return False
    # `__init__` stands for the package's own names, such as its version.
    if target in CORE or target == "__init__" or is_within(target, unit.partition(".")[0]):
        return True
    return any(is_within(target, package) for package in below.split())


def layer_rule(modules: Sequence[Module]) -> list[str]:
    return [
        f"{name}:{item.line} imports {target}, an edge that is not in the picture"
        for name, targets in graph_of(modules).items()
        for target, item in targets.items()
        if not may_import(name, target)
    ] + [f"{module.name} has no place in the picture" for module in modules if unit_of(module.name) is None]


def cycle_rule(modules: Sequence[Module]) -> list[str]:
    cycle = find_cycle(graph_of(modules))
    return [" -> ".join(cycle)] if cycle else []


def owner_rule(modules: Sequence[Module]) -> list[str]:
    found: list[str] = []
    for module in modules:
        for item in imports_of(module):
            if item.is_ours or item.top in sys.stdlib_module_names:
                continue
            owners = OWNERS.get(item.top, "").split()
            if not any(is_within(module.name, owner) for owner in owners):
                found.append(f"{module.name}:{item.line} imports {item.top}, which belongs to {owners or 'nobody'}")
    return found


def eager_cli_rule(modules: Sequence[Module]) -> list[str]:
    """The command line loads features inside the commands that need them."""
    found: list[str] = []
    known = {module.name for module in modules} | set(CORE)
    always = loaded_with("cli", modules)
    for module in modules:
        light = BEFORE_ANY_COMMAND if module.name in always else IN_CLI
        for item in imports_of(module) if is_within(module.name, "cli") else []:
            target = item.ours(known) if item.is_ours else None
            is_light = target in CORE or target == "__init__" or (target is not None and is_within(target, "cli"))
            if item.is_at_import_time and not (is_light or item.top in light | sys.stdlib_module_names):
                found.append(f"{module.name}:{item.line} imports {item.target} before a command needs it")
    return found


def loaded_with(name: str, modules: Sequence[Module]) -> set[str]:
    """The modules that importing one of them loads."""
    by_name = {module.name: module for module in modules}
    loaded: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in loaded:
            loaded.add(name)
            items = [item for item in imports_of(by_name[name]) if item.is_ours and item.is_at_import_time]
            waiting += [item.ours(set(by_name)) for item in items]
    return loaded


# --- one seam for the disk ---

OS_CHANGES = ("rename", "renames", "replace", "remove", "unlink", "rmdir", "removedirs", "mkdir", "makedirs", "link")
SHUTIL_CHANGES = ("rmtree", "move", "copy", "copy2", "copyfile", "copyfileobj", "copytree", "make_archive")

DISK_FUNCTIONS = {
    *(f"os.{name}" for name in (*OS_CHANGES, "symlink", "truncate", "ftruncate", "mkfifo", "mknod", "write", "pwrite")),
    *(f"shutil.{name}" for name in (*SHUTIL_CHANGES, "unpack_archive")),
    *(f"numpy.{name}" for name in ("save", "savez", "savez_compressed", "savetxt")),
    "torch.save",
    "safetensors.torch.save_file",
    "safetensors.numpy.save_file",
    "sqlite3.connect",
}

DISK_METHODS = {
    *("write_text", "write_bytes", "touch", "unlink", "rmdir", "mkdir", "symlink_to", "hardlink_to", "rename"),
    *("truncate", "save_pretrained", "save_vocabulary", "tofile"),
}

OPENERS = {
    **dict.fromkeys(("open", "io.open", "codecs.open", "gzip.open", "bz2.open", "lzma.open", "tarfile.open"), 1),
    "zipfile.ZipFile": 1,
}
"""Functions that take a path and then a mode, with the position of the mode."""

DISK_EXCEPTIONS = {
    ("train.convert", "model.save_pretrained"): (
        "transformers writes the folder; it lies in staging, and the parent hashes, syncs and publishes it"
    ),
    ("train.convert", "tokenizer.save_pretrained"): "the same folder",
    ("cloud.boot", "marker.mkdir"): "boot stands alone; making the once-marker is exclusive, and it syncs it itself",
    ("cloud.boot", "marker.parent.mkdir"): "the marker's folder",
    ("cloud.boot", "opener.open"): "sends a request; the argument is no mode",
    ("speedrun.evaluate", "?.write_text"): "writes into a sandbox's memory; the sandbox copies it out",
    ("speedrun.jail", "?.write_text"): "who the namespace's users are, told to the kernel",
    ("speedrun.jail", "folder.mkdir"): "folders of the sandbox's own root, which lies in memory",
    ("speedrun.jail", "?.mkdir"): "the same",
    ("speedrun.jail", "target.mkdir"): "the same",
    ("speedrun.jail", "target.parent.mkdir"): "the same",
    ("speedrun.jail", "target.touch"): "the same",
    (
        "speedrun.jail",
        "os.open",
    ): "jail stands alone; it reads strangers' files without following links, and copies them out",
    **{
        ("cloud.arrive", name): "stands alone on a rented machine; whoever reads checks a hash or a marker"
        for name in ("wheel.parent.mkdir", "part.unlink", "staged.open", "staged.rename")
    },
    ("cloud.parcel", "zipfile.ZipFile"): "in memory",
    ("cloud.bundle", "zipfile.ZipFile"): "in memory",
    ("research.gpt", "part.write_text"): "gpt stands alone; its result is written aside,",
    ("research.gpt", "part.replace"): "and renamed",
    ("sources", "archive.open"): "reads a member of a wheel; the argument is the member's name, not a mode",
}


def disk_rule(modules: Sequence[Module]) -> list[str]:
    found: list[str] = []
    for module in modules:
        if module.name == "durable":
            continue
        for name, line in names_of(module):
            if name in DISK_FUNCTIONS or name.startswith("tempfile."):
                found.append(f"{module.name}:{line} {name} goes past durable.py")
        for call in calls_of(module):
            if may_change_disk(call) and (module.name, call.name) not in DISK_EXCEPTIONS:
                found.append(f"{module.name}:{call.node.lineno} {call.name} goes past durable.py")
        for item in imports_of(module):
            if item.target == "hotlap.durable.disk":
                found.append(
                    f"{module.name}:{item.line} binds `disk` by name, so a test cannot put another in its place"
                )
    return found


def may_change_disk(call: Call) -> bool:
    if call.name == "os.open":
        # Opened for writing without being made or cut, it can carry a lock; `os.write` is looked for above.
        return not set(re.findall(r"\w+", ast.unparse(call.node.args[1]))) <= {"os", "O_RDONLY", "O_WRONLY", "O_RDWR"}
    if call.name.startswith((f"{PACKAGE}.durable.", "os.", "shutil.", "tempfile.")):
        return False
    if call.name in OPENERS:
        return may_write(call.argument(OPENERS[call.name], "mode"))
    if call.is_method and call.last == "open":
        return may_write(call.argument(0, "mode"))
    if call.last in ("memmap", "open_memmap"):
        mode = call.argument(2 if call.last == "memmap" else 1, "mode")
        return mode is None or may_write(mode)
    if call.is_method and call.last == "replace":
        # `str.replace` takes two, `dataclasses.replace` a value and keywords.
        return len(call.node.args) == 1 and not call.node.keywords
    return call.is_method and call.last in DISK_METHODS


def may_write(mode: ast.expr | None) -> bool:
    if mode is None:
        return False
    if isinstance(mode, ast.Constant) and isinstance(mode.value, str):
        return bool(set(mode.value) & set("wax+"))
    return True


# --- one clock, no code in data, no forks ---

STANDING_ALONE = {"research.gpt", "cloud.boot", "cloud.arrive", "speedrun.jail"}


def clock_rule(modules: Sequence[Module]) -> list[str]:
    readers = re.compile(r"time\.\w+|datetime\.(datetime|date)\.(now|utcnow|today)|os\.times")
    return [
        f"{module.name}:{line} {name}: only clock.py reads a clock"
        for module in modules
        if module.name not in {"clock", *STANDING_ALONE}
        for name, line in names_of(module)
        if readers.fullmatch(name)
    ]


CODE_IN_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
LOADERS = {
    "torch.load",
    "torch.save",
    "eval",
    "exec",
    "builtins.eval",
    "builtins.exec",
    "yaml.load",
    "yaml.unsafe_load",
}


def code_in_data_rule(modules: Sequence[Module]) -> list[str]:
    found: list[str] = []
    for module in modules:
        found += [f"{module.name}:{i.line} imports {i.top}" for i in imports_of(module) if i.top in CODE_IN_DATA]
        found += [f"{module.name}:{line} {name}" for name, line in names_of(module) if name in LOADERS]
        for call in calls_of(module):
            for given in call.node.keywords:
                if given.arg in ("allow_pickle", "trust_remote_code") and ast.unparse(given.value) != "False":
                    found.append(f"{module.name}:{call.node.lineno} {given.arg}={ast.unparse(given.value)}")
    return found


def name_rule(modules: Sequence[Module]) -> list[str]:
    empty_words = {"utils", "util", "common", "helpers", "helper", "misc"}
    return [f"{m.name}: a name that says nothing" for m in modules if empty_words & set(m.name.split("."))]


FORKING_ARGUMENTS = {("Popen", "preexec_fn"), ("run", "preexec_fn"), ("DataLoader", "num_workers"), ("map", "num_proc")}


ONE_THREAD_ONLY = {"speedrun.jail", "export.keeper"}
"""Programs of their own that never start a thread, so that they may fork."""


def fork_rule(modules: Sequence[Module]) -> list[str]:
    """A fork after threads exist can hang for ever, and both a tokenizer and torch start threads."""
    modules = [module for module in modules if module.name not in ONE_THREAD_ONLY]
    forks = re.compile(r"os\.(fork|forkpty)|pty\.\w+|concurrent\.futures\.(process\.)?ProcessPoolExecutor")
    found: list[str] = []
    for module in modules:
        for item in imports_of(module):
            if "multiprocessing" in item.target.split("."):
                found.append(f"{module.name}:{item.line} imports {item.target}")
        found += [f"{module.name}:{line} {name}" for name, line in names_of(module) if forks.fullmatch(name)]
        found += [
            f"{module.name}:{line} {name}" for name, line in names_of(module) if "multiprocessing" in name.split(".")
        ]
        for call in calls_of(module):
            for given in call.node.keywords:
                if (call.last, given.arg) in FORKING_ARGUMENTS:
                    found.append(f"{module.name}:{call.node.lineno} {given.arg}= forks")
    return found


# --- every rule holds, and each can fail ---

RULES: list[Rule] = [
    layer_rule,
    cycle_rule,
    owner_rule,
    eager_cli_rule,
    disk_rule,
    clock_rule,
    code_in_data_rule,
    name_rule,
    fork_rule,
    measure.complaints,
]


@pytest.fixture(scope="module")
def ours() -> list[Module]:
    modules = load_modules()
    assert {"errors", "durable", "train", "__init__"} <= {module.name for module in modules}
    return modules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule, ours: list[Module]):
    found = rule(ours)
    assert not found, "\n" + "\n".join(found)


def tree_of(**sources: str) -> list[Module]:
    """Modules from text; `__` in a name is a dot, so that `train__slice` is `train.slice`."""
    names = [name if name.startswith("__") else name.replace("__", ".") for name in sources]
    packages = {name for name in names if any(is_within(other, name) for other in names if other != name)}
    return [
        Module(name, dedent(text), f"{name.replace('.', '/')}{'/__init__' if name in packages else ''}.py")
        for name, text in zip(names, sources.values(), strict=True)
    ]


BAD: list[tuple[Rule, dict[str, str]]] = [
    (
        layer_rule,
        {
            "errors": "",
            "durable": "from hotlap import errors",
            "checkpoint": "",
            "clock": "import hotlap.runs",
            "runs": "",
        },
    ),
    (layer_rule, {"durable": "from hotlap.train import slice", "train__slice": ""}),
    (layer_rule, {"durable": "def f():\n    import hotlap.train.slice", "train__slice": ""}),
    (layer_rule, {"durable": "import importlib\nimportlib.import_module('hotlap.train.slice')", "train__slice": ""}),
    (layer_rule, {"data__packed": "from hotlap.train.optim import lr_at", "train__optim": ""}),
    (layer_rule, {"train__slice": "from ..cloud import ledger", "cloud__ledger": ""}),
    (layer_rule, {"cloud__worker": "import hotlap.train", "train": ""}),
    (layer_rule, {"research__study": "from hotlap.speedrun.track import Track", "speedrun__track": ""}),
    (layer_rule, {"speedrun__evaluate": "from hotlap.train import model", "train__model": ""}),
    (layer_rule, {"cli__train": "def train():\n    from hotlap.train.slice import main", "train__slice": ""}),
    (layer_rule, {"cloud__boot": "from hotlap import clock", "clock": ""}),
    (layer_rule, {"research__gpt": "from hotlap.research import space", "research__space": ""}),
    (layer_rule, {"cloud__launcher": "import hotlap.testing.fake_runpod", "testing__fake_runpod": ""}),
    (layer_rule, {"shiny": ""}),
    (
        cycle_rule,
        {
            "train__a": "import hotlap.train.b",
            "train__b": "def f():\n    from . import c",
            "train__c": "from hotlap.train.a import x",
        },
    ),
    (owner_rule, {"durable": "import torch"}),
    (owner_rule, {"cli__show": "def show():\n    import numpy as np"}),
    (owner_rule, {"data__packed": "from torch.utils.data import Dataset"}),
    (owner_rule, {"errors": "import pydantic"}),
    (owner_rule, {"train__slice": "import shinylib"}),
    (eager_cli_rule, {"cli": "import hotlap.cli.show", "cli__show": "import rich.table"}),
    (eager_cli_rule, {"cli": "from . import a", "cli__a": "from hotlap.cli import b", "cli__b": "import rich"}),
    (eager_cli_rule, {"cli__show": "import jinja2"}),
    (eager_cli_rule, {"cli__show": "from hotlap.data import packed", "data__packed": ""}),
    (eager_cli_rule, {"cli__show": "from hotlap import data", "data": ""}),
    (eager_cli_rule, {"cli__show": "try:\n    import transformers\nexcept ImportError:\n    pass"}),
    (disk_rule, {"runs": "open('x', 'w')"}),
    (disk_rule, {"runs": "open('x', mode='ab')"}),
    (disk_rule, {"runs": "def f(p, m):\n    return open(p, m)"}),
    (disk_rule, {"runs": "from pathlib import Path\nPath('x').open('r+')"}),
    (disk_rule, {"runs": "def f(path):\n    path.write_text('x')"}),
    (disk_rule, {"runs": "def f(path):\n    path.replace(other)"}),
    (disk_rule, {"runs": "def f(path):\n    path.mkdir(parents=True)"}),
    (disk_rule, {"runs": "import os\nos.open('x', os.O_WRONLY | os.O_CREAT)"}),
    (disk_rule, {"runs": "import os\nos.open('x', flags)"}),
    (disk_rule, {"runs": "import os\nos.write(1, b'x')"}),
    (disk_rule, {"runs": "import zipfile\nzipfile.ZipFile('x', 'w')"}),
    (disk_rule, {"runs": "from os import replace as swap\nswap('a', 'b')"}),
    (disk_rule, {"runs": "import shutil as sh\ndef f(clean=sh.rmtree): ..."}),
    (disk_rule, {"runs": "import tempfile\ntempfile.mkdtemp()"}),
    (disk_rule, {"runs": "from hotlap.durable import disk"}),
    (disk_rule, {"data__packed": "import numpy as np\nnp.memmap('x', 'int32', 'w+')"}),
    (disk_rule, {"data__packed": "import numpy as np\nnp.memmap('x', 'int32')"}),
    (disk_rule, {"train__model": "from safetensors.torch import save_file\nsave_file({}, 'x')"}),
    (disk_rule, {"train__model": "def f(model):\n    model.save_pretrained('x')"}),
    (clock_rule, {"runs": "import time\ntime.time()"}),
    (clock_rule, {"runs": "from time import monotonic as now\ndef f(now_s=now): ..."}),
    (clock_rule, {"runs": "import datetime as dt\ndt.datetime.now()"}),
    (clock_rule, {"runs": "from datetime import datetime\ndatetime.utcnow()"}),
    (clock_rule, {"train__slice": "import time\ntime.sleep(1)"}),
    (code_in_data_rule, {"runs": "import pickle"}),
    (code_in_data_rule, {"train__model": "import torch\ntorch.load('x')"}),
    (code_in_data_rule, {"train__model": "from torch import load\nload('x', weights_only=True)"}),
    (code_in_data_rule, {"data__packed": "import numpy\nnumpy.load('x', allow_pickle=True)"}),
    (code_in_data_rule, {"data__render": "load('x', trust_remote_code=flag)"}),
    (code_in_data_rule, {"runs": "eval('1')"}),
    (name_rule, {"train__utils": ""}),
    (name_rule, {"helpers__text": ""}),
    (fork_rule, {"data__render": "import multiprocessing.pool"}),
    (fork_rule, {"data__render": "from torch import multiprocessing"}),
    (fork_rule, {"data__render": "import torch\ntorch.multiprocessing.spawn(f)"}),
    (fork_rule, {"data__render": "import os\nos.fork()"}),
    (fork_rule, {"data__render": "from concurrent.futures import ProcessPoolExecutor as Pool\nPool()"}),
    (fork_rule, {"train__slice": "DataLoader(rows, num_workers=2)"}),
    (fork_rule, {"child": "import subprocess\nsubprocess.Popen(['x'], preexec_fn=f)"}),
    (measure.complaints, {"runs": "def f() -> None:\n" + "    x = 1\n" * 60}),
    (measure.complaints, {"runs": "x = 1\n" * 400}),
    (measure.complaints, {"research__gpt": "x = 1\n" * 601}),
    (measure.complaints, {"runs": "def f(a, b: int) -> None: ..."}),
    (measure.complaints, {"runs": "def f(a: int): ..."}),
    (measure.complaints, {"runs": "class A:\n    def f(self, *rest) -> None: ..."}),
    (
        measure.complaints,
        {"data__a": "import hotlap.train.a", "train__a": "def f() -> None:\n    import hotlap.data.b", "data__b": ""},
    ),
]

GOOD: list[tuple[Rule, dict[str, str]]] = [
    (
        layer_rule,
        {"errors": "", "durable": "from hotlap.errors import CorruptFile", "checkpoint": "from . import durable"},
    ),
    (
        layer_rule,
        {"train__slice": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hotlap.cloud", "cloud": ""},
    ),
    (layer_rule, {"export__merge": "from hotlap.train import model", "train__model": ""}),
    (layer_rule, {"cli__launch": "def launch():\n    from hotlap.cloud import launcher", "cloud__launcher": ""}),
    (cycle_rule, {"train": "", "train__a": "from hotlap.train import b", "train__b": ""}),
    (owner_rule, {"research__gpt": "import torch", "hub": "import huggingface_hub, json, os.path"}),
    (
        eager_cli_rule,
        {
            "cli__show": """
                import json, click
                from hotlap import config, __version__
                from hotlap.cli import ask
                def f():
                    import rich
            """,
            "config": "",
            "cli__ask": "",
        },
    ),
    (
        disk_rule,
        {
            "runs": """
                from dataclasses import replace
                import dataclasses
                replace(x, a=1)
                dataclasses.replace(x, a=1)
                'a'.replace('a', 'b')
            """
        },
    ),
    (
        disk_rule,
        {
            "runs": """
                from pathlib import Path
                open('x')
                Path('x').open('rb')
                open('x', encoding='utf-8')
                [1].remove(1)
            """
        },
    ),
    (
        disk_rule,
        {
            "runs": """
                from hotlap import durable
                durable.disk.rename(a, b)
                durable.replace(path, b'')
                durable.disk.truncate(a, 1)
            """
        },
    ),
    (
        disk_rule,
        {"data__packed": "import os\nimport numpy as np\nos.open('x', os.O_RDWR)\nnp.memmap('x', 'int32', mode='r')"},
    ),
    (
        disk_rule,
        {
            "durable": "import os\nos.replace('a', 'b')",
            "train__convert": "def f(model):\n    model.save_pretrained('x')",
        },
    ),
    (clock_rule, {"clock": "import time\ntime.time()", "research__gpt": "import time\ntime.time()"}),
    (
        clock_rule,
        {
            "runs": """
                from datetime import datetime, UTC
                from hotlap import clock
                clock.wall_s()
                datetime.fromtimestamp(0, UTC)
                step.time.total
            """
        },
    ),
    (code_in_data_rule, {"train__model": "model.eval()\nnp.load('x', allow_pickle=False)"}),
    (
        fork_rule,
        {
            "child": """
                import subprocess, threading
                from concurrent.futures import ThreadPoolExecutor
                subprocess.Popen(['x'], start_new_session=True)
            """
        },
    ),
    (measure.complaints, {"runs": "def f() -> None:\n" + "    x = 1\n" * 59 + "x = 1\n" * 339}),
    (
        measure.complaints,
        {
            "runs": """
                class A:
                    def f(self, a: int, *, b: int = 1, **rest: int) -> None: ...
                    @staticmethod
                    def g(a: int) -> None: ...
            """
        },
    ),
]


def case_name(value: object) -> str:
    return value.__name__ if inspect.isfunction(value) else ",".join(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("rule", "sources"), BAD, ids=case_name)
def test_the_rule_finds_what_breaks_it(rule: Rule, sources: dict[str, str]):
    assert len(rule(tree_of(**sources))) >= 1


@pytest.mark.parametrize(("rule", "sources"), GOOD, ids=case_name)
def test_the_rule_lets_pass_what_keeps_it(rule: Rule, sources: dict[str, str]):
    assert rule(tree_of(**sources)) == []


def test_every_rule_was_shown_to_fail_and_to_pass():
    assert {rule for rule, _ in BAD} == set(RULES)
    assert {rule for rule, _ in GOOD} | {name_rule} == set(RULES)


def test_the_picture_has_no_circle_and_no_stranger():
    """Parts import downward only, so the data above cannot allow a circle either."""
    graph = {unit: set((below or "").split()) for unit, below in (CORE | PACKAGES).items()}
    while leaves := {unit for unit, below in graph.items() if not below}:
        graph = {unit: below - leaves for unit, below in graph.items() if unit not in leaves}
    assert graph == {}


def test_exceptions_are_still_needed(ours: list[Module]):
    by_name = {module.name: module for module in ours}
    for name, called in DISK_EXCEPTIONS:
        assert any(call.name == called for call in calls_of(by_name[name])), f"{name} no longer calls {called}"
    functions = {(f.module, f.name) for module in ours for f in measure.functions_of(module)}
    assert set(measure.LONGER_FUNCTIONS) <= functions


# --- errors.py: the drawing and the classes ---


def drawn_errors(text: str) -> dict[str, tuple[str, int | None, list[str]]]:
    """Class name: parent, exit code if drawn, reason words."""
    rows: dict[str, tuple[str, int | None, list[str]]] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = re.fullmatch(r"(?P<indent>[ │]*)[├└]── (?P<name>\w+) +(?:(?P<code>\d+) +)?(?P<words>[\w, ]+)", line)
        if not match:
            continue
        depth = len(match["indent"]) // 4 - 1
        path[depth:] = [match["name"]]
        parent = path[depth - 1] if depth else "HotlapError"
        code = int(match["code"]) if match["code"] else None
        rows[match["name"]] = (parent, code, match["words"].split(", "))
    return rows


def error_table_complaints(text: str, classes: Sequence[type[errors.HotlapError]]) -> list[str]:
    drawn = drawn_errors(text)
    found = [f"{name} is drawn and does not exist" for name in drawn.keys() - {kind.__name__ for kind in classes}]
    for kind in classes:
        if kind.__name__ not in drawn:
            found.append(f"{kind.__name__} is not drawn")
            continue
        parent, code, words = drawn[kind.__name__]
        is_branch = kind.__bases__[0] is errors.HotlapError
        if kind.__bases__[0].__name__ != parent:
            found.append(f"{kind.__name__} is drawn under {parent}")
        if code != (kind.exit_code if is_branch else None):
            found.append(f"{kind.__name__} has exit code {kind.exit_code} and is drawn with {code}")
        own = {kind.reason, *(each.reason for each in classes if issubclass(each, kind))}
        if set(words) != own:
            found.append(f"{kind.__name__} can say {sorted(own)} and is drawn with {words}")
    return found


def error_classes() -> list[type[errors.HotlapError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.HotlapError) and value is not errors.HotlapError
    ]


def test_every_error_is_drawn_with_its_code_and_reason():
    assert errors.__doc__
    found = error_table_complaints(errors.__doc__, error_classes())
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("DiskFull ", "DiscFull "),
        ("IntegrityError         4", "IntegrityError         5"),
        ("PinMismatch            pins", "PinMismatch            pin"),
        ("    ├── FetchFailed            5   fetch\n", ""),
        ("    │   ├── NonFiniteLoss          nan\n", "    ├── NonFiniteLoss          6   nan\n"),
    ],
)
def test_a_wrong_drawing_is_found(old: str, new: str):
    assert errors.__doc__ and old in errors.__doc__
    assert error_table_complaints(errors.__doc__.replace(old, new), error_classes())


# --- what a cold start loads ---

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "peft", "huggingface_hub", "rich")


def loaded_after(code: str) -> set[str]:
    probe = f"import sys\n{code}\nprint('loaded:', *sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_help_loads_nothing_heavy():
    run_help = """
        from hotlap.cli import main
        sys.argv = ["hotlap", "--help"]
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
    """
    loaded = loaded_after(dedent(run_help))
    assert "click" in loaded
    assert not loaded & set(HEAVY)


def test_importing_hotlap_loads_nothing_heavy():
    loaded = loaded_after("import hotlap, hotlap.errors, hotlap.config, hotlap.durable, hotlap.clock")
    assert "pydantic" in loaded
    assert not loaded & {*HEAVY, "click"}


# --- make measure ---


@pytest.mark.long
def test_measure_prints_every_file_and_the_sums(capsys: pytest.CaptureFixture[str], ours: list[Module]):
    assert measure.main() == bool(measure.complaints(ours))
    lines = capsys.readouterr().out.splitlines()
    assert {module.file for module in ours} <= {line.split()[0] for line in lines}
    assert "annotated 100.0 %" in lines[-1]
    assert "mutual imports 0" in lines[-1]


def test_measure_fails_above_a_limit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "load_modules", lambda: tree_of(runs="def f(a): ...", data__a="x = 1\n" * 400))
    assert measure.main() == 1
    said = capsys.readouterr()
    assert "annotated 0.0 %" in said.out
    assert "runs.py:1 f is not fully annotated" in said.err
    assert "data/a.py has 400 lines, and 399 is the limit" in said.err


def test_source_tree_reads_what_is_there():
    (module,) = tree_of(train__slice="from . import model\nfrom .. import durable as d\nimport os.path\nd.disk.sync(p)")
    assert {item.target for item in imports_of(module)} == {"hotlap.train.model", "hotlap.durable", "os.path"}
    assert "hotlap.durable.disk.sync" in {call.name for call in calls_of(module)}
    assert dotted(module, ast.parse("os.path.join", mode="eval").body) == "os.path.join"
    assert mutual_imports(graph_of(tree_of(data__a="import hotlap.train.b", train__b="import hotlap.data.a"))) == [
        ("data", "train")
    ]
