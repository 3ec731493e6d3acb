"""All uses of private names of Keras and TensorFlow, with one file for each subject.

The docstring of each file has a table of the names that it touches. The table gives the upstream
issue of each name and the condition under which the patch can be removed.
`tests/keras_patches/test_upstream.py` has a test for each private name. The test fails when Keras
does not need the patch any more, or does not have the name any more.

`installation.install` puts all patches in place before the first step of a prepared model is built.
The computations that replace those of Keras are in the package `distribution`. The package
`cpu_speed` only makes steps faster, and the environment can switch it off.
"""
