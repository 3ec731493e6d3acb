"""What one worker has found, and the check of what another worker has sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfmulti.config import json_values
from tfmulti.doctor.finding import printable

# The limits of what a worker sends: the facts, their parts, the findings, texts and numbers.
_MOST_FACTS, _MOST_PARTS, _MOST_FINDINGS = 16, 64, 256
_LONGEST_TEXT, _LARGEST = 200, 1e12


@dataclass
class Result:
    """What one worker has found.

    Attributes:
        facts: the versions, the number of GPUs and the like, by name.
        findings: the findings about the worker's machine, as JSON objects.
        rtt_ms: the round-trip time to each other worker by rank.
        mb_s: the megabytes that reach each other worker in a second.
        clock_s: how many seconds the clock of each other worker is ahead of this one's.
        errors: why a worker could not be reached, by rank.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Any] = field(default_factory=list)
    rtt_ms: dict[str, float] = field(default_factory=dict)
    mb_s: dict[str, float] = field(default_factory=dict)
    clock_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def result_of(values: Any, size: int) -> Result:
    """Returns the result that another worker has sent.

    Its texts are printable and of limited length, its numbers are finite, and its ranks belong to
    the job. The findings are checked by `findings_of`.

    Args:
        values: a JSON object.
        size: the number of workers.

    Raises:
        ValueError: the values have another form.
    """
    result = json_values.build(Result, values)
    ranks = {str(rank) for rank in range(size)}
    for name in ("rtt_ms", "mb_s", "clock_s", "errors"):
        if not getattr(result, name).keys() <= ranks:
            raise ValueError(f"{name} names a worker that the job does not have")
    for name, least in (("rtt_ms", 0.0), ("mb_s", 0.0), ("clock_s", -_LARGEST)):
        if not all(least <= number <= _LARGEST for number in getattr(result, name).values()):
            raise ValueError(f"{name} has a number out of its range")
    if len(result.facts) > _MOST_FACTS or len(result.findings) > _MOST_FINDINGS:
        raise ValueError("too many facts or findings")
    result.facts = {_text(name): _fact(value) for name, value in result.facts.items()}
    result.errors = {rank: _text(why) for rank, why in result.errors.items()}
    return result


def _fact(value: Any) -> Any:
    """Returns a fact that may be shown; raises ValueError if its type is none of the known ones."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping) and all(isinstance(part, str) for part in value.values()):
        if len(value) > _MOST_PARTS:
            raise ValueError("a fact has too many parts")
        return {_text(name): _text(part) for name, part in value.items()}
    if value is None or (isinstance(value, int | float) and abs(value) < _LARGEST):
        return value
    raise ValueError("a fact has another type")


def _text(text: str) -> str:
    """Returns a text that may be shown."""
    return printable(text, _LONGEST_TEXT)
