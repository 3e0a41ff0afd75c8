"""Drawing of the lake in observations: signs, directions, and a parser."""

Cell = tuple[int, int]
HERE = "P"
HOLE = "O"
GOAL = "G"
# Offset of each move: rows down, columns to the right.
MOVE_OFFSETS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def read_drawing(text: str) -> tuple[str, dict[Cell, str]]:
    """Return the text above the drawing, with its line break, and the sign of every cell."""
    lines = text.splitlines()
    # Lines of the drawing consist of single signs. Other lines contain longer words.
    drawing_lines = [line for line in lines if all(len(sign) == 1 for sign in line.split())]
    cells = {
        (row, column): sign
        for row, line in enumerate(drawing_lines)
        for column, sign in enumerate(line.split())
    }
    text_above = "".join(f"{line}\n" for line in lines if line not in drawing_lines)
    return text_above, cells
