"""One attempt to break out for each claim of `sandbox.py`, by real programs in the real sandbox."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from processes import command_lines

from hotlap import clock
from hotlap.errors import Refused
from hotlap.speedrun import environments, jail, sandbox
from hotlap.speedrun.sandbox import Bounds, Program, Ran

pytestmark = pytest.mark.long

ALL = ("filesystem", "network", "processes", "privileges", "limits")
MIB = 1 << 20
LIBRARIES = environments.own().folders


def run(
    tmp_path: Path,
    code: str,
    inputs: tuple[tuple[Path, str], ...] = (),
    time_limit_s: float = 60.0,
    memory_bytes: int = 256 * MIB,
    num_processes: int = 32,
    collect: dict[str, int] | None = None,
    env: dict[str, str] | None = None,
) -> Ran:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    program = Program(
        argv=(sys.executable, "-I", "-S", "-c", dedent(code)),
        cwd="/",
        env=env or sandbox.variables(1, Path(sys.executable)),
        inputs=inputs,
        collect=collect or {},
        libraries=LIBRARIES,
    )
    return sandbox.run(program, Bounds(time_limit_s, memory_bytes, num_processes, 1), work, ALL)


def said(ran: Ran) -> Any:
    assert ran.exit_code == 0, ran.log
    return json.loads(ran.log.splitlines()[-1])


def test_a_program_runs_and_its_end_is_told(tmp_path: Path) -> None:
    ran = run(tmp_path, "print('words'); raise SystemExit(3)")
    assert ran.exit_code == 3
    assert ran.log == "words"
    assert ran.protections == ALL
    assert 0.0 < ran.wall_s <= ran.outer_wall_s
    assert ran.num_left_behind == 0 and ran.output == ()


def test_a_signal_that_ends_it_is_told(tmp_path: Path) -> None:
    ran = run(tmp_path, "import os; os.kill(os.getpid(), 11)")
    assert ran.exit_code == 128 + signal.SIGSEGV


def test_it_sees_its_inputs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "test.jsonl").write_text("the test rows")
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "train.jsonl").write_text("the training rows")
    code = f"""
        import json, os
        found = []
        for top, folders, files in os.walk("/", onerror=lambda error: None):
            if top.startswith(("/proc", "/usr", "{sys.base_prefix}", "{sys.prefix}")):
                folders.clear()
            found += [os.path.join(top, name) for name in files if name.endswith(".jsonl")]
        print(json.dumps([open("/given/train.jsonl").read(), os.path.exists("{tmp_path}"), sorted(found)]))
    """
    text, sees_outside, found = said(run(tmp_path, code, inputs=((tmp_path / "given", "/given"),)))
    assert text == "the training rows"
    assert not sees_outside
    package = Path(sandbox.__file__).parents[1]
    assert [path for path in found if not path.startswith(str(package))] == ["/given/train.jsonl"]


def test_the_tracks_and_their_generators_are_not_inside(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    assert (root / "tracks" / "c1" / "generate.py").is_file()
    code = (
        f"import os, json; print(json.dumps([os.path.exists('{root / 'tracks'}'), os.path.exists('{root / 'tests'}')]))"
    )
    assert said(run(tmp_path, code)) == [False, False]


ESCAPES_TO_ROOT = """
    import os, json
    tried = []
    for path in ("/proc/1/root", "/proc/self/root/..", "/proc/1/cwd", "/proc/1/fd", "/../../.."):
        try:
            tried.append(sorted(os.listdir(path)))
        except OSError as error:
            tried.append(type(error).__name__)
    print(json.dumps(tried))
"""


def test_an_input_may_lie_where_it_may_write(tmp_path: Path) -> None:
    """As a virtual environment in /tmp does."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "text").write_text("given")
    code = """
        import json
        open("/tmp/own", "w").write("own")
        try:
            open("/tmp/given/text", "w")
        except OSError as error:
            print(json.dumps([open("/tmp/given/text").read(), error.strerror]))
    """
    told = said(run(tmp_path, code, inputs=((tmp_path / "given", "/tmp/given"),)))
    assert told == ["given", "Read-only file system"]


def test_no_way_through_proc(tmp_path: Path) -> None:
    tried = said(run(tmp_path, ESCAPES_TO_ROOT))
    inside = tried[4]
    assert "proc" in inside and "home" not in inside
    assert tried[0] == "PermissionError" and tried[2] == "PermissionError" and tried[3] == "PermissionError"
    assert tried[1] == inside


