"""Does a whole run, from the configuration to the files that it writes.

A `FitConfig` becomes a `validation.Job`, a `setup.Setup`, a prepared model and a
`report.FitReport`. `validation` finds mistakes before TensorFlow starts. It loads the data, and
`data_stages` applies the transforms. `setup` makes the strategy and the model. `train` trains the
model with the callbacks of `callbacks`. `summary` prints what happens, and `artifacts` writes the
exported model, the report and the curves. `models` and `optimizers` hold what flags can name.

`data_command`, `inspection` and `data_speed` are the command `python -m tfmulti.data`. `notebook`
starts workers from a notebook, and `tuning` lets KerasTuner train its trials on all workers.
"""
