"""Text version of every Gymnasium environment with discrete actions."""
