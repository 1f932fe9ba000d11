"""A port for a server that has to be told one, which nobody else is given in between."""

import random
import socket


def free_port() -> int:
    """Below those that the system gives to whoever asks for any."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
