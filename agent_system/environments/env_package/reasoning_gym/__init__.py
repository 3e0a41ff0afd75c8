"""Tasks of reasoning-gym as environments of one turn: a question, an answer, a grade."""
