"""The lake as its observations draw it: signs, sides, and how to read a drawing."""

Cell = tuple[int, int]
HERE = "P"
HOLE = "O"
GOAL = "G"
# Where each move leads: rows down, columns right.
SIDES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def read(text: str) -> tuple[str, dict[Cell, str]]:
    """What is said above the drawing, with its line break, and the sign of every cell."""
    lines = text.splitlines()
    # A line of the drawing holds single signs alone; a sentence above it always has longer words.
    drawn = [line for line in lines if all(len(sign) == 1 for sign in line.split())]
    cells = {
        (row, column): sign
        for row, line in enumerate(drawn)
        for column, sign in enumerate(line.split())
    }
    said = "".join(f"{line}\n" for line in lines if line not in drawn)
    return said, cells
