"""CSV files as tables of text, and which of their rows are left out.

All is read as text, since pyarrow tells a column's type by the first block of one file.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from tfmulti.data.formats.arrow import BadRows, arrow
from tfmulti.data.io.files import memory_bytes

_MOST_BAD = 100_000  # rows of a file; one that has more is no table
_SHOWN = 40  # characters of a row
_CUT_OFF = "the GZIP file is cut off in it; what follows, up to its end, counts as one row."

_LINE = re.compile(rb"\r\n|\r|\n")
# A value in quotes, and what stands behind it where that is neither a comma nor the line's end.
# A quote within is written twice; one that is not closed has all up to the end of the file.
_QUOTED = re.compile(
    rb'(?:\A(?:\xef\xbb\xbf)?|[,\r\n])(?P<value>"[^"]*(?:""[^"]*)*)(?P<end>"?)'
    rb"(?P<behind>[ \t]*[^,\r\n]?)"
)


def read_csv(data: bytes, packed: bool) -> tuple[Any, list[BadRows]]:
    """Returns the rows of a file as a `pyarrow.Table` of text, and those that are left out.

    Left out is a row with more or fewer columns than the header, or with bytes that are no UTF-8
    text; and, as one row, the end of a GZIP file that is cut off. Spaces around a value do not
    count, and one of spaces alone is none.

    Args:
        packed: it is a GZIP file.

    Raises:
        ValueError, OSError: it cannot be read.
    """
    pyarrow, compute = arrow(), arrow("pyarrow.compute")
    is_cut_off = False
    if packed:
        data, is_cut_off = _unpacked(data)
        data = _whole_rows(data) if is_cut_off else data
    bad: dict[int, BadRows] = {}
    try:
        table = _parsed(data, None)
    except pyarrow.ArrowInvalid:
        check_quotes(data)
        data, mark = _marked(data)
        table = _parsed(data, bad)
        if mark is not None:
            table = _without_marked(table, mark, bad)
    if is_cut_off:
        number = table.num_rows + len(bad) + 1
        bad[number] = BadRows(number, 1, f"row {number}", _CUT_OFF)
    if _has_lines(table):
        check_quotes(data)  # here alone, since it takes longer than to read the file
    for i, name in enumerate(table.column_names):
        trimmed = compute.utf8_trim_whitespace(table.column(i))
        empty = compute.equal(trimmed, "")
        text = compute.if_else(empty, pyarrow.scalar(None, pyarrow.string()), trimmed)
        table = table.set_column(i, name, text)
    return table, [bad[number] for number in sorted(bad)]


def _unpacked(data: bytes) -> tuple[bytes, bool]:
    """Returns what a GZIP file holds, and whether it is cut off: then what is before that.

    Raises:
        ValueError: it is damaged otherwise. What is wrong in it then is seen nowhere but at some
            place behind it, since rows have no checksums of their own. Or it holds more bytes
            than this machine has of memory.
    """
    found, left = [], memory_bytes()
    while data:
        packed = zlib.decompressobj(wbits=31)  # of GZIP data
        try:
            found.append(packed.decompress(data, left))
            left -= len(found[-1])
        except zlib.error as error:
            raise ValueError(
                f"its GZIP data is damaged ({error}); nobody knows which of its rows are, so "
                "--skip_bad_records cannot count them and leave them out"
            ) from None
        if left <= 0:
            raise ValueError(
                f"it unpacks to more than {memory_bytes():,} bytes, the memory of this machine; "
                "split it, or write it as TFRecord or .npy files, which are read piece by piece"
            )
        if not packed.eof:
            return b"".join(found), True
        data = packed.unused_data.lstrip(b"\0")  # zeros may fill up its last block
    return b"".join(found), False


def _whole_rows(data: bytes) -> bytes:
    """Returns the rows of a text that ends anywhere, without the last one, which may lack a part.

    Raises:
        ValueError: it ends in its header.
    """
    end = next((v.start("value") for v in _QUOTED.finditer(data) if not v["end"]), len(data))
    end = max(data.rfind(b"\n", 0, end), data.rfind(b"\r", 0, end)) + 1
    if not data[:end].strip():
        raise ValueError("the GZIP file is cut off before its first row")
    return data[:end]


def _marked(data: bytes) -> tuple[bytes, str | None]:
    """Returns a text with a mark where it is no UTF-8, and the mark; None: there is none.

    pyarrow reads no column that has such bytes, and does not say in which row they are.
    """
    try:
        data.decode()
    except UnicodeDecodeError:
        # Of 32 characters that are none, one that is not there. Each wrong byte is a surrogate.
        mark = next(chr(i) for i in range(0xFDD0, 0xFDF0) if chr(i).encode() not in data)
        text = re.sub("[\udc80-\udcff]+", mark, data.decode(errors="surrogateescape"))
        return text.encode(), mark
    return data, None


def _without_marked(table: Any, mark: str, bad: dict[int, BadRows]) -> Any:
    """Returns the rows of a table without a mark, and puts the others into `bad`.

    Raises:
        ValueError: they are too many, or the mark is in the header.
    """
    pyarrow, compute = arrow(), arrow("pyarrow.compute")
    marked = np.zeros(table.num_rows, bool)
    for column in table.columns:
        marked |= compute.fill_null(compute.match_substring(column, mark), False).to_numpy()
    if marked.sum() > _MOST_BAD or any(mark in name for name in table.column_names):
        raise ValueError("it is not UTF-8 text")
    unknown = "\N{REPLACEMENT CHARACTER}"
    for number, each in bad.items():
        bad[number] = each._replace(reason=each.reason.replace(repr(mark)[1:-1], unknown))
    numbers = np.setdiff1d(np.arange(1, table.num_rows + len(bad) + 1), list(bad))
    for row in np.flatnonzero(marked).tolist():
        values = [column[row].as_py() or "" for column in table.columns]
        shown = _shown(",".join(values).replace(mark, unknown))
        number = int(numbers[row])
        bad[number] = BadRows(number, 1, f"row {number}", f"it is not UTF-8 text: {shown}.")
    return table.filter(pyarrow.array(~marked))


def _shown(text: str) -> str:
    return repr(text[:_SHOWN] + ("…" if len(text) > _SHOWN else ""))


def _has_lines(table: Any) -> bool:
    """Whether a value, or a column's name, has several lines."""
    compute = arrow("pyarrow.compute")
    return any(
        compute.any(compute.match_substring(column, end)).as_py()
        for end in "\r\n"
        for column in (*table.columns, arrow().array(table.column_names))
    )


