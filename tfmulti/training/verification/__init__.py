"""`verify`: compares the first steps on the replicas with the same steps on one device.

- `verification` decides whether to compare, repeats the comparison, and lets the workers vote.
- `step_comparison` takes the steps on the replicas and on one device, from the same state.
- `plain_run` takes the steps on one device, as plain Keras does.
- `comparison` tells whether two values differ by more than rounding. Its `in_words` writes the
  message.
- `recording` notes values within a step, to find where two runs differ first.
- `ownership` finds the parts of a model that are the user's own code.
- `compared` lists the parts of Keras whose numbers the tests compare.
- `result` is what the comparison has found.
"""