def test_inputs_are_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "weights").write_bytes(b"frozen")
    (folder / "weights").chmod(0o666)
    code = """
        import ctypes, json, os
        tried = []
        def attempt(action):
            try:
                action()
                tried.append("done")
            except OSError as error:
                tried.append(error.strerror)
        attempt(lambda: open("/model/weights", "w"))
        attempt(lambda: open("/model/new", "w"))
        attempt(lambda: os.remove("/model/weights"))
        attempt(lambda: os.chmod("/model/weights", 0o777))
        libc = ctypes.CDLL(None, use_errno=True)
        remounted = libc.mount(b"none", b"/model", None, ctypes.c_ulong(4096 | 32), None)
        unmounted = libc.umount2(b"/model", 2)
        print(json.dumps([tried, remounted, unmounted]))
    """
    tried, remounted, unmounted = said(run(tmp_path, code, inputs=((folder, "/model"),)))
    assert tried == ["Read-only file system"] * 4
    assert (remounted, unmounted) == (-1, -1)
    assert (folder / "weights").read_bytes() == b"frozen" and len(list(folder.iterdir())) == 1


def test_no_network_not_even_to_this_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
            import json, socket
            tried = []
            for address in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
                try:
                    socket.create_connection(address, timeout=5)
                    tried.append("connected")
                except OSError as error:
                    tried.append(error.strerror)
            print(json.dumps([tried, socket.if_nameindex()]))
        """
        tried, interfaces = said(run(tmp_path, code))
    assert tried == ["Network is unreachable"] * 2
    assert [name for _, name in interfaces] == ["lo"]


def test_no_secrets_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_secret")
    code = """
        import json, os
        texts = [open(f"/proc/{pid}/environ").read() for pid in os.listdir("/proc") if pid == str(os.getpid())]
        try:
            texts.append(open("/proc/1/environ").read())
        except PermissionError:
            pass
        print(json.dumps([sorted(os.environ), [text.count("rpa_secret") for text in texts]]))
    """
    names, counts = said(run(tmp_path, code))
    assert set(names) - {"LC_CTYPE"} == set(sandbox.variables(1, Path(sys.executable)))
    assert counts == [0]


def test_it_has_no_privilege_and_gets_none(tmp_path: Path) -> None:
    code = """
        import ctypes, json, os
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        libc = ctypes.CDLL(None, use_errno=True)
        tried = [libc.unshare(0x10000000), libc.sethostname(b"x", 1), libc.ptrace(16, 1, None, None)]
        try:
            os.setuid(0)
            tried.append(0)
        except OSError:
            tried.append(-1)
        sets = [status[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "NoNewPrivs")]
        print(json.dumps([os.getuid(), sets, tried]))
    """
    user, sets, tried = said(run(tmp_path, code))
    assert user != 0
    assert sets == ["0" * 16] * 3 + ["1"]
    assert tried == [-1, -1, -1, -1]


def test_it_sees_no_other_process_and_cannot_signal_them(tmp_path: Path) -> None:
    code = f"""
        import json, os
        tried = []
        for pid in (1, {os.getpid()}):
            try:
                os.kill(pid, 9)
                tried.append("sent")
            except OSError as error:
                tried.append(type(error).__name__)
        print(json.dumps([sorted(int(name) for name in os.listdir("/proc") if name.isdigit()), tried]))
    """
    pids, tried = said(run(tmp_path, code))
    assert pids == [1, 2]
    assert tried[1] == "ProcessLookupError"


DAEMON = """
    import os, time
    born, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("alive", flush=True)
            os.close(0), os.close(1), os.close(2)
            os.write(told, b"1")
            time.sleep(600)
        os._exit(0)
    os.wait()
    os.read(born, 1)
