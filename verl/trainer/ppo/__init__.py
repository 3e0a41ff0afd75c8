"""PPO: the trainer and the pure tensor maths it is made of."""
