"""Programs in the style of public examples, each compared with plain Keras on one device.

A file holds the programs of one family. `registry` defines what a program is. `__main__` runs the
programs of one place in one process. `running` starts the processes and compares the results.
`public` runs the public programs themselves from a checkout of their repositories.
"""
