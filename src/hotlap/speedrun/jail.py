"""Run one stranger's program locked in: `python -I -S jail.py PLAN.json`. Standard library only, run by path, alone.

Three processes before the program's: the outer one (which the caller's watchdog kills), the one that opens the
namespaces, and the first process of the new process namespace, here called the warden. When the warden ends, the
kernel kills whatever the program left behind. The warden measures the program's time, and tells it in one line of
JSON on standard output, which the program never holds: its own standard output is standard error.

Everything the program can write lies in memory of a limited size that ends with it. Named files of its output folder
are copied out by the warden, plain files only, into a folder it opened before.
"""

import ctypes
import json
import os
import resource
import signal
import stat
import sys
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

Plan = dict[str, Any]

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER, _NEW_MOUNTS, _NEW_PIDS, _NEW_NET = 0x10000000, 0x00020000, 0x20000000, 0x40000000
_NEW_IPC, _NEW_NAME, _NEW_CGROUP = 0x08000000, 0x04000000, 0x02000000
_READ_ONLY, _NO_SUID, _NO_DEV, _NO_EXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_RECURSIVE, _PRIVATE, _DETACH = 16384, 1 << 18, 2
_PARENT_DEATH, _DUMPABLE, _DROP_BOUND, _NO_NEW_PRIVILEGES = 1, 4, 24, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
_INSIDE = 1000
"""The program's user and group number inside."""
_OUTSIDE = 1_900_000_000
"""Its number outside when root started it: nobody else's."""
_MAX_LISTED, _MAX_NAME, _MAX_PATH = 200, 300, 4000
_DEVICES = ("null", "zero", "full", "random", "urandom")


class Trouble(Exception):
    """The machine does not allow a part of the protection. Nothing of the program ran."""


def call(what: str, status: int) -> None:
    if status != 0:
        raise Trouble(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, str(target), kind, options)]
    call(f"mount {target}", _LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def outer(plan: Plan) -> int:
    """Start the one that opens the namespaces, and say who it is inside them: only its parent may."""
    user, group = os.getuid(), os.getgid()
    asked, ask = os.pipe()
    waiting, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(asked)
        os.close(go)
        leave(opener(plan, ask, waiting))
    os.close(ask)
    os.close(waiting)
    os.read(asked, 1)
    try:
        write_maps(pid, user, group)
    except OSError as error:
        tell({"event": "trouble", "why": f"user namespace: {error.strerror}"})
    os.close(go)
    return code_of(os.waitpid(pid, 0)[1])


def write_maps(pid: int, user: int, group: int) -> None:
    folder = Path(f"/proc/{pid}")
    (folder / "setgroups").write_text("deny")
    for name, own in (("uid_map", user), ("gid_map", group)):
        lines = f"0 0 1\n{_INSIDE} {_OUTSIDE} 1\n" if user == 0 else f"{_INSIDE} {own} 1\n"
        (folder / name).write_text(lines)


def opener(plan: Plan, ask: int, waiting: int) -> int:
    call("unshare (user namespace)", _LIBC.unshare(_NEW_USER))
    die_with_parent()
    os.close(ask)
    os.read(waiting, 1)
    rest = _NEW_MOUNTS | _NEW_PIDS | _NEW_NET | _NEW_IPC | _NEW_NAME | _NEW_CGROUP
    call("unshare (mounts, processes, network)", _LIBC.unshare(rest))
    pid = os.fork()
    if pid == 0:
        leave(warden(plan))
    return code_of(os.waitpid(pid, 0)[1])


def die_with_parent() -> None:
    call("prctl", _LIBC.prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0))


def warden(plan: Plan) -> int:
    die_with_parent()
    call("prctl", _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0))
    into = os.open(plan["collect_into"], os.O_RDONLY | os.O_DIRECTORY)
    build_root(plan)
    # Inside, no further user namespace: the kernel's largest surface for those who want out.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    tell({"event": "locked", "protections": ["filesystem", "network", "processes", "privileges", "limits"]})
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    started_ns = time.monotonic_ns()
    worker = os.fork()
    if worker == 0:
        become_program(plan)
    status = wait_for(worker, started_ns + int(plan["time_limit_s"] * 1e9))
    wall_ns = time.monotonic_ns() - started_ns
    num_left_behind = kill_the_rest() - (status is None)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    tell(
        {
            "event": "result",
            "exit_code": None if status is None else code_of(status),
            "wall_s": wall_ns / 1e9,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "max_rss_bytes": usage.ru_maxrss * 1024,
            "num_left_behind": num_left_behind,
            "output": listing(Path(plan["output"])),
            "collected": collect(plan, into),
        }
    )
    return 0


