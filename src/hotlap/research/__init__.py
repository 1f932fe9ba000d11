"""Search over configurations by identical short trials."""
