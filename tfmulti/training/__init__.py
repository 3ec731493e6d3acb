"""`fit`, `evaluate` and `predict` on every worker.

`distributed_model.prepare` gives a Keras model the methods that distribute it. The packages below,
each of which imports only those after it:

- `verification` compares the first steps with those of one device by plain Keras;
- `loop` runs epochs: it fetches batches, calls the step and the callbacks;
- `checkpoint` saves where a run is, and resumes it there;
- `step` compiles the training step for all local replicas, and sums its results over the workers;
- `input` turns what `fit` is given into the rows of each replica;
- `state` is what a prepared model remembers, and how its variables are captured and restored.

Three modules stand beside them. `watchdog` writes what the workers do when no step ends.
`safe_callbacks` lets Keras' callbacks write files on the chief alone. `memory` estimates the memory
of a step.
"""
