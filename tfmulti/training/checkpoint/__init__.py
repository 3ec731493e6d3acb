"""Saves the position of a run, and resumes the run at the same step with the same numbers.

`callback.Checkpoint` is the callback that users give to `fit`. `resume` decides what a checkpoint
holds: variables, callbacks, random states and the position in the data. `callback_states` captures
the callbacks. `serialization` writes values as JSON and arrays. `file_format` writes and reads the
file. `owner` keeps two runs from writing to one folder.
"""
