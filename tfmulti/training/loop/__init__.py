"""Runs the loops over epochs and steps, alike on every worker.

- `loops` has the loops of `fit`, `evaluate` and `predict`. They take batches from a feed, call the
  compiled step, and call the callbacks.
- `stop_votes` lets all workers stop, and make checkpoints, after the same step: each worker's vote
  is part of the step's results.
- `same_data` lets the workers agree on the order of the data, and compares their data.
- `same_weights` compares the workers' weights and the state of their optimizers.
- `step_clock` measures the steps and how long they waited for data.
- `data_faults` turns an error of TensorFlow that the data has caused into a DataError that names
  the example.
"""
