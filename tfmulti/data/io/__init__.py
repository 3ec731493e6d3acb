"""Files on this machine and in the stores that TensorFlow can open, such as `gs://`."""
