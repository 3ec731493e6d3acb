"""Parses the content of files into arrays.

- Tables: `csv_tables` and `parquet_tables` read files by pyarrow (`arrow`) into `columns`, whose
  rows all files of a data set share.
- TFRecord files: `record_index` finds where each record begins, and `records` reads records at any
  of these positions. A GZIP file has no such positions, so `record_stream` reads it in order, and
  `gzip_faults` finds the record at which it is damaged.
- Records: `features` describes the features of a data set's records. `examples` parses a
  `tf.train.Example` into arrays of these forms, and `encoded` is a source of such examples.
- Single files: `pixels` decodes images, and `npy_format` reads the header of an .npy file.

A parser alone is not reachable by `--dataset`. To add a format, write a parser here, a source that
uses it in `data.sources`, and a line in `config.registry`.
"""
