"""TextWorldExpress: eight kinds of text games on a fast Java engine."""
