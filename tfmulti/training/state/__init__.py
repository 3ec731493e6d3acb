"""What a prepared model remembers, and how its variables are checked, named, saved and restored.

- `trainer_state` is what a prepared model remembers besides its variables, such as its options.
- `run_state` captures the variables, seeds and metrics of a run for a checkpoint, and restores
  them.
- `variable_names` gives a variable a name that is the same in every process.
- `model_checks` checks a model before training, and builds the parts that are not built yet.
- `relocation` makes the variables of a model anew for another strategy, with the same values.
"""
