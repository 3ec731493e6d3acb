"""From what `fit` is given to the rows that each replica computes.

A `feed` gives global batches, from arrays and sources (`prefetcher` reads this worker's rows ahead)
or from a `tf.data.Dataset`, PyDataset or generator (`dataset_feed`). `shards` is this worker's part
of one batch, as the compiled step gets it. `positions` saves where a Dataset's iterator is.
"""
