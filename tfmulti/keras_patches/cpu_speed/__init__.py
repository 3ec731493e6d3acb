"""Faster forms of Keras' layers and optimizers on CPUs, with the same numbers up to rounding.

`kernels` has the layers and `updates` the optimizers. `installation` puts them in place, unless
the environment has `TFMULTI_CPU_KERNELS=0`. With 0 every number is computed by Keras' own code.
"""
