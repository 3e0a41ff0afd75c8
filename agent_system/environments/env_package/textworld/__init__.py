"""TextWorld: games that Microsoft's generator makes and compiles on this machine."""
