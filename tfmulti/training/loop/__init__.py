"""Runs the loops over epochs and steps, alike on every worker."""
