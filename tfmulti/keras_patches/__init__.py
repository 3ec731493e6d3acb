"""Every private name of Keras and TensorFlow that tfmulti touches, one file a subject.

Each file lists its private names with the upstream issue and the condition under which the patch
can go. `tests/mirrored/test_keras_patches.py` holds a test for each of them, which fails when Keras
no longer needs the patch, or no longer has the name. `installation.install` puts all patches in
place, at the first step of a prepared model. What is computed instead of Keras' own stands in
`distribution`. The package `cpu_speed` is for speed alone, and can be switched off.
"""
