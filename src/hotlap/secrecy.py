"""Keep secrets out of what is shown and kept: their values are replaced wherever they turn up."""

import os
import re
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH(?!OR)|(^|_)PAT(_|$)", re.IGNORECASE)
_SHORTEST = 6
"""A shorter value would be found in ordinary words."""

_IN_ADDRESS = re.compile(r"(?<=://)[^\s/]*:\S*@|(?<=://)[^\s/:]+@")


def names_a_secret(name: str) -> bool:
    """Whether a variable of this name holds what nobody else may see."""
    return _NAMES.search(name) is not None


def without_login(text: str) -> str:
    """A text without what stands before the @ of addresses in it, user and password."""
    return _IN_ADDRESS.sub("[redacted]@", text)


def is_key(text: str) -> bool:
    """Whether it can be sent as a key. What cannot is quoted, in full, by the error of whoever tries."""
    return text.isascii() and text.isprintable() and not re.search(r"\s", text)


def secrets_in(text: str, env: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the secret-looking variables whose values stand in a text."""
    return sorted(
        name for name, value in env.items() if names_a_secret(name) and len(value) >= _SHORTEST and value in text
    )


def redactor(ledger_url: str | None = None, env: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A function that removes from a text the values of secret-looking variables, the ledger's password, and logins in
    addresses."""
    values = {value for name, value in (os.environ if env is None else env).items() if names_a_secret(name)}
    if ledger_url:
        # As it stands in the address, and as the server knows it.
        values |= {word for password in _passwords_in(ledger_url) for word in (password, unquote(password))}
    # The longest first, lest a part of one is cut out of another.
    secrets = sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)

    def redact(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "[redacted]")
        return without_login(text)

    return redact


def _passwords_in(url: str) -> list[str]:
    try:
        parts = urlsplit(url)
        return [parts.password or "", *(value for name, value in parse_qsl(parts.query) if names_a_secret(name))]
    except ValueError:  # no address at all, but a password all the same
        return [url.partition("://")[2].rpartition("@")[0].partition(":")[2]]
