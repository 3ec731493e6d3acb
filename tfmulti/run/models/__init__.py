"""The built-in models, with one module for each family.

`config.registry.MODELS` lists them by the names of `--model`. Each function takes the form of the
data, a `DataSpec`, and returns a Keras model that is not compiled. `building` has the first layers
and the output layer that all of them share. `user` builds a model by the user's own function.

To add a model, write a function in the file of its family, and a line in `config.registry.MODELS`.
"""
