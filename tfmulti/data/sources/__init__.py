"""Functions that load data sets: one module for each kind of data, with functions such as `load`.

Each function takes the options, which are the text after the name and a colon, and the seed of the
run. It returns a `DataSet`, and `config.registry.DATASETS` lists it. To add a kind of data,
write a module with such a function and add a line to that list.
"""
