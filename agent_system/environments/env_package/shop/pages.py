"""The pages of the shop: what they show, what can be clicked on them, and where a click leads."""

from dataclasses import dataclass, replace

from agent_system.environments.env_package.shop.catalogue import Product

SEARCH = "back to search"
BUY = "buy now"
NEXT = "next >"
BACK = "< prev"
DETAILS = ("description", "features")


@dataclass(frozen=True)
class Page:
    """Where the customer is. ``name``: ``home``, ``results``, ``item`` or one of ``DETAILS``;
    ``number`` counts results pages from 0; ``chosen`` holds (option, value) pairs.
    """

    name: str = "home"
    query: str = ""
    results: tuple[Product, ...] = ()
    page_size: int = 5
    number: int = 0
    item: Product | None = None
    chosen: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> tuple[Product, ...]:
        """The products of this results page."""
        return self.results[self.number * self.page_size : (self.number + 1) * self.page_size]

    @property
    def product(self) -> Product:
        """The product of this page. Raises ``LookupError`` on pages of none."""
        if self.item is None:
            raise LookupError(f"the page {self.name!r} shows no product")
        return self.item

    def clickable(self) -> list[str]:
        """What can be clicked here."""
        if self.name == "home":
            return []
        if self.name == "results":
            further = [NEXT] if (self.number + 1) * self.page_size < len(self.results) else []
            earlier = [BACK] if self.number else []
            return [SEARCH, *earlier, *further, *(product.item_id for product in self.shown)]
        if self.name in DETAILS:
            return [SEARCH, BACK]
        return [
            SEARCH,
            BACK,
            *DETAILS,
            *(value for values in self.product.options.values() for value in values),
            BUY,
        ]

    def click(self, target: str) -> "Page":
        """The page that a click on ``target`` (one of ``clickable``, not the purchase) leads to."""
        if target == SEARCH:
            return Page(page_size=self.page_size)
        if target == NEXT:
            return replace(self, number=self.number + 1)
        if target == BACK:
            return self._back()
        if target in DETAILS:
            return replace(self, name=target)
        if self.name == "results":
            item = next(product for product in self.shown if product.item_id == target)
            # Another item is another choice: options are forgotten, as a shop forgets them.
            return replace(self, name="item", item=item, chosen=())
        option = next(name for name, values in self.product.options.items() if target in values)
        # Sorted, so that the order of clicks makes no difference to the anchor.
        return replace(self, chosen=tuple(sorted({**dict(self.chosen), option: target}.items())))

    def _back(self) -> "Page":
        if self.name == "results":
            return replace(self, number=self.number - 1)
        return replace(self, name="item" if self.name in DETAILS else "results")

    def text(self) -> str:
        """What the page shows below the instruction."""
        if self.name == "home":
            return "This is the search page."
        if self.name == "results":
            # A search that finds nothing still has one page.
            pages = max(1, -(-len(self.results) // self.page_size))
            lines = [
                f"{product.item_id}: {product.title}, ${product.price:.2f}"
                for product in self.shown
            ]
            return "\n".join(
                [f"Page {self.number + 1} of {pages}, {len(self.results)} products", *lines]
            )
        if self.name == "description":
            return f"Description: {self.product.title}. Department: {self.product.department}."
        if self.name == "features":
            return f"Features of {self.product.title}: {', '.join(self.product.attributes)}."
        chosen = dict(self.chosen)
        lines = []
        for option, values in self.product.options.items():
            choice = f" (chosen: {chosen[option]})" if option in chosen else ""
            lines.append(f"{option}: {', '.join(values)}{choice}")
        return "\n".join([self.product.title, f"price: ${self.product.price:.2f}", *lines])

    def anchor(self) -> str:
        """The same text for the same place, however it was reached."""
        item = self.item.item_id if self.item and self.name not in ("home", "results") else ""
        parts = [self.name, self.query, str(self.number), item]
        return " | ".join([*parts, *(value for _, value in (self.chosen if item else ()))])
