"""A leaderboard that re-runs every claim: frozen tracks, sandboxed verification, records."""
