"""What a disk may hold after a crash: record every change, then build each state a power loss could have left.

The model follows ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014), which showed that
working programs lean on orderings their file system never promised. As there, a call is taken apart into what it
does to names and what it does to bytes, each of which reaches the disk in an order of its own unless an fsync stands
between; then every prefix of the recorded calls is a crash point, and a program is right if it recovers from every
state allowed there. Ours is a smaller model:

- *Bytes* of a file that were not synced may be there, be missing (length 0 for a new file), be torn to half, be
  zeros of the right length (the length was written, the bytes were not), or have a hole (an earlier page missing, a
  later one there). A truncation that was not synced may have happened or not, independently of what was appended.
- *Names*: a creation, removal or rename is lost or kept as a whole; a rename is atomic. It lasts once the directory
  it happened in is synced; for a rename, the one it went to. Syncing a file does not sync its name, and syncing a
  directory does not sync the directory's own name in the one above.
- Of the name changes since their last sync we build: all kept, none kept, each one lost alone, each one kept alone.
  All subsets would be exponential; a missing ordering shows in one of these. A change that rests on a lost one (a
  rename of a file whose creation was lost) has no effect.
- A *kill* loses nothing that a call did; it leaves everything done so far, and of the call under way a part.

Not in the model: bit rot (the tests of durable.py flip bits), failing calls (`FailingDisk`), symlinks.
"""

import errno as errno_names
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hotlap import durable

PAGE_BYTES = 4096
KINDS = ("create", "append", "truncate", "make_dir", "rename", "remove", "sync")


@dataclass(frozen=True)
class Call:
    """One call of `durable.Disk`; `given` stands for what was there, safely, before the recording began."""

    op: str
    path: Path
    data: bytes | None = None
    target: Path | None = None
    num_bytes: int = 0


# --- disks ---


class WatchedDisk(durable.Disk):
    """Every changing call goes through `see`, which must `perform` it or raise."""

    def see(self, call: Call, perform: Callable[[], None]) -> None:
        raise NotImplementedError

    def create(self, path: Path, data: bytes) -> None:
        self.see(Call("create", path, data=bytes(data)), lambda: durable.Disk.create(self, path, data))

    def append(self, path: Path, data: bytes) -> None:
        # Appending to what is not there makes it.
        op = "append" if path.exists() else "create"
        self.see(Call(op, path, data=bytes(data)), lambda: durable.Disk.append(self, path, data))

    def truncate(self, path: Path, num_bytes: int) -> None:
        self.see(Call("truncate", path, num_bytes=num_bytes), lambda: durable.Disk.truncate(self, path, num_bytes))

    def make_dir(self, path: Path) -> None:
        self.see(Call("make_dir", path), lambda: durable.Disk.make_dir(self, path))

    def rename(self, source: Path, target: Path) -> None:
        self.see(Call("rename", source, target=target), lambda: durable.Disk.rename(self, source, target))

    def remove(self, path: Path) -> None:
        self.see(Call("remove", path), lambda: durable.Disk.remove(self, path))

    def sync(self, path: Path) -> None:
        self.see(Call("sync", path), lambda: durable.Disk.sync(self, path))


class RecordingDisk(WatchedDisk):
    """Performs and records. What lies under `root` beforehand is recorded as given. Calls of several threads are
    recorded in the order they happened; a call that raised is not recorded."""

    def __init__(self, root: Path | None = None) -> None:
        self._lock = threading.Lock()
        self.log: list[Call] = []
        for path in sorted(root.rglob("*")) if root else []:
            self.log.append(Call("given", path, data=None if path.is_dir() else path.read_bytes()))

    def see(self, call: Call, perform: Callable[[], None]) -> None:
        with self._lock:
            perform()
            self.log.append(call)


