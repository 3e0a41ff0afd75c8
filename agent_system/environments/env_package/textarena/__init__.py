"""TextArena: puzzles, and text games against an opponent, that need no download."""
