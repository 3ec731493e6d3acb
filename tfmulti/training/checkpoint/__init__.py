"""Saves where a run is, and resumes it at the same step with the same numbers.

`callback.Checkpoint` is the callback that users add. `resume` decides what a checkpoint holds:
variables, callbacks, random states and the position in the data. `callback_states` captures the
callbacks, `serialization` turns values into bytes, `file_format` writes and reads the file, and
`owner` keeps two runs from writing to one folder.
"""
