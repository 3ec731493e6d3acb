"""The compiled step: what each replica computes, and how the results are summed.

`step` builds one step on all local replicas. `execution` compiles one or several steps into one
call for `fit` and `evaluate`, and `prediction` compiles the call for `predict`. `step_result` sums
metrics and votes over all workers, and `step_logs` makes the logs of a step from them. The kinds of
votes are the fields of `loop.stop_votes.Votes`.
`microbatches` splits a step into several passes, and `xla` compiles it by XLA.
`steps_per_execution` chooses how many steps one call takes.
"""
