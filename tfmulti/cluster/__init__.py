"""The cluster that this process belongs to, and the devices of this machine.

`cluster.Cluster` holds the addresses of all workers, and says which of them this process is.
`environments` reads it from TF_CONFIG or from the variables of a scheduler. Where a scheduler tells
ranks and no ports, it reads a `layout.Layout`, and the processes agree by `port_agreement`.
`allocation` and `host_lists` read a scheduler's list of hosts for the launcher. `selection` then
chooses the strategy and the batch sizes for a cluster and the devices of a machine, which `gpus`
counts without CUDA.

Other modules serve the connections of a job. `listening` chooses the address at which a process
listens. `proxies` keeps the connections away from proxies. `job_secret` makes and checks the proofs
that a process belongs to the job. `handshake` accepts only the callers that have proved it.
`messages` sends and receives signed lines of JSON.

Nothing here imports TensorFlow.
"""
