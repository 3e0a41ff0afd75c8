"""Every task of reasoning-gym as an environment of one step: a question, an answer, a grade."""
