"""CSV files as tables of text, and the rows of them that are left out.

All columns are read as text, because pyarrow decides the type of a column by the first block of a
file. `columns` finds the kinds of the columns later, from all values.

The file is first parsed on several threads. If that fails, it is parsed again on one thread, which
gives each bad row its number.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from tfmulti.data.formats.arrow import arrow
from tfmulti.data.io.files import most_unpacked

# A file with more bad rows than this is not a table.
_MOST_BAD = 100_000
# Messages show at most this many characters of a row.
_SHOWN = 40

_LINE = re.compile(rb"\r\n|\r|\n")
# A value in quotes. `behind` is the text after the closing quote; a character other than a space
# there means that the value does not end at a comma or at the end of the line. A quote within the
# value is written twice. A value that is not closed extends to the end of the file, and its `end`
# is empty.
_QUOTED = re.compile(
    rb'(?:\A(?:\xef\xbb\xbf)?|[,\r\n])(?P<value>"[^"]*(?:""[^"]*)*)(?P<end>"?)'
    rb"(?P<behind>[ \t]*[^,\r\n]?)"
)


def read_csv(data: bytes, is_gzip: bool) -> tuple[Any, dict[int, str]]:
    """Returns the rows of a file as a `pyarrow.Table` of text, and why rows are left out.

    A row is left out if it has more or fewer columns than the header, or bytes that are not UTF-8
    text. Its number, from 1, is then the key of the reason. Spaces around a value are removed, and
    a value of spaces alone is missing.

    Raises:
        ValueError, OSError: the file cannot be read.
    """
    pyarrow, compute = arrow(), arrow("pyarrow.compute")
    if is_gzip:
        data = _unpacked(data)
    bad: dict[int, str] = {}
    try:
        table = _parsed(data, None)
    except pyarrow.ArrowInvalid:
        check_quotes(data)
        data, mark = _marked(data)
        table = _parsed(data, bad)
        if mark is not None:
            table = _without_marked(table, mark, bad)
    if _has_lines(table):
        # The check takes longer than reading the file, so it runs only where lines may be joined.
        check_quotes(data)
    for i, name in enumerate(table.column_names):
        trimmed = compute.utf8_trim_whitespace(table.column(i))
        empty = compute.equal(trimmed, "")
        text = compute.if_else(empty, pyarrow.scalar(None, pyarrow.string()), trimmed)
        table = table.set_column(i, name, text)
    return table, dict(sorted(bad.items()))


def _unpacked(data: bytes) -> bytes:
    """Returns the content of a GZIP file.

    Raises:
        ValueError: the file is damaged or cut off, or its content takes more memory than one file
            may.
    """
    contents, remaining = [], most_unpacked()
    while data:
        # 31 stands for GZIP data with a window of 2**15 bytes.
        packed = zlib.decompressobj(wbits=31)
        try:
            contents.append(packed.decompress(data, remaining))
            remaining -= len(contents[-1])
        except zlib.error as error:
            raise ValueError(f"its GZIP data is damaged ({error})") from None
        if remaining <= 0:
            raise ValueError(
                f"it unpacks to more than {most_unpacked():,} bytes, which is the limit (by "
                "default the memory); split it, write it as TFRecord or .npy files, which are read "
                "piece by piece, or allow more by --max_file_gigabytes"
            )
        if not packed.eof:
            raise ValueError("the GZIP file is cut off")
        # A file may have several GZIP members, and zeros may fill up its last block.
        data = packed.unused_data.lstrip(b"\0")
    return b"".join(contents)


def _marked(data: bytes) -> tuple[bytes, str | None]:
    """Returns a text with a mark in place of bytes that are not UTF-8, and the mark.

    The mark is None if all bytes are UTF-8. pyarrow cannot read a column with such bytes, and does
    not say in which row they are.
    """
    try:
        data.decode()
    except UnicodeDecodeError:
        # The mark is one of Unicode's 32 noncharacters U+FDD0 to U+FDEF that the text lacks. The
        # decoder turns each wrong byte into a surrogate, U+DC80 to U+DCFF.
        mark = next(chr(i) for i in range(0xFDD0, 0xFDF0) if chr(i).encode() not in data)
        text = re.sub("[\udc80-\udcff]+", mark, data.decode(errors="surrogateescape"))
        return text.encode(), mark
    return data, None


def _without_marked(table: Any, mark: str, bad: dict[int, str]) -> Any:
    """Returns the rows of a table that have no mark, and adds the others to `bad`.

    Raises:
        ValueError: too many rows have the mark, or the header has it.
    """
    pyarrow, compute = arrow(), arrow("pyarrow.compute")
    marked = np.zeros(table.num_rows, bool)
    for column in table.columns:
        marked |= compute.fill_null(compute.match_substring(column, mark), False).to_numpy()
    if marked.sum() > _MOST_BAD or any(mark in name for name in table.column_names):
        raise ValueError("it is not UTF-8 text")
    unknown = "\N{REPLACEMENT CHARACTER}"
    for number, reason in bad.items():
        bad[number] = reason.replace(repr(mark)[1:-1], unknown)
    numbers = np.setdiff1d(np.arange(1, table.num_rows + len(bad) + 1), list(bad))
    for row in np.flatnonzero(marked).tolist():
        values = [column[row].as_py() or "" for column in table.columns]
        shown = _shown(",".join(values).replace(mark, unknown))
        bad[int(numbers[row])] = f"it is not UTF-8 text: {shown}."
    return table.filter(pyarrow.array(~marked))


def _shown(text: str) -> str:
    """Returns the start of a row, quoted for a message."""
    return repr(text[:_SHOWN] + ("…" if len(text) > _SHOWN else ""))


def _has_lines(table: Any) -> bool:
    """Returns whether a value or a column's name contains a line break."""
    compute = arrow("pyarrow.compute")
    return any(
        compute.any(compute.match_substring(column, end)).as_py()
        for end in "\r\n"
        for column in (*table.columns, arrow().array(table.column_names))
    )


