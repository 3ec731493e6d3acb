"""The configuration of a run, and what it is made from: flags, a JSON file, or arguments.

`FitConfig` (`fit_config`) is the whole configuration, as a frozen dataclass that checks itself.
`flags` turns its fields into command line flags, and `registry` lists the names that flags accept
(models, data sets, optimizers) with the place of their code. `reading` and `local_sync` are the
options for reading data and for workers that synchronize seldom. `run_directory` knows every file
that a run leaves, and writes each one whole or not at all.

Nothing here imports TensorFlow: a mistyped flag is answered in a tenth of a second.
"""
