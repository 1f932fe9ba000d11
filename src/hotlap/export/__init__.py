"""From an adapter to something that serves: merge, quantize, convert, serve, measure, push."""
