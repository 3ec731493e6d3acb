"""Measures how training scales and where the time of a step goes, and predicts more workers.

`flags` makes a `config.BenchConfig` of a command line: a run, and the points at which it is
measured. `matrix.Matrix` measures every point in new processes, which the launcher starts. Each of
them is a `worker`: it reads a `request.MeasureRequest`, measures by `measure` and `all_reduces`,
and writes a `request.MeasureResult`.

`results` computes the figures of each point from them, with the `parts` of the time of a step. It
also fits the cost model of `cost`, which predicts the figures of more workers. `report` makes the
table and bench.json of the figures, `limits` says what limits a point, and `picture` draws
bench.png.
"""
