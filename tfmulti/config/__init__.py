"""Makes the configuration of a run from flags, a JSON file or Python arguments, and checks it.

`fit_config.FitConfig` is the whole configuration: a frozen dataclass that checks its values. It
inherits the fields of `training_options.TrainingOptions`, the part that `prepare` takes. `flags`
makes one command line flag of each field. `registry` lists the names that flags accept (models,
data sets, optimizers) with references to their code. `reading` holds the options for reading
data. `run_directory` knows every file that a run writes, and writes each file whole or not at all.
`json_values` is the strict parser of JSON, and `console` prints on the terminal.

Nothing here imports TensorFlow, so a mistyped flag is answered in a tenth of a second.
"""
