"""Reading training data: any kind of source, in a fixed order, on any number of workers.

A `source.Source` has a length and gives the examples at any indices. Each module of `sources`
loads one kind of data set as such sources; `formats` parses the files, `io` opens them, here or in
a cloud store, and `transforms` splits, caches, augments and weights the examples.

The way of an example: `permutation` shuffles the indices, `batch_plan` says which of them each
global batch holds and which worker reads them, and `loader` reads this worker's part ahead of the
training step. The order depends on (seed, epoch) alone, never on the number of workers.

Nothing here imports TensorFlow, unless a file lies in a store that only TensorFlow can open.
"""
