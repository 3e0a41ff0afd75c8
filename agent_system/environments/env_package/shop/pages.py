"""Pages of the shop: their texts, their clickable targets, and the page after a click."""

from dataclasses import dataclass, replace

from agent_system.environments.env_package.shop.catalogue import Product

SEARCH_BUTTON = "back to search"
BUY_BUTTON = "buy now"
NEXT_BUTTON = "next >"
BACK_BUTTON = "< prev"
DETAIL_PAGES = ("description", "features")


@dataclass(frozen=True)
class Page:
    """Current page of the shop.

    ``name`` is ``home``, ``results``, ``item`` or one of ``DETAIL_PAGES``. ``item`` is the product
    whose page is open. ``chosen_options`` are (option, value) pairs.
    """

    name: str = "home"
    query: str = ""  # words of the last search
    results: tuple[Product, ...] = ()
    page_size: int = 5
    page_index: int = 0  # of the page of results, from 0
    item: Product | None = None
    chosen_options: tuple[tuple[str, str], ...] = ()

    @property
    def page_products(self) -> tuple[Product, ...]:
        return self.results[
            self.page_index * self.page_size : (self.page_index + 1) * self.page_size
        ]

    @property
    def current_product(self) -> Product:
        if self.item is None:
            raise LookupError(f"page {self.name!r} has no product")
        return self.item

    def list_click_targets(self) -> list[str]:
        if self.name == "home":
            return []
        if self.name == "results":
            next_buttons = (
                [NEXT_BUTTON] if (self.page_index + 1) * self.page_size < len(self.results) else []
            )
            previous_buttons = [BACK_BUTTON] if self.page_index else []
            product_ids = [product.item_id for product in self.page_products]
            return [SEARCH_BUTTON, *previous_buttons, *next_buttons, *product_ids]
        if self.name in DETAIL_PAGES:
            return [SEARCH_BUTTON, BACK_BUTTON]
        option_values = [
            value for values in self.current_product.options.values() for value in values
        ]
        return [SEARCH_BUTTON, BACK_BUTTON, *DETAIL_PAGES, *option_values, BUY_BUTTON]

    def click_target(self, target: str) -> "Page":
        """Return the page after a click on one of ``list_click_targets``, except ``BUY_BUTTON``."""
        if target == SEARCH_BUTTON:
            return Page(page_size=self.page_size)
        if target == NEXT_BUTTON:
            return replace(self, page_index=self.page_index + 1)
        if target == BACK_BUTTON and self.name == "results":
            return replace(self, page_index=self.page_index - 1)
        if target == BACK_BUTTON:
            return replace(self, name="item" if self.name in DETAIL_PAGES else "results")
        if target in DETAIL_PAGES:
            return replace(self, name=target)
        if self.name == "results":
            item = next(product for product in self.page_products if product.item_id == target)
            # Clear the chosen options, which belong to the previous item.
            return replace(self, name="item", item=item, chosen_options=())
        option = next(
            option_name
            for option_name, values in self.current_product.options.items()
            if target in values
        )
        # Sort the options, so that the order of clicks does not change the anchor.
        return replace(
            self,
            chosen_options=tuple(sorted({**dict(self.chosen_options), option: target}.items())),
        )

    def format_text(self) -> str:
        if self.name == "home":
            return "This is the search page."
        if self.name == "results":
            # A search without results also has one page.
            page_count = max(1, -(-len(self.results) // self.page_size))
            lines = [f"Page {self.page_index + 1} of {page_count}, {len(self.results)} products"]
            lines += [
                f"{product.item_id}: {product.title}, ${product.price:.2f}"
                for product in self.page_products
            ]
            return "\n".join(lines)
        product = self.current_product
        if self.name == "description":
            return f"Description: {product.title}. Department: {product.department}."
        if self.name == "features":
            return f"Features of {product.title}: {', '.join(product.attributes)}."
        chosen_values = dict(self.chosen_options)
        lines = [product.title, f"price: ${product.price:.2f}"]
        for option, values in product.options.items():
            choice_text = f" (chosen: {chosen_values[option]})" if option in chosen_values else ""
            lines.append(f"{option}: {', '.join(values)}{choice_text}")
        return "\n".join(lines)

    def build_page_id(self) -> str:
        """Return a text that identifies the page, independent of the clicks that led to it."""
        item_id = self.item.item_id if self.item and self.name not in ("home", "results") else ""
        page_id_parts = [self.name, self.query, str(self.page_index), item_id]
        return " | ".join(
            [*page_id_parts, *(value for _, value in (self.chosen_options if item_id else ()))]
        )
