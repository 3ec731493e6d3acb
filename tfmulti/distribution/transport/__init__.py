"""Messages between workers over TCP, without TensorFlow.

`rendezvous` connects every worker with every other one and checks that both know the job's key.
`channel` exchanges messages over these connections.
"""
