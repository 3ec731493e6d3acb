"""Turns the data that `fit` is given into the rows that each replica computes.

- `interface` is what all feeds have in common, and `feed` makes a feed of the data: its global
  batches, ready for the compiled step.
- `prefetcher` reads this worker's rows of arrays and other sources ahead of the steps.
- `dataset_feed` is the feed of a `tf.data.Dataset`, PyDataset or generator, and `pipeline` cuts its
  global batches to this worker's rows.
- `worker_batch` is this worker's part of one batch, as the compiled step gets it.
- `positions` saves the position of a Dataset's iterator.
- `replay` takes the first batches for a trial, and gives them to the training again.
"""
