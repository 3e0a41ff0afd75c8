"""FrozenLake: cross a frozen lake to the goal without falling into a hole. Uses gymnasium."""
