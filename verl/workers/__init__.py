"""Code that runs inside worker processes: the FSDP2 engine, actor, reference, critic and reward
model workers, and rollout engines.
"""
