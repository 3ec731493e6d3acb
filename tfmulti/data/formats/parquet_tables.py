"""Parquet files as tables.

A file with checksums of its pages (pyarrow's `write_page_checksum`) reveals each wrong byte.
Without them nothing reveals a wrong byte in uncompressed numbers.
"""

from __future__ import annotations

from typing import Any

from tfmulti.data.formats.arrow import arrow
from tfmulti.data.io.files import most_unpacked, reason_of

# Training uses each value as a float32.
_BYTES_OF_A_VALUE = 4


def read_parquet(data: bytes) -> Any:
    """Returns the rows of a file as a `pyarrow.Table`.

    Raises:
        ValueError: the file is damaged, or its declared content takes more memory than one file
            may.
    """
    pyarrow, parquet = arrow(), arrow("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data), page_checksum_verification=True)
        check_footer(file.metadata)
        _check_fits(file.metadata)
        return _checked(pyarrow, file.read(), file.metadata.num_rows)
    except (OSError, pyarrow.ArrowException, MemoryError) as error:
        raise ValueError(reason_of(error)) from None


def _check_fits(metadata: Any) -> None:
    """Checks that the content of a file fits into the memory, before memory is taken for it.

    The size of the file does not tell: a few bytes may stand for any number of equal values.

    Raises:
        ValueError: the declared content takes more memory than one file may.
    """
    groups = range(metadata.num_row_groups)
    unpacked = sum(metadata.row_group(group).total_byte_size for group in groups)
    declared = max(unpacked, _BYTES_OF_A_VALUE * metadata.num_rows * metadata.num_columns)
    if declared > most_unpacked():
        raise ValueError(
            f"it holds {metadata.num_rows:,} rows of {metadata.num_columns:,} columns, "
            f"{declared:,} bytes or more, but {most_unpacked():,} is the limit (by default the "
            "memory); write it as TFRecord or .npy files, which are read piece by piece, or allow "
            "more by --max_file_gigabytes"
        )


def check_footer(metadata: Any) -> None:
    """Checks that the rows of all row groups add up to the number of rows of the file.

    Raises:
        ValueError: they do not, or a row group has a negative number of rows.
    """
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
        raise ValueError(
            f"its row groups have {sum(rows):,} rows, but its footer says {metadata.num_rows:,}"
        )


def _checked(pyarrow: Any, table: Any, rows: int) -> Any:
    """Returns a valid table without dictionary columns.

    Raises:
        ValueError: the table does not have `rows` rows, or its content is invalid, such as text
            that is not UTF-8.
    """
    table = _plain(pyarrow, table)
    if table.num_rows != rows:
        raise ValueError(f"it has {table.num_rows:,} rows, but its footer says {rows:,}")
    table.validate(full=True)
    return table


def _plain(pyarrow: Any, table: Any) -> Any:
    """Returns a table with each dictionary column replaced by its values."""
    for i, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):
            plain = table.column(i).cast(field.type.value_type)
            table = table.set_column(i, field.name, plain)
    return table
