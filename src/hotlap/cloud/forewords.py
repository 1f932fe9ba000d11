"""What a launch says before any money is spent, where something is not known for certain."""

from hotlap import clock
from hotlap.cloud.provider import Traits
from hotlap.cloud.reaper import is_watched
from hotlap.config import CloudConfig, hotlap_home
from hotlap.config_cloud import DEFAULT_IMAGE


def image_in_words(traits: Traits, image: str | None) -> str | None:
    """What becomes of a launch if the default image is not what its digest was taken for. None: another was named."""
    if image != DEFAULT_IMAGE:
        return None
    otherwise = (
        f"the machine is ended as soon as the log says so, after {traits.provisioning_s:.0f} s at the latest"
        if traits.name == "runpod"
        else "nothing is made"
    )
    return (
        f"image: hotlap's default, whose digest nobody held against its registry; if it cannot be pulled, {otherwise}, "
        f"and --image names another"
    )


def unwatched_in_words(traits: Traits, settings: CloudConfig) -> str | None:
    """Why the loss of a dead launcher has no bound so far. None: it has."""
    if traits.has_hard_ttl or is_watched(traits.name, settings, clock.wall_s()):
        return None
    return (
        f"that bound needs a reaper, and none of this home looked at {traits.name} lately. Unless another computer's "
        f"does, run: hotlap reap --install-cron"
    )


def prices_in_words(provider: str, settings: CloudConfig) -> str | None:
    """Where prices come from that the provider does not tell itself. None: it does."""
    if provider != "modal":
        return None
    return (
        f"Modal tells no prices: these are of {settings.modal.prices_as_of}, as {hotlap_home() / 'cloud.toml'} has "
        f"them. Compare them with modal.com/pricing"
    )
