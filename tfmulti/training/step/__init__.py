"""The compiled step: what each replica computes, and how the results are summed.

`step` builds one step on all local replicas. `execution` compiles one or several steps into one
call for `fit` and `evaluate`, and `prediction` compiles the call for `predict`. `step_result` sums
metrics and votes over all workers. `microbatches` and `xla` change how a step is
taken.
"""