def check_quotes(data: bytes) -> None:
    """Checks that no quote joins the lines behind it into one value by mistake.

    Like other readers, pyarrow takes everything up to the next quote, or to the end of the file, as
    one value. A correct value of several lines ends at a comma or at the end of a line.

    Raises:
        ValueError: a quoted value ends elsewhere; the message names the line where it begins.
    """
    if b'"' not in data:
        return
    for value in _QUOTED.finditer(data):
        lines = len(_LINE.findall(value["value"]))
        if value["end"] and (not lines or not value["behind"].strip()):
            continue
        line = _line_at(data, value.start("value"))
        if not value["end"]:
            raise ValueError(f"the quote that begins a value in line {line} is not closed")
        raise ValueError(
            f"the quote that begins a value in line {line} is closed only in line {line + lines}, "
            "inside a value. A quote is missing in between"
        )


def _line_at(data: bytes, offset: int) -> int:
    """Returns the line number, from 1, of a byte."""
    return len(_LINE.findall(data, 0, offset)) + 1


def _parsed(data: bytes, bad: dict[int, str] | None) -> Any:
    """Returns a CSV file as a table of text.

    A row with another number of columns than the header is added to `bad`, with its number as the
    key. If `bad` is None, such a row is an error.
    """
    pyarrow, csv = arrow(), arrow("pyarrow.csv")

    def handle(row: Any) -> str:
        assert bad is not None
        # pyarrow counts the header as row 1. It reports the first bad rows twice, so the dict keeps
        # one entry for each.
        bad[row.number - 1] = _reason(row)
        return "skip" if len(bad) <= _MOST_BAD else "error"

    # pyarrow numbers bad rows only if it reads without threads.
    read = csv.ReadOptions(use_threads=bad is None)
    parse = csv.ParseOptions(
        newlines_in_values=True, invalid_row_handler=None if bad is None else handle
    )
    names = csv.open_csv(pyarrow.BufferReader(data), read, parse).schema.names
    convert = csv.ConvertOptions(
        column_types={name: pyarrow.string() for name in names}, strings_can_be_null=True
    )
    return csv.read_csv(pyarrow.BufferReader(data), read, parse, convert)


def _reason(row: Any) -> str:
    """Returns why a row with a wrong number of columns is left out."""
    columns = f"{row.actual_columns} column{'s' if row.actual_columns > 1 else ''}"
    return f"it has {columns}, but the header has {row.expected_columns}: {_shown(row.text)}."
