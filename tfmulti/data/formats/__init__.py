"""Parsers of file formats: TFRecord, `tf.train.Example`, CSV, Parquet, images, .npy headers."""
