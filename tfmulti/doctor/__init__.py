"""Answers "will it train here, and if not, what do I do?" in under a minute.

`__main__` is the command. `machine` and `gpus` look at the machine of each worker without starting
TensorFlow. `network` lets every worker call every other one, measures the links, and brings what
each worker has found to the chief. `job` compares the workers there, and judges the links. If
nothing has failed, `training` sums over all devices and trains for some seconds. Each module
returns `finding.Finding` objects. `finding.Report` turns them into the text or the JSON object that
the chief prints.

The links are tested before TensorFlow starts, because TensorFlow waits for a worker that it cannot
reach without a message.
"""
