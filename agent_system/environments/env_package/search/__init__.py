"""Question answering with search over a small fictional world or with a retrieval server.

- ``world``: documents and questions (tables in ``world.json``)
- ``retrieval``: BM25 or HTTP
- ``package``: the environment
"""
