"""The cluster that this process belongs to, and the devices of this machine.

`cluster.Cluster` holds the addresses of all workers, and which of them this process is.
`environments` finds it in the environment (`TF_CONFIG`). `selection` chooses the strategy for a
cluster and its devices. `gpus` counts devices without CUDA. `listening`, `proxies` and `job_secret`
are what every connection of a job needs: an address to listen at, a way past proxies, and the proof
that the other side belongs to the same job.

Nothing here imports TensorFlow.
"""