def build_root(plan: Plan) -> None:
    root = Path(plan["root"])
    mount("none", Path("/"), None, _RECURSIVE | _PRIVATE)
    mount("tmpfs", root, "tmpfs", _NO_SUID | _NO_DEV, f"size={plan['memory_bytes']},mode=0755")
    for source, target in plan["binds"]:
        bind(source, root / target.lstrip("/"))
    for name in _DEVICES:
        bind(f"/dev/{name}", root / "dev" / name, is_device=True)
    for name in plan["writable"]:
        folder = root / name.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)  # an input may lie below it
        folder.chmod(0o777)
    (root / "proc").mkdir()
    mount("proc", root / "proc", "proc", _NO_SUID | _NO_DEV | _NO_EXEC)
    os.chdir(root)
    call("pivot_root", _LIBC.syscall(ctypes.c_long(_PIVOT_ROOT), b".", b"."))
    call("umount", _LIBC.umount2(b".", _DETACH))
    os.chdir("/")


def bind(source: str, target: Path, is_device: bool = False) -> None:
    """Show a file or folder at a place in the new root, read-only and at all its depth."""
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(source, target, None, _BIND)
    # What is locked on the source's own mount has to be asked for again, or the kernel refuses.
    kept = os.statvfs(source).f_flag & (_NO_SUID | _NO_DEV | _NO_EXEC)
    mount("none", target, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SUID | kept | (0 if is_device else _NO_DEV))


def become_program(plan: Plan) -> NoReturn:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.setsid()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: plan["threads"]])
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 1024,
            resource.RLIMIT_FSIZE: plan["memory_bytes"],
            resource.RLIMIT_DATA: plan["memory_bytes"],
            resource.RLIMIT_NPROC: plan["num_processes"],
        }
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))
        for number in range(64):  # those the kernel does not know answer EINVAL
            _LIBC.prctl(_DROP_BOUND, number, 0, 0, 0)
        if os.getuid() != _INSIDE:
            os.setresgid(_INSIDE, _INSIDE, _INSIDE)
            os.setresuid(_INSIDE, _INSIDE, _INSIDE)
        call("no_new_privs", _LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        os.chdir(plan["cwd"])
        os.execve(plan["argv"][0], plan["argv"], plan["env"])
    except (OSError, Trouble) as error:
        print(f"the program could not be started: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def wait_for(worker: int, until_ns: int) -> int | None:
    """The program's status, or None when its time is over."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == worker:
            return status
        left_s = (until_ns - time.monotonic_ns()) / 1e9
        if left_s <= 0:
            return None
        if pid == 0:
            signal.sigtimedwait([signal.SIGCHLD], left_s)


def kill_the_rest() -> int:
    """End everything else in this namespace and reap it; how many that were."""
    num_found = 0
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return num_found
        num_found += 1


def listing(folder: Path) -> list[dict[str, Any]]:
    """What lies in the output folder, at any depth, links unfollowed."""
    found: list[dict[str, Any]] = []
    waiting = [folder]
    while waiting and len(found) < _MAX_LISTED:
        with os.scandir(waiting.pop()) as entries:
            some = sorted(islice(entries, _MAX_LISTED), key=lambda entry: entry.name)
        for entry in some:
            # What lies so deep that its path is too long for the kernel is told and not looked into.
            facts = None if len(os.fsencode(entry.path)) > _MAX_PATH else entry.stat(follow_symlinks=False)
            mode = facts.st_mode if facts else 0
            kind = "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"
            name = os.path.relpath(entry.path, folder).encode(errors="backslashreplace").decode()
            found.append({"name": name[:_MAX_NAME], "kind": kind, "bytes": facts.st_size if facts else 0})
            if kind == "folder":
                waiting.append(Path(entry.path))
    return found[:_MAX_LISTED]


def collect(plan: Plan, into: int) -> list[str]:
    """Copy the named files out: plain ones, up to their limit."""
    done: list[str] = []
    for name, max_bytes in plan["collect"].items():
        try:
            source = os.open(Path(plan["output"]) / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        facts = os.fstat(source)
        if stat.S_ISREG(facts.st_mode) and facts.st_size <= max_bytes:
            target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=into)
            copied = 0
            while copied < facts.st_size:
                copied += os.sendfile(target, source, copied, facts.st_size - copied)
            os.fsync(target)
            os.close(target)
            done.append(name)
        os.close(source)
    return done


def code_of(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def tell(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(code)


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    main_pid = os.getpid()
    try:
        return outer(plan)
    except (OSError, Trouble) as error:
        tell({"event": "trouble", "why": str(error)})
        if os.getpid() != main_pid:
            leave(125)
        return 125


if __name__ == "__main__":
    sys.exit(main())
