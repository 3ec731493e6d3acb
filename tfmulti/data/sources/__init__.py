"""One module a kind of data set; each has a `load` function that returns a `DataSet`.

`config.registry.DATASETS` lists them. To add one, write such a module and add a line there.
"""
