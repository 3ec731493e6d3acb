"""Makes several replicas compute the numbers that one device would compute.

Each replica computes its own rows of the global batch. The modules here make the results of all
replicas together equal to those of one device that computes the whole batch.

- `strategies` makes the `tf.distribute` strategy.
- `replica_slice` describes the rows that one replica computes in a step.
- `replica_context` weights, reduces and gathers values between replicas.
- `losses`, `normalization`, `randomness`, `batch_dependent_layers` and `custom_steps` give the
  results of the global batch where a replica alone would compute something else.
- `row_rules` and `row_labels` follow how each tensor of a step depends on the rows. With them
  `global_values`, `global_builder` and `global_gradients` give the values of the global batch.
- `lookup_gradients` handles the gradients of tables, such as those of embeddings.
- `agreement` gives every worker the whole numbers or bytes of each worker.

Two modules exchange values without TensorFlow's collectives. `collectives` does so between workers,
over the TCP connections of `connections` and the package `transport`. `replica_threads` does so
between the replicas of one process.
"""
