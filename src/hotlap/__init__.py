"""hotlap fine-tunes small language models in laps: time-boxed slices that resume bit for bit."""

__version__ = "0.1.0"
