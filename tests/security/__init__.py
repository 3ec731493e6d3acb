"""Attacks from outside, against real jobs, sockets and files."""
