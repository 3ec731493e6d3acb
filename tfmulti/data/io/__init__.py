"""Finds and opens files on this machine and in the stores that TensorFlow can open, such as `gs://`.

`files` opens and checks single files. `folders` finds the files of a data set and its parts
(training, validation, test). `open_files` keeps the files open that are read again and again.
"""
