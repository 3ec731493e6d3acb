"""Programs, places and helpers of the tests."""

import gc

# Importing TensorFlow makes a million objects. By Python's default of 700 the collector looks
# through them so often that each start of a test's program would take 0.7 s of a core longer.
gc.set_threshold(10_000)
