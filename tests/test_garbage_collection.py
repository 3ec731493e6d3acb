"""Tests that imported modules stay out of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tfmulti.launch import garbage_collection


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_imported_modules_are_not_collected() -> None:
    before = gc.get_freeze_count()
    with garbage_collection.importing():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with garbage_collection.importing():
        pass
    assert not gc.isenabled()


def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ImportError), garbage_collection.importing():
        raise ImportError
    assert gc.isenabled()
