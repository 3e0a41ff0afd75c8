"""Question answering with search over a small fictional world or with a retrieval server."""
