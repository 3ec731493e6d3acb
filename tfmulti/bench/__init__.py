"""Measures how training scales and where the time of a step goes, and predicts more workers."""
