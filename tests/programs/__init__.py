"""Programs in the manner of public ones, each compared with plain Keras on one device.

A file holds the programs of one family; `registry` says what a program is, `__main__` runs
those of one place in one process, `running` starts the processes and compares, and `public`
runs the public programs themselves from a checkout of their repositories.
"""
