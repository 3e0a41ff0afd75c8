"""Catalogue and goals of the shop, drawn with a fixed seed from tables in ``catalogue.json``."""

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_system.environments.bm25 import KeywordIndex
from verl.utils.seeds import derive_seed

TABLES = Path(__file__).with_name("catalogue.json")
ATTRIBUTES_PER_PRODUCT = 4  # attributes of a product: two are in its title, all are in its features
VALUES_PER_OPTION = 3  # values of an option of a product
WANTED_ATTRIBUTES = 2  # attributes that a goal asks for


@dataclass(frozen=True)
class Product:
    """Product of the shop. ``options`` maps ``color`` and ``size`` to the available values."""

    item_id: str
    title: str
    kind: str
    department: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    price: float


@lru_cache(maxsize=4)
def make_catalogue(count: int) -> dict[str, Product]:
    """Return the first ``count`` products by id. Their kinds alternate."""
    tables = json.loads(TABLES.read_text(encoding="utf-8"))
    products = [_draw_product(tables, number) for number in range(count)]
    return {product.item_id: product for product in products}


@lru_cache(maxsize=4)
def _build_index(count: int) -> tuple[list[Product], KeywordIndex]:
    products = list(make_catalogue(count).values())
    texts = [" ".join([p.title, *p.attributes, *p.options["color"]]) for p in products]
    return products, KeywordIndex(texts)


def find_products(count: int, query: str, limit: int) -> list[Product]:
    """Return at most ``limit`` of the first ``count`` products, best match for ``query`` first."""
    products, index = _build_index(count)
    return [products[position] for position in index.find_best_texts(query, limit)]


def _draw_product(tables: dict[str, Any], number: int) -> Product:
    # Each product has a separate seed, so a larger catalogue starts with the same products.
    rng = random.Random(derive_seed("shop", "product", number))
    kind = list(tables["kinds"])[number % len(tables["kinds"])]
    kind_table = tables["kinds"][kind]
    attributes = tuple(rng.sample(kind_table["attributes"], ATTRIBUTES_PER_PRODUCT))
    options: dict[str, tuple[str, ...]] = {}
    for name, values in (("color", tables["colors"]), ("size", kind_table["sizes"])):
        offered = rng.sample(values, min(VALUES_PER_OPTION, len(values)))
        # Show the drawn values in the order of the table: small, medium, large.
        options[name] = tuple(sorted(offered, key=values.index))
    title = f"{rng.choice(tables['brands'])} {kind}, {attributes[0]}, {attributes[1]}"
    price = rng.randint(*kind_table["price"]) + rng.choice((0.0, 0.49, 0.95))
    item_id = f"b{derive_seed('shop', 'id', number) % 16**8:08x}"
    return Product(item_id, title, kind, kind_table["department"], attributes, options, price)


def make_goal(product: Product, number: int) -> dict[str, Any]:
    """Return purchase goal ``number`` among the goals that ``product`` fulfils.

    Its most important keys are ``kind``, ``attributes``, ``options``, ``max_price`` and
    ``instruction``.
    """
    rng = random.Random(derive_seed("shop", "goal", product.item_id, number))
    attributes = rng.sample(product.attributes, WANTED_ATTRIBUTES)
    options = {name: rng.choice(values) for name, values in product.options.items()}
    # A multiple of 10 that is at most 30 dollars above the price.
    max_price = (int(product.price) // 10 + rng.randint(1, 3)) * 10
    return {
        "item_id": product.item_id,
        "kind": product.kind,
        "department": product.department,
        "attributes": attributes,
        "options": options,
        "max_price": max_price,
        "instruction": (
            f"Find me a {product.kind}, {' and '.join(attributes)}, in color {options['color']} "
            f"and size {options['size']}, at a price lower than {max_price} dollars."
        ),
    }


def score_purchase(bought: Product, chosen_options: dict[str, str], wish: dict[str, Any]) -> float:
    """Return a reward from 0 to 1 as in WebShop: share of fulfilled wishes, times a kind factor.

    Wishes are the attributes, options and maximum price in ``wish``; ``chosen`` are the options of
    the purchase. The factor is 1.0 for the right kind of product, 0.5 for another kind of the same
    department, else 0.1. WebShop compares titles and categories instead.

    Example: 4 of 5 wishes with another kind of the department give 0.5 * 4 / 5 = 0.4.
    """
    fulfilled = len(set(wish["attributes"]) & set(bought.attributes))
    fulfilled += sum(chosen_options.get(name) == value for name, value in wish["options"].items())
    fulfilled += bought.price < wish["max_price"]
    # The price is one more wish.
    fulfilled_share = fulfilled / (len(wish["attributes"]) + len(wish["options"]) + 1)
    if bought.kind == wish["kind"]:
        return fulfilled_share
    return (0.5 if bought.department == wish["department"] else 0.1) * fulfilled_share
