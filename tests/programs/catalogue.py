"""Imports every family of programs, so that `PROGRAMS` is complete."""

from __future__ import annotations

import importlib

from tests.programs.registry import PROGRAMS

FAMILIES = (
    "guides",
    "gan",
    "autoencoders",
    "diffusion",
    "contrastive",
    "transformers",
    "supervised",
    "optimizers",
    "metrics",
    "layers_with_state",
    "datasets",
    "callbacks",
    "precision",
)

for family in FAMILIES:
    importlib.import_module(f"tests.programs.{family}")

__all__ = ["FAMILIES", "PROGRAMS"]
