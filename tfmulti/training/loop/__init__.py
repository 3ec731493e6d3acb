"""The loops over epochs and steps, the same on every worker."""
