"""Every private name of Keras and TensorFlow that tfmulti touches.

`keras_compat` holds the patches that correct numbers, each with its reason, the upstream issue and
a test that tells when it can go. The package `cpu_speed` holds those for speed alone.
"""
