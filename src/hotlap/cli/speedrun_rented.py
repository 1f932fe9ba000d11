"""`hotlap speedrun verify --on PROVIDER`: the runs on a rented machine, and what it measured brought here."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.errors import UsageError

if TYPE_CHECKING:
    from hotlap.speedrun.track import Track


def measure(
    contest: Path, folder: Path, track: "Track", num_runs: int, provider: str, volume_id: str | None, image: str | None
) -> tuple[int, Path]:
    """`hotlap launch --job verify`, with what it needs brought to the volume before and what it left fetched after it.

    Returns:
        The launch's exit code, and the folder here in which the measurement is, as far as it came.

    Raises:
        UsageError: the submission is not the contest's.
        And as `launch` and volumes do.
    """
    from hotlap.cli.launch import launch
    from hotlap.cli.volume import opened
    from hotlap.cloud import errands, rental, ssh
    from hotlap.speedrun import submission

    if not folder.is_relative_to(contest):
        raise UsageError(f"{folder} lies outside of the contest {contest}. Name the contest with --contest.")
    place = folder.relative_to(contest).as_posix()
    reached = ssh.VOLUME if provider == "ssh" else rental.volume_of(provider, volume_id)
    there = opened(reached) if reached else None
    if there is not None:
        for path, key in _files(contest, folder, track.folder):
            there.put(path, key)
    words = [place, "--job", "verify", "--on", provider, "--runs", str(num_runs)]
    words += ["--volume-id", volume_id] if volume_id else []
    words += ["--image", image] if image else []
    with contextlib.chdir(contest):
        code = launch.main(words, standalone_mode=False)
    found = errands.measured_folder(place, submission.code_sha256(folder))
    if there is not None:
        for item in there.ls(found):
            there.get(item.key, contest / item.key)
    return code, contest / found


def _files(contest: Path, *folders: Path) -> Iterable[tuple[Path, str]]:
    from hotlap.cloud.volume import walk

    return [pair for folder in folders for pair in walk(folder, folder.relative_to(contest).as_posix())]
