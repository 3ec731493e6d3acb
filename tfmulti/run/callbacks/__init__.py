"""The Keras callbacks that a run adds to `fit`.

Each module has one callback or what a callback needs. `throughput.Throughput` measures the speed of
the steps, and `waiting.Waiting` how long they wait for data. `step_times` keeps the times of the
steps. `flops` counts the floating-point operations of a model, and `peaks` lists those that a GPU
can do in a second. `tensorboard`, `history_file` and `model_file` write files, `tracker` logs to
MLflow or W&B, and `live_curves` draws in a notebook. `stragglers` names a slow worker. `scalars` is
the base of those that write figures of their own for TensorBoard.

`Throughput` and `Waiting` run on every worker, and the callbacks that write files on the chief.
"""
