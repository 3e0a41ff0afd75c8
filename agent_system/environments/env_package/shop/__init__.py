"""A small shop with the action interface of WebShop; catalogue and goals are made here from tables.

``catalogue`` products and goals (tables in ``catalogue.json``) · ``pages`` what is shown and can be
clicked · ``package`` the environment.
"""
