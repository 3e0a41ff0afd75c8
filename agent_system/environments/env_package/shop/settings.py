"""The ``env.shop`` section (``env.webshop`` is the same shop)."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from agent_system.environments.settings import EnvSettings


class ShopSettings(EnvSettings):
    """The size of the shop and of its pages."""

    products: Annotated[int, Ge(20), Le(5000)] = 400
    """products of the catalogue"""
    goals_per_product: Annotated[int, Ge(1), Le(20)] = 3
    """goals around each product"""
    page_size: Annotated[int, Ge(1), Le(20)] = 5
    """products per page of results"""
    results: Annotated[int, Ge(1), Le(100)] = 20
    """products that a search finds, at most"""
    use_small: Literal[True] = True
    """WebShop's key, with the one value that is true here"""
    human_goals: Literal[False] = False
    """WebShop's key, with the one value that is true here"""

    def stand_in_for(self, env_name: str) -> str:
        """See ``EnvSettings``."""
        if env_name.lower() != "webshop":
            return ""
        return f"{self.products:,} products made up here, in place of WebShop's"
