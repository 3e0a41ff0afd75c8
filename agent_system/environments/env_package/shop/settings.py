"""Settings of the config section ``env.shop``. ``env.webshop`` is an alias."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from agent_system.environments.settings import EnvSettings


class ShopSettings(EnvSettings):
    """Size of the shop and of its pages."""

    products: Annotated[int, Ge(20), Le(5000)] = 400
    """number of products in the catalogue"""
    goals_per_product: Annotated[int, Ge(1), Le(20)] = 3
    """number of goals per product"""
    page_size: Annotated[int, Ge(1), Le(20)] = 5
    """products per page of results"""
    results: Annotated[int, Ge(1), Le(100)] = 20
    """maximum number of results of a search"""
    use_small: Literal[True] = True
    """key of WebShop; only this value is supported"""
    human_goals: Literal[False] = False
    """key of WebShop; only this value is supported"""

    def describe_substitute_data(self, env_name: str) -> str:
        if env_name.lower() != "webshop":
            return ""
        return f"{self.products:,} generated products instead of WebShop's"

    def count_needed_turns(self) -> int | None:
        """Return the turns of the shortest purchase: search, click a product, click buy."""
        return 3
