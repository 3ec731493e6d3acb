"""What makes several replicas compute the numbers of one device.

`strategies` makes the `tf.distribute` strategy. `replica_slice` describes the rows of the global
batch that one replica computes in a step, and `replica_context` weighs, reduces and gathers between
replicas. `losses`, `normalization`, `randomness`, `batch_dependent_layers` and `custom_steps` give
the global batch's results where a replica alone would compute something else. `row_rules`,
`row_labels` and `global_values` follow how each tensor of a step depends on the rows.

Collectives run over connections of our own between workers (`collectives`, `connections` and the
package `transport`), and by one operation between the replicas of one process (`replica_threads`).
"""
