"""Template, style and scripts of the page; ``page.py`` puts them into one file."""
