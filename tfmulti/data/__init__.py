"""Reads training data: any kind of source, in a fixed order, on any number of workers.

A `source.Source` has a length and gives the examples at any indices. The sub-packages are:

    sources       one module for each kind of data set, which loads the data as sources
    transforms    splits, caches, augments and weights the examples
    formats       parses the files
    io            opens the files, on this machine or in a cloud store

An example passes three modules. `permutation` shuffles the indices. `batch_plan` says which of
them each global batch holds and which worker reads them. `loader` reads this worker's part ahead
of the training step. The order depends on (seed, epoch) alone, never on the number of workers.

Importing these modules does not import TensorFlow. The functions that need it import it when they
run, for example to open a file in a cloud store or to parse a `tf.train.Example`.
"""