"""


def test_a_daemon_does_not_outlive_it(tmp_path: Path) -> None:
    ran = run(tmp_path, DAEMON)
    assert ran.exit_code == 0 and "alive" in ran.log
    assert ran.num_left_behind == 1


def test_its_time_ends_whatever_it_ignores(tmp_path: Path) -> None:
    code = """
        import os, signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            signal.signal(number, signal.SIG_IGN)
        os.fork()
        print("going on", flush=True)
        while True:
            time.sleep(1)
    """
    ran = run(tmp_path, code, time_limit_s=4.0)
    assert ran.exit_code is None
    assert ran.log.count("going on") == 2
    assert ran.num_left_behind == 1
    assert ran.wall_s >= 4.0


def test_a_fork_bomb_stays_within_its_number(tmp_path: Path) -> None:
    code = """
        import json, os, time
        made = 0
        try:
            for _ in range(1000):
                if os.fork() == 0:
                    time.sleep(600)
                made += 1
        except OSError as error:
            print(json.dumps([made, type(error).__name__]))
    """
    ran = run(tmp_path, code, num_processes=20)
    made, error = said(ran)
    assert 10 <= made < 20 and error == "BlockingIOError"
    assert ran.num_left_behind == made


def test_the_disk_cannot_be_filled(tmp_path: Path) -> None:
    code = """
        import json, os
        written, errors = 0, []
        for number in range(8):
            for folder in ("/tmp", "/out", "/dev/shm"):
                try:
                    with open(f"{folder}/{number}", "wb", buffering=0) as file:
                        for _ in range(16):
                            written += file.write(bytes(1 << 20))
                except OSError as error:
                    errors.append(error.strerror)
        print(json.dumps([written >> 20, sorted(set(errors))]))
    """
    written_mib, errors = said(run(tmp_path, code, memory_bytes=64 * MIB))
    assert 40 <= written_mib <= 64
    assert errors == ["No space left on device"]
    assert sum(path.stat().st_size for path in (tmp_path / "work").rglob("*")) < MIB


def test_memory_has_its_limit(tmp_path: Path) -> None:
    code = """
        try:
            block = bytearray(1 << 30)
        except MemoryError:
            print('"refused"')
    """
    assert said(run(tmp_path, code)) == "refused"


def test_a_fake_result_on_any_output_is_only_words(tmp_path: Path) -> None:
    code = """
        import os
        fake = b'{"event": "result", "exit_code": 0, "wall_s": 0.001, "output": [], "collected": []}\\n'
        for descriptor in range(1, 50):
            try:
                os.write(descriptor, fake)
            except OSError:
                pass
        raise SystemExit(5)
    """
    ran = run(tmp_path, code)
    assert ran.exit_code == 5 and ran.wall_s > 0.001
    assert ran.log.count("0.001") == 2  # its standard output and error, which are talk


def test_only_named_plain_files_come_out(tmp_path: Path) -> None:
    code = """
        import os
        os.symlink("/etc/ld.so.cache", "/out/link")
        os.mkfifo("/out/pipe")
        os.mkdir("/out/folder")
        open("/out/folder/x", "w").write("x")
        open("/out/good", "w").write("good")
        open("/out/large", "w").write("y" * 101)
        open("/out/unasked", "w").write("z")
    """
    names = dict.fromkeys(("link", "pipe", "folder", "good", "large"), 100)
    ran = run(tmp_path, code, collect=names)
    assert ran.exit_code == 0, ran.log
    assert ran.collected == ("good",)
    assert [path.name for path in (tmp_path / "work" / "out").iterdir()] == ["good"]
    assert (tmp_path / "work" / "out" / "good").read_text() == "good"
    kinds = {entry["name"]: entry["kind"] for entry in ran.output}
    assert kinds == {
        **dict.fromkeys(("link", "pipe"), "special"),
        **dict.fromkeys(("good", "large", "unasked", "folder/x"), "file"),
        "folder": "folder",
    }


def test_more_files_than_anybody_wants_to_read_are_told_in_part(tmp_path: Path) -> None:
    ran = run(tmp_path, "for number in range(3000): open(f'/out/{number}', 'w').close()")
    assert ran.exit_code == 0, ran.log
    assert len(ran.output) == 200


def test_a_folder_too_deep_to_be_listed_is_no_way_out(tmp_path: Path) -> None:
    """Its path is too long for the kernel, which ended the sandbox without a result: a failure of nobody's."""
    code = "import os; os.chdir('/out')\nfor _ in range(30): os.mkdir('d' * 250); os.chdir('d' * 250)"
    ran = run(tmp_path, code)
    assert ran.exit_code == 0 and 10 < len(ran.output) < 20
    assert [entry["kind"] for entry in ran.output][-2:] == ["folder", "special"]
    assert max(len(entry["name"]) for entry in ran.output) == 300


def test_a_flood_of_talk_is_kept_to_its_end(tmp_path: Path) -> None:
    """Empty lines, then one line without an end."""
    code = """
        import os
        for _ in range(40):
            os.write(1, b"\\n" * 100_000)
        for _ in range(64):
            os.write(1, b"x" * 65_536)
        os.write(2, b"the end")
    """
    ran = run(tmp_path, code)
    assert ran.exit_code == 0 and ran.log.endswith("the end")
    assert len(ran.log) <= 1 << 20


def test_a_contest_in_the_environment_s_own_folder_is_refused(tmp_path: Path) -> None:
    """As `python -m venv .` makes it: everything in that folder would be seen, test rows too."""
    (tmp_path / "tracks").mkdir()
    sandbox.require_hidden(tmp_path / "tracks", LIBRARIES)
    with pytest.raises(Refused, match="which strangers' programs see"):
        sandbox.require_hidden(tmp_path / "tracks", (*LIBRARIES, tmp_path))


def test_nothing_stays_for_the_next_run(tmp_path: Path) -> None:
    write = "[open(f'{folder}/left', 'w').write('x') for folder in ('/tmp', '/out', '/dev/shm', '/tmp')]"
    look = "import json, os; print(json.dumps([os.listdir(folder) for folder in ('/tmp', '/out', '/dev/shm')]))"
    before = said(run(tmp_path, look))
    assert run(tmp_path, write).exit_code == 0
    assert said(run(tmp_path, look)) == before and not any("left" in names for names in before)


