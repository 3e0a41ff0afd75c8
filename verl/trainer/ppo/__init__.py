"""The PPO trainer: its loop, batches, metrics and weight sync. Tensor maths is in verl.algos."""
