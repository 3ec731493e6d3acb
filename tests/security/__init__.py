"""Attacks from outside, each against the real thing."""
