"""What runs inside a worker process: the FSDP2 engine, actor, reference and critic workers, and
rollout engines.
"""
