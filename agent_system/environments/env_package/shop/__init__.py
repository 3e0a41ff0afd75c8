"""Small online shop with the actions of WebShop and a generated catalogue.

- ``catalogue``: products and goals (tables in ``catalogue.json``)
- ``pages``: texts of pages, and clicks
- ``package``: the environment
"""
