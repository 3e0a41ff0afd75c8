"""ScienceWorld: thirty kinds of elementary science experiments in text."""
