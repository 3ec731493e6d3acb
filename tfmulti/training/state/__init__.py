"""What a prepared model remembers, and how its variables are checked, named, saved and restored.

- `trainer_state` is what a prepared model remembers besides its variables, such as its options.
- `run_state` captures the variables, seeds and metrics of a run for a checkpoint, and restores
  them.
- `variable_names` gives a variable a name that is the same in every process.
- `model_checks` checks a model before training, and builds the parts that are not built yet.
- `model_search` finds the variables of a model, and the objects and functions that hold them.
- `relocation` makes the variables of a model anew for another strategy, with the same values.
- `kept_values` tells which values in Python a compiled step keeps (`value_copies`), by what its
  code may read (`step_code`, `code_names`, `names_from_data`, `outside_reads`).
"""