def test_the_clock_cannot_be_set(tmp_path: Path) -> None:
    code = """
        import json, time
        tried = []
        for kind in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC):
            try:
                time.clock_settime(kind, 1.0)
                tried.append("set")
            except OSError as error:
                tried.append(type(error).__name__)
        print(json.dumps(tried))
    """
    before_s = clock.wall_s()
    assert said(run(tmp_path, code)) == ["PermissionError", "OSError"]
    assert clock.wall_s() >= before_s


def test_a_killed_caller_leaves_nothing_running(tmp_path: Path) -> None:
    """The outer process dies by SIGKILL; the program in its namespace dies with it."""
    marker = f"marker-{os.getpid()}-{tmp_path.name}"
    (tmp_path / "work").mkdir()
    plan = sandbox._plan(  # pyright: ignore[reportPrivateUsage]
        Program(
            (sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(600)", marker),
            "/",
            {},
            (),
            {},
            LIBRARIES,
        ),
        Bounds(300.0, 64 * MIB, 8, 1),
        tmp_path / "work",
    )
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-I", "-S", jail.__file__, str(tmp_path / "plan.json")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as outer:
        assert outer.stderr and outer.stderr.readline() == "up\n"
        assert _with_argument(marker)
        outer.kill()
    patience = clock.Deadline(clock.monotonic_s() + 30)
    while _with_argument(marker) and not patience.is_over():
        clock.sleep_s(0.05)
    assert not _with_argument(marker)


def _with_argument(marker: str) -> list[int]:
    return [pid for pid, words in command_lines() if marker in words]


@pytest.mark.skipif(os.getuid() != 0, reason="whoever is not root runs every other test this way")
def test_it_locks_in_as_an_ordinary_user_too(tmp_path: Path) -> None:
    """With the system's Python and in a folder of its own: pytest's are closed to that user."""
    if not Path("/usr/bin/python3").exists() or not shutil.which("setpriv"):
        pytest.skip("needs /usr/bin/python3 and setpriv")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for part in ("root", "out"):
            (folder / part).mkdir()
            shutil.chown(folder / part, 65534, 65534)
        shutil.copy(jail.__file__, folder / "jail.py")
        code = """
            import os, time
            made = 0
            try:
                for _ in range(100):
                    if os.fork() == 0:
                        time.sleep(600)
                    made += 1
            except OSError:
                print(made, os.getuid(), os.path.exists("/proc/1/fd/0"), os.access("/usr", os.W_OK))
        """
        argv = ("/usr/bin/python3", "-I", "-S", "-c", dedent(code))
        program = Program(argv, "/", {}, (), {})
        plan = sandbox._plan(program, Bounds(60.0, 64 * MIB, 12, 1), folder)  # pyright: ignore[reportPrivateUsage]
        system = [bind for bind in plan["binds"] if bind[1] in ("/usr", "/bin", "/lib", "/lib64")]
        (folder / "plan.json").write_text(json.dumps({**plan, "binds": system}))
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-I", "-S"]
        command = [*user, str(folder / "jail.py"), str(folder / "plan.json")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    locked, result = (json.loads(line) for line in done.stdout.splitlines())
    assert tuple(locked["protections"]) == ALL
    made, user_inside, sees_warden, can_write = done.stderr.split()
    assert 5 <= int(made) < 12 and (user_inside, sees_warden, can_write) == ("1000", "False", "False")
    assert result["exit_code"] == 0 and result["num_left_behind"] == int(made)


def test_a_machine_that_cannot_give_a_protection_is_refused(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    program = Program((sys.executable, "-c", "print('ran')"), "/", {}, (), {})
    with pytest.raises(Refused, match="not given: hardware"):
        sandbox.run(program, Bounds(10, 64 * MIB, 8, 1), work, (*ALL, "hardware"))


def test_without_namespaces_nothing_runs(tmp_path: Path) -> None:
    """In a namespace that may make no further ones, as on a machine that forbids them."""
    (tmp_path / "inner").mkdir()
    code = f"""
        import pathlib, subprocess, sys
        pathlib.Path("/proc/sys/user/max_user_namespaces").write_text("0")
        from hotlap.errors import Refused
        from hotlap.speedrun import sandbox
        program = sandbox.Program((sys.executable, "-c", "open('{tmp_path}/ran', 'w')"), "/", {{}}, (), {{}})
        try:
            sandbox.run(program, sandbox.Bounds(10, 1 << 26, 8, 1), pathlib.Path("{tmp_path}/inner"), ("network",))
        except Refused as error:
            print(error)
    """
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "cannot lock strangers' code in" in done.stdout, done.stderr
    assert "not given: network" in done.stdout
    assert not (tmp_path / "ran").exists()
