"""How hotlap arrives on a rented machine's volume: parts of its wheel, then an environment that has it, made once.

    python3 -I arrive.py ROOT DIGEST FILE_NAME ORDER

Standard library only, and it stands alone: its text travels in the create request, as the job of `boot`. ROOT is the
volume, or any folder where there is none; DIGEST the wheel's SHA-256. ORDER is JSON: `part`, a part of the wheel as its
number, their count and a text, and `install`, which the last machine has: an extra, and commands, each a list of words
for the environment's Python. Either may be missing. Lines on standard output: `HOTLAP: ` and JSON, an `arrived` event
per step with its seconds.
"""

import base64
import bz2
import hashlib
import json
import os
import site
import subprocess
import sys
import time
import zipfile
from pathlib import Path

_OLDEST = (3, 11)


def main(argv: list[str]) -> int:
    if sys.version_info < _OLDEST:
        return _fail(f"The image's Python is {sys.version.split()[0]}; hotlap needs 3.11 or newer. Use another image.")
    place, digest, file_name, text = argv
    root = Path(place).absolute()
    order = json.loads(text)
    wheel = root / ".hotlap" / "parcels" / digest / file_name
    code = take_part(wheel, digest, *order["part"]) if "part" in order else 0
    if code == 0 and "install" in order:
        code = install(env_folder(root, digest), wheel, digest, *order["install"])
    return code


def env_folder(root: Path, digest: str) -> Path:
    return root / ".hotlap" / "envs" / digest[:16]


def take_part(wheel: Path, digest: str, number: int, count: int, text: str) -> int:
    """Keep one part; with the last of them, whichever that is, make the wheel of them."""
    began_s = time.monotonic()
    if _is_whole(wheel, digest):
        return 0
    wheel.parent.mkdir(parents=True, exist_ok=True)
    _write(wheel.parent / f"part-{number}", text.encode())
    parts = [wheel.parent / f"part-{number}" for number in range(count)]
    if all(part.exists() for part in parts):
        try:
            data = bz2.decompress(base64.b85decode(b"".join(part.read_bytes() for part in parts)))
        except (ValueError, OSError) as error:
            return _fail(f"The parts of the wheel do not fit together: {error}.", parts)
        if hashlib.sha256(data).hexdigest() != digest:
            return _fail("The wheel is not the one that was sent.", parts)
        _write(wheel, data)
        for part in parts:
            part.unlink()
    _say(f"part {number + 1} of {count}", began_s)
    return 0


def _is_whole(wheel: Path, digest: str) -> bool:
    return wheel.exists() and hashlib.sha256(wheel.read_bytes()).hexdigest() == digest


def install(env: Path, wheel: Path, digest: str, extra: str, commands: list[list[str]]) -> int:
    """Make the environment unless it is there, whole and for this Python, and run the commands in it."""
    began_s = time.monotonic()
    if not is_ready(env, digest):
        if not _is_whole(wheel, digest):
            return _fail(f"{wheel} is not there whole. Launch again: it is brought once more.")
        code = _make(env, wheel, extra)
        if code != 0:
            return _fail(f"The environment cannot be made: exit code {code}; the lines above say why.")
        _write(env / "ready.json", json.dumps(_marker(digest)).encode())
        _say("environment", began_s)
    for command in commands:
        began_s = time.monotonic()
        code = subprocess.run([str(env / "bin" / "python"), *command], check=False).returncode
        if code != 0:
            return code
        _say(" ".join(command)[:60], began_s)
    return 0


def is_ready(env: Path, digest: str) -> bool:
    try:
        return json.loads((env / "ready.json").read_bytes()) == _marker(digest)
    except (OSError, ValueError):
        return False


def _marker(digest: str) -> dict[str, str]:
    """The environment leans on the image's Python, so another one makes it useless."""
    return {"wheel_sha256": digest, "python": sys.version, "executable": sys.executable}


def _make(env: Path, wheel: Path, extra: str) -> int:
    # Cleared of what a cut-off attempt left, and without pip of its own: some images lack what would install it, and
    # the image's pip can work from outside.
    code = _run("-m", "venv", "--clear", "--without-pip", str(env))
    if code != 0:
        return code
    (packages,) = (env / "lib").glob("python3*/site-packages")
    # What the image has, torch above all, need not be installed again; what is installed here comes before it.
    places = [place for place in [*site.getsitepackages(), site.getusersitepackages()] if Path(place).is_dir()]
    _write(packages / "image.pth", "".join(f"{place}\n" for place in places).encode())
    rules = wheel.parent / "constraints.txt"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/constraints.txt"))
        _write(rules, archive.read(name))
    pip = ("-m", "pip", "--python", str(env / "bin" / "python"), "install")
    pip += ("--no-input", "--disable-pip-version-check", "-q")
    # An image may bring a hotlap of the same version, which would pass for this one.
    code = _run(*pip, "--no-deps", "--force-reinstall", str(wheel))
    return code or _run(*pip, "-c", str(rules), f"{wheel}[{extra}]" if extra else str(wheel))


def _run(*words: str) -> int:
    return subprocess.run([sys.executable, *words], check=False).returncode


def _write(path: Path, data: bytes) -> None:
    staged = path.with_name(path.name + ".new")
    with staged.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(path)


def _say(step: str, began_s: float) -> None:
    facts = {"event": "arrived", "step": step, "seconds": round(time.monotonic() - began_s, 1)}
    print("HOTLAP: " + json.dumps(facts), flush=True)


def _fail(message: str, parts: list[Path] | None = None) -> int:
    for part in parts or ():
        part.unlink()
    print("HOTLAP: " + json.dumps({"event": "result", "exit_code": 5, "reason": "provisioning", "message": message}))
    return 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
