"""The compiled step: what each replica computes, and how the results are summed.

`step` builds one step on all local replicas. `execution` compiles several of them into one call,
`prediction` does the same for `predict`, and `step_result` sums metrics and votes over all workers.
`microbatches`, `xla` and `local_steps` are other ways to take a step.
"""
