"""One time-boxed slice of one run. Only child processes import this package: it needs torch."""
