"""Rented machines that cannot outlive their money."""
