"""Text in, packed token rows out; no torch."""
