"""Stand-ins for what costs money, for tests and for users who want to try without paying."""
