"""What `hotlap doctor` tells of money: which guards are active, and what it costs if a launcher dies this second."""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from hotlap import clock, errors
from hotlap.secrecy import without_login


def examine(problems: list[str]) -> dict[str, Any] | None:
    """The guards, as JSON values; None where the limits cannot be read, which is a problem told elsewhere."""
    from hotlap.config import load_cloud

    try:
        settings = load_cloud()
    except errors.HotlapError:
        return None
    from hotlap.cloud import forewords, runpod

    has_key, reaper = bool(os.environ.get("RUNPOD_API_KEY")), _reaper(settings)
    found: dict[str, Any] = {
        "ledger": _ledger(settings, problems),
        "reaper": reaper,
        "image": forewords.image_in_words(runpod.TRAITS, settings.runpod.image),
        "key": _key(problems) if has_key else "no key, so nothing but this machine can be rented",
        "serving_guard": _serving_guard(settings),
        "worst_loss": _worst_loss(settings),
    }
    if reaper["unwatched"]:
        problems.append(
            f"There is a key to rent with at {', '.join(reaper['unwatched'])}, and no reaper was seen lately that has "
            f"one too, so nobody ends a machine whose launcher died. Run: hotlap reap --install-cron, and put the key "
            f"into reaper.env as it says"
        )
    _look_at_files(settings, problems)
    return found


def _look_at_files(settings: Any, problems: list[str]) -> None:
    """Files with keys and passwords in them are for nobody else's eyes."""
    from hotlap.config import hotlap_home

    has_login = without_login(settings.ledger.url or "") != (settings.ledger.url or "")
    for name, holds_secrets in (("reaper.env", True), ("cloud.toml", has_login)):
        path = hotlap_home() / name
        if holds_secrets and path.exists() and path.stat().st_mode & 0o077:
            problems.append(f"{path} holds secrets, and others on this computer may read it. Run: chmod 600 {path}")


def _key(problems: list[str]) -> str:
    from hotlap.cloud import runpod

    try:
        with closing(runpod.from_environment()) as provider:
            return f"RUNPOD_API_KEY is set, and {provider.key_scope()}"
    except errors.HotlapError as error:
        problems.append(str(error))
        return "RUNPOD_API_KEY is set; RunPod did not say what it opens"


def _ledger(settings: Any, problems: list[str]) -> dict[str, Any]:
    from hotlap.cloud.ledger import Ledger

    try:
        ledger = Ledger(settings)
        return {"is_reachable": True, "place": ledger.place, **ledger.state_of(clock.wall_s())}
    except errors.HotlapError as error:
        problems.append(str(error))
        return {"is_reachable": False}


def _reaper(settings: Any) -> dict[str, Any]:
    from hotlap.cloud.reaper import is_watched, last_sign
    from hotlap.cloud.rental import all_traits, configured

    sign, now_s = last_sign(), clock.wall_s()
    reached = configured(settings)
    unwatched = [
        traits.name
        for traits in all_traits()
        if traits.name in reached and not traits.has_hard_ttl and not is_watched(traits.name, settings, now_s)
    ]
    return {
        "age_s": None if sign is None else max(0.0, now_s - sign["at_s"]),
        "is_active": is_watched("local", settings, now_s) and not unwatched,
        "unwatched": unwatched,
        "was_clean": sign["is_clean"] if sign else None,
    }


def _serving_guard(settings: Any) -> str:
    from hotlap import guard

    if settings.guard.train_beside_serving:
        return "off: guard.train_beside_serving is true in cloud.toml"
    try:
        guard.require_not_serving(settings)
    except errors.GuardRefused as error:
        return f"on, and refuses: {error}"
    return "on; nothing serves here"


def _worst_loss(settings: Any) -> list[dict[str, Any]]:
    """For one slice of the longest kind, per provider: the longest unwatched life, and its cost per dollar an hour."""
    from hotlap.cloud.launcher import JOB_MARGIN_S
    from hotlap.cloud.money import Rate, loss_bound_s, ttl_s
    from hotlap.cloud.rental import all_traits

    cap_s, period_s = settings.limits.max_slice_minutes * 60.0, settings.reaper.period_minutes * 60.0
    rows: list[dict[str, Any]] = []
    for traits in all_traits():
        ttl = ttl_s(cap_s + JOB_MARGIN_S, traits)
        bound_s = loss_bound_s(ttl, period_s, traits)
        rows.append(
            {
                "provider": traits.name,
                "ttl_s": ttl,
                "reaper_period_s": 0.0 if traits.has_hard_ttl else period_s,
                "proof_s": traits.proof_s,
                "seconds": bound_s,
                "usd_at_3_usd_per_hour": Rate(3_000_000, 1, traits.billing_unit_s).cost(bound_s).usd_micros / 1e6,
            }
        )
    return rows


def rows(found: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if found is None:
        return
    ledger = found["ledger"]
    if ledger["is_reachable"]:
        yield "budget", f"{ledger['left_text']} left today of {ledger['limit_text']}, as {ledger['place']} says"
    reaper = found["reaper"]
    if reaper["age_s"] is None:
        yield "reaper", "never seen here; to have it run: hotlap reap --install-cron"
    else:
        state = "active" if reaper["is_active"] else "NOT active"
        where = f"; it did not look at {', '.join(reaper['unwatched'])}" if reaper["unwatched"] else ""
        rest = "" if reaper["was_clean"] else "; something was left then: hotlap reap tells what"
        yield "reaper", f"{state}, seen {reaper['age_s'] / 60:.0f} minutes ago{where}{rest}"
    if found["image"]:
        name, _, said = found["image"].partition(": ")
        yield name, said
    yield "key", found["key"]
    yield "guard", found["serving_guard"]
    for row in found["worst_loss"]:
        yield (
            "worst loss",
            f"on {row['provider']}, if a launcher died this second: {row['ttl_s']:.0f} s TTL + "
            f"{row['reaper_period_s']:.0f} s reaper + {row['proof_s']:.0f} s proof = {row['seconds']:.0f} s, which at "
            f"$3 an hour is ${row['usd_at_3_usd_per_hour']:.2f}",
        )
