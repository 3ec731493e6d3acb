"""`train(config)`: a whole run, from the configuration to the files that it leaves.

`validation` finds mistakes before TensorFlow starts. `setup` makes the strategy, the data and the
model. `train` runs the training with the run's callbacks. `summary`, `report` and `artifacts` tell
and write what came out of it. `models` and `optimizers` are what flags can name. `data_command`,
`inspection` and `data_speed` are the command `python -m tfmulti.data`.
"""
