"""Static pages and charts from what runs and studies have left on disk."""
