"""Keep secrets out of what is shown and kept: their values are replaced wherever they turn up."""

import os
import re
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH(?!OR)|(^|_)PAT(_|$)", re.IGNORECASE)
_SHORTEST = 6
"""A shorter value would be found in ordinary words."""


def redactor(ledger_url: str | None = None, env: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A function that removes from a text the values of secret-looking variables and the ledger's password."""
    values = {value for name, value in (os.environ if env is None else env).items() if _NAMES.search(name)}
    if ledger_url:
        parts = urlsplit(ledger_url)
        words = [parts.password or "", *(value for name, value in parse_qsl(parts.query) if _NAMES.search(name))]
        # As it stands in the address, and as the server knows it.
        values |= {word for password in words for word in (password, unquote(password))}
    # The longest first, lest a part of one is cut out of another.
    secrets = sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)

    def redact(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "[redacted]")
        return text

    return redact