def check_quotes(data: bytes) -> None:
    """Checks that no quote takes the lines behind it into one value.

    pyarrow, as other readers, takes all up to the next quote, or to the end of the file, for one
    value. A value of several lines ends at a comma or at the end of a line.

    Raises:
        ValueError: one does not; it names the line.
    """
    if b'"' not in data:
        return
    for found in _QUOTED.finditer(data):
        lines = len(_LINE.findall(found["value"]))
        if found["end"] and (not lines or not found["behind"].strip()):
            continue
        line = _line_at(data, found.start("value"))
        if not found["end"]:
            raise ValueError(f"the quote that begins a value in line {line} is not closed")
        raise ValueError(
            f"the quote that begins a value in line {line} is closed in line {line + lines} alone, "
            "in the midst of a value: a quote is missing in between"
        )


def _line_at(data: bytes, place: int) -> int:
    """Returns the line, from 1, of a byte."""
    return len(_LINE.findall(data, 0, place)) + 1


def _parsed(data: bytes, bad: dict[int, BadRows] | None) -> Any:
    """Returns a CSV file as a table of text.

    A row of another length than the header is put into `bad`, by its number; where that is None
    it is an error.
    """
    pyarrow, csv = arrow(), arrow("pyarrow.csv")

    def handle(row: Any) -> str:
        assert bad is not None
        number = row.number - 1  # pyarrow tells of the first ones twice
        bad[number] = BadRows(number, 1, f"row {number}", _reason(row))
        return "skip" if len(bad) <= _MOST_BAD else "error"

    read = csv.ReadOptions(use_threads=bad is None)  # without threads rows have numbers
    parse = csv.ParseOptions(
        newlines_in_values=True, invalid_row_handler=None if bad is None else handle
    )
    names = csv.open_csv(pyarrow.BufferReader(data), read, parse).schema.names
    convert = csv.ConvertOptions(
        column_types={name: pyarrow.string() for name in names}, strings_can_be_null=True
    )
    return csv.read_csv(pyarrow.BufferReader(data), read, parse, convert)


def _reason(row: Any) -> str:
    columns = f"{row.actual_columns} column{'s' if row.actual_columns > 1 else ''}"
    return f"it has {columns}, but the header has {row.expected_columns}: {_shown(row.text)}."
