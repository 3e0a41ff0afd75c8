"""Question answering with a search engine: a small invented world to look things up in, or a
retrieval server.

``world`` documents and questions (tables in ``world.json``) · ``retrieval`` BM25 or HTTP ·
``package`` the environment.
"""
