"""Pages of the shop: texts, possible clicks, and the page after a click."""

from dataclasses import dataclass, replace

from agent_system.environments.env_package.shop.catalogue import Product

SEARCH = "back to search"
BUY = "buy now"
NEXT = "next >"
BACK = "< prev"
DETAILS = ("description", "features")


@dataclass(frozen=True)
class Page:
    """Current page of the shop.

    ``name`` is ``home``, ``results``, ``item`` or one of ``DETAILS``. ``number`` counts the pages
    of results from 0. ``chosen`` are the selected options of the item as (option, value) pairs.
    """

    name: str = "home"
    query: str = ""
    results: tuple[Product, ...] = ()
    page_size: int = 5
    number: int = 0
    item: Product | None = None
    chosen: tuple[tuple[str, str], ...] = ()

    @property
    def page_products(self) -> tuple[Product, ...]:
        return self.results[self.number * self.page_size : (self.number + 1) * self.page_size]

    @property
    def current_product(self) -> Product:
        """Product of this page. Raises ``LookupError`` on pages without a product."""
        if self.item is None:
            raise LookupError(f"page {self.name!r} has no product")
        return self.item

    def clickable_targets(self) -> list[str]:
        """Return the texts that can be clicked on this page."""
        if self.name == "home":
            return []
        if self.name == "results":
            further = [NEXT] if (self.number + 1) * self.page_size < len(self.results) else []
            earlier = [BACK] if self.number else []
            products = [product.item_id for product in self.page_products]
            return [SEARCH, *earlier, *further, *products]
        if self.name in DETAILS:
            return [SEARCH, BACK]
        options = [value for values in self.current_product.options.values() for value in values]
        return [SEARCH, BACK, *DETAILS, *options, BUY]

    def click_target(self, target: str) -> "Page":
        """Return the page after a click on ``target``, one of ``clickable_targets`` except BUY."""
        if target == SEARCH:
            return Page(page_size=self.page_size)
        if target == NEXT:
            return replace(self, number=self.number + 1)
        if target == BACK and self.name == "results":
            return replace(self, number=self.number - 1)
        if target == BACK:
            return replace(self, name="item" if self.name in DETAILS else "results")
        if target in DETAILS:
            return replace(self, name=target)
        if self.name == "results":
            item = next(product for product in self.page_products if product.item_id == target)
            # Clear the options: they belong to the previous item.
            return replace(self, name="item", item=item, chosen=())
        option = next(
            name for name, values in self.current_product.options.items() if target in values
        )
        # Sort the options, so that the order of clicks does not change ``anchor_text``.
        return replace(self, chosen=tuple(sorted({**dict(self.chosen), option: target}.items())))

    def page_text(self) -> str:
        """Return the text of the page below the instruction."""
        if self.name == "home":
            return "This is the search page."
        if self.name == "results":
            # A search without results still has one page.
            pages = max(1, -(-len(self.results) // self.page_size))
            lines = [f"Page {self.number + 1} of {pages}, {len(self.results)} products"]
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
        chosen_values = dict(self.chosen)
        lines = [product.title, f"price: ${product.price:.2f}"]
        for option, values in product.options.items():
            choice = f" (chosen: {chosen_values[option]})" if option in chosen_values else ""
            lines.append(f"{option}: {', '.join(values)}{choice}")
        return "\n".join(lines)

    def anchor_text(self) -> str:
        """Return text that identifies the page, independent of the path to it."""
        item = self.item.item_id if self.item and self.name not in ("home", "results") else ""
        anchor_parts = [self.name, self.query, str(self.number), item]
        return " | ".join([*anchor_parts, *(value for _, value in (self.chosen if item else ()))])
