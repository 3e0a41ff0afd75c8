"""FrozenLake: cross a frozen lake to the goal without falling into a hole; rules and maps by
gymnasium.
"""