class FailingDisk(WatchedDisk):
    """Raises `OSError(errno)` at the `nth` call of the given kinds (the first is 1), and with `is_lasting` at every
    one after it. `leaves_half`: a failing write has written half of its bytes, as a full disk does."""

    def __init__(
        self,
        errno: int = errno_names.ENOSPC,
        nth: int | None = 1,
        kinds: Sequence[str] = KINDS,
        leaves_half: bool = False,
        is_lasting: bool = False,
    ) -> None:
        assert set(kinds) <= set(KINDS), kinds
        self._errno, self._nth, self._kinds = errno, nth, kinds
        self._leaves_half, self._is_lasting = leaves_half, is_lasting
        self.num_calls = 0
        self.failed: list[Call] = []

    def see(self, call: Call, perform: Callable[[], None]) -> None:
        if call.op in self._kinds:
            self.num_calls += 1
            if self._nth and (self.num_calls == self._nth or (self._is_lasting and self.num_calls > self._nth)):
                self._fail(call)
        perform()

    def _fail(self, call: Call) -> None:
        if self._leaves_half and call.data is not None:
            write = durable.Disk.create if call.op == "create" else durable.Disk.append
            write(self, call.path, call.data[: len(call.data) // 2])
        self.failed.append(call)
        raise OSError(self._errno, os.strerror(self._errno), str(call.path))


class SlowDisk(WatchedDisk):
    """Sleeps before each call of the given kinds."""

    def __init__(self, delay_s: float, kinds: Sequence[str] = KINDS) -> None:
        self._delay_s, self._kinds = delay_s, kinds

    def see(self, call: Call, perform: Callable[[], None]) -> None:
        if call.op in self._kinds:
            time.sleep(self._delay_s)
        perform()


# --- states ---


@dataclass(frozen=True)
class CrashState:
    """A tree a crash may leave: bytes of each file, None for a directory, by path below the root."""

    tree: dict[str, bytes | None]
    points: tuple[int, ...]
    """How many entries of the log had been completed: this tree is possible at each of these moments."""
    how: str
    """One way it comes about, for messages."""

    @property
    def last_point(self) -> int:
        return self.points[-1]

    def materialize(self, target: Path) -> Path:
        target.mkdir(parents=True, exist_ok=True)
        assert not any(target.iterdir()), target
        for name, data in sorted(self.tree.items()):
            if data is None:
                (target / name).mkdir()
            else:
                (target / name).write_bytes(data)
        return target


def crash_states(log: Sequence[Call], root: Path, has_atomic_renames: bool = True) -> Iterator[CrashState]:
    """Every distinct state below `root`, in the order of their first crash point. Calls outside `root` count as
    crash points only. `has_atomic_renames=False` adds kills in the middle of renaming a directory, as on volumes
    that rename by copying."""
    found: dict[bytes, tuple[_Tree, list[int], str]] = {}
    volume = _Volume(root)
    num_given = sum(call.op == "given" for call in log)
    for point in range(len(log) + 1):
        if point >= num_given:
            call = log[point] if point < len(log) else None
            for tree, how in volume.states(call, has_atomic_renames):
                _, points, _ = found.setdefault(_digest(tree), (tree, [], f"after {point} calls: {how}"))
                if point not in points[-1:]:
                    points.append(point)
        if point < len(log):
            volume.apply(log[point])
    for tree, points, how in found.values():
        yield CrashState({name: data for name, (data, _) in tree.items()}, tuple(points), how)


_Content = tuple[bytes | None, bytes]
_Tree = dict[str, _Content]
"""Contents by path, each with its hash, which is computed once however many states share it."""


def _digest(tree: _Tree) -> bytes:
    whole = hashlib.sha256()
    for name, (_, digest) in sorted(tree.items()):
        whole.update(f"{name}\0".encode() + digest)
    return whole.digest()


# --- the simulated volume ---


class _Folder:
    """Only an identity; names lie in the volume."""


@dataclass(eq=False)
class _File:
    synced: bytes = b""
    pending: list["_Write | _Cut"] = field(default_factory=list)
    _known: dict[str, _Content] = field(default_factory=dict)

    def change(self, change: "_Write | _Cut") -> None:
        self.pending.append(change)
        self._known.clear()

    def sync(self) -> None:
        self.synced = self.now()
        self.pending.clear()
        self._known.clear()

    def now(self) -> bytes:
        data = self.content("all bytes")[0]
        assert data is not None
        return data

    def content(self, fate: str) -> _Content:
        if fate not in self._known:
            data = FATES[fate](self.synced, self.pending) if self.pending else self.synced
            self._known[fate] = (data, hashlib.sha256(data).digest())
        return self._known[fate]


@dataclass(frozen=True)
class _Write:
    start: int
    data: bytes


@dataclass(frozen=True)
class _Cut:
    num_bytes: int


_Changes = Sequence[_Write | _Cut]


def _play(synced: bytes, changes: _Changes) -> bytes:
    data = bytearray(synced)
    for change in changes:
        if isinstance(change, _Cut):
            del data[change.num_bytes :]
        else:
            data.extend(bytes(max(0, change.start - len(data))))
            data[change.start : change.start + len(change.data)] = change.data
    return bytes(data)


def _torn(synced: bytes, changes: _Changes) -> bytes:
    left = sum(len(change.data) for change in changes if isinstance(change, _Write)) // 2
    kept: list[_Write | _Cut] = []
    for change in changes:
        if isinstance(change, _Write):
            change = _Write(change.start, change.data[:left])
            left -= len(change.data)
        kept.append(change)
    return _play(synced, [change for change in kept if isinstance(change, _Cut) or change.data])


def _zeroed(synced: bytes, changes: _Changes) -> bytes:
    return _play(synced, [_Write(c.start, bytes(len(c.data))) if isinstance(c, _Write) else c for c in changes])


def _holed(synced: bytes, changes: _Changes) -> bytes:
    data = bytearray(_play(synced, changes))
    start = min((change.start for change in changes if isinstance(change, _Write)), default=len(data))
    last_page = (len(data) - 1) // PAGE_BYTES * PAGE_BYTES
    if last_page > start:
        data[start:last_page] = bytes(last_page - start)
    return bytes(data)


FATES: dict[str, Callable[[bytes, _Changes], bytes]] = {
    "all bytes": _play,
    "no unsynced bytes": lambda synced, _changes: synced,
    "half of the unsynced bytes": _torn,
    "truncations without what was appended": lambda synced, changes: _play(
        synced, [change for change in changes if isinstance(change, _Cut)]
    ),
    "what was appended without truncations": lambda synced, changes: _play(
        synced, [change for change in changes if isinstance(change, _Write)]
    ),
    "zeros for the unsynced bytes": _zeroed,
    "a hole in the unsynced bytes": _holed,
}


@dataclass(frozen=True, eq=False)
class _NameChange:
    """`node` leaves one name, gets another, or both."""

    node: "_Folder | _File"
    leaves: tuple[_Folder, str] | None
    gets: tuple[_Folder, str] | None

    @property
    def settled_by(self) -> _Folder:
        """The directory whose sync makes it last."""
        place = self.gets or self.leaves
        assert place
        return place[0]

    def __str__(self) -> str:
        if self.leaves and self.gets:
            return f"rename {self.leaves[1]} to {self.gets[1]}"
        return f"create {self.gets[1]}" if self.gets else f"remove {self.leaves[1]}" if self.leaves else ""


_Names = dict[_Folder, dict[str, "_Folder | _File"]]


def _after(names: _Names, changes: Sequence[_NameChange]) -> _Names:
    names = {folder: dict(entries) for folder, entries in names.items()}
    for change in changes:
        if change.leaves:
            entries = names.setdefault(change.leaves[0], {})
            if entries.get(change.leaves[1]) is not change.node:
                continue
            del entries[change.leaves[1]]
        if change.gets:
            names.setdefault(change.gets[0], {})[change.gets[1]] = change.node
    return names


class _Volume:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = _Folder()
        self._synced: _Names = {self._top: {}}
        self._pending: list[_NameChange] = []
        self._now: _Names = {self._top: {}}

    # -- what calls do --

    def apply(self, call: Call) -> None:
        if not call.path.is_relative_to(self._root):
            assert call.target is None or not call.target.is_relative_to(self._root), call
            return
        if call.op == "sync":
            self._sync(self._node(call.path))
        elif call.op in ("append", "truncate"):
            file = self._file(call.path)
            file.change(_Cut(call.num_bytes) if call.data is None else _Write(len(file.now()), call.data))
        else:
            self._change_names(self._name_change(call))
            if call.op == "given":
                self._sync(self._node(call.path.parent))
                self._sync(self._node(call.path))

    def _name_change(self, call: Call) -> _NameChange:
        if call.op == "make_dir" or (call.op == "given" and call.data is None):
            return _NameChange(_Folder(), None, self._place(call.path))
        if call.op in ("create", "given"):
            file = _File()
            file.change(_Write(0, call.data or b""))
            return _NameChange(file, None, self._place(call.path))
        target = self._place(call.target) if call.target else None
        return _NameChange(self._node(call.path), self._place(call.path), target)

    def _change_names(self, change: _NameChange) -> None:
        self._pending.append(change)
        self._now = _after(self._now, [change])

    def _sync(self, node: "_Folder | _File") -> None:
        if isinstance(node, _File):
            node.sync()
            return
        # A rename that came to this directory takes along how its file came to be at all.
        last_settled = {c.node: number for number, c in enumerate(self._pending) if c.settled_by is node}
        lasting = [
            c for number, c in enumerate(self._pending) if c.settled_by is node or number < last_settled.get(c.node, 0)
        ]
        self._synced = _after(self._synced, lasting)
        self._pending = [change for change in self._pending if change not in lasting]
        self._forget_unreachable()

    def _forget_unreachable(self) -> None:
        """Changes in directories that no crash can bring back only multiply equal states."""
        reachable = self._folders_below(self._top) | {change.node for change in self._pending}
        self._pending = [change for change in self._pending if change.settled_by in reachable]

    def _folders_below(self, folder: _Folder) -> set["_Folder | _File"]:
        below: set[_Folder | _File] = {folder}
        for node in self._synced.get(folder, {}).values():
            if isinstance(node, _Folder):
                below |= self._folders_below(node)
        return below

    def _place(self, path: Path) -> tuple[_Folder, str]:
        folder = self._node(path.parent)
        assert isinstance(folder, _Folder), path
        return folder, path.name

    def _node(self, path: Path) -> "_Folder | _File":
        node: _Folder | _File = self._top
        for name in path.relative_to(self._root).parts:
            assert isinstance(node, _Folder), path
            node = self._now[node][name]
        return node

    def _file(self, path: Path) -> _File:
        node = self._node(path)
        assert isinstance(node, _File), path
        return node

    # -- what crashes leave --

    def states(self, under_way: Call | None, has_atomic_renames: bool) -> Iterator[tuple[_Tree, str]]:
        """Trees and how they come about, at this moment and in the middle of the next call."""
        yield self._tree(self._now, "all bytes"), "killed"
        if under_way and under_way.path.is_relative_to(self._root):
            for tree in self._half_done(under_way, has_atomic_renames):
                yield tree, f"killed in the middle of {under_way.op} {under_way.path.name}"
        for changes, how in self._name_fates():
            names = _after(self._synced, changes)
            for fate in FATES:
                yield self._tree(names, fate), f"power lost; {how}; {fate}"

    def _name_fates(self) -> Iterator[tuple[list[_NameChange], str]]:
        yield self._pending, "all names"
        yield [], "no unsynced names"
        for number, change in enumerate(self._pending):
            yield self._pending[:number] + self._pending[number + 1 :], f"without {change}"
            yield [change], f"of the unsynced names only {change}"

    def _half_done(self, call: Call, has_atomic_renames: bool) -> Iterator[_Tree]:
        tree = self._tree(self._now, "all bytes")
        name = call.path.relative_to(self._root).as_posix()
        if call.data is not None:
            before = tree[name][0] or b"" if call.op == "append" else b""
            for share in (0, len(call.data) // 2):
                data = before + call.data[:share]
                yield {**tree, name: (data, hashlib.sha256(data).digest())}
        elif call.target and not has_atomic_renames:
            yield from self._half_renamed(tree, name, call.target.relative_to(self._root).as_posix())

    def _half_renamed(self, tree: _Tree, source: str, target: str) -> Iterator[_Tree]:
        inside = [name for name in sorted(tree) if name.startswith(f"{source}/")]
        for num_moved in range(len(inside)):
            for moved in (inside[:num_moved], inside[len(inside) - num_moved :]):
                if any(tree[name][0] is None for name in moved):
                    continue
                rest = {name: content for name, content in tree.items() if name not in moved}
                yield {**rest, target: tree[source], **{target + n[len(source) :]: tree[n] for n in moved}}

    def _tree(self, names: _Names, fate: str) -> _Tree:
        tree: _Tree = {}

        def walk(folder: _Folder, prefix: str) -> None:
            for name, node in names.get(folder, {}).items():
                if isinstance(node, _File):
                    tree[prefix + name] = node.content(fate)
                else:
                    tree[prefix + name] = _A_FOLDER
                    walk(node, f"{prefix}{name}/")

        walk(self._top, "")
        return tree


_A_FOLDER: _Content = (None, b"directory")
