"""Starts the workers of a job, watches them, and starts them again; see `__main__`."""
