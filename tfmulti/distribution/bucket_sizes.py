"""The sizes of the messages in which workers sum gradients."""

# The size of a bucket of gradients that workers sum at a time (docs/measurements.md: 500 KB).
BUCKET_BYTES = 500_000
# Of more than two workers, a tensor up to this size goes whole to each worker, which adds up all
# parts. So it travels one way instead of two (`collectives.begin_totals`).
GATHER_BYTES = 32_768
