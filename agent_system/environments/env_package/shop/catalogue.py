"""Catalogue and goals of the shop, drawn with a fixed seed from tables in ``catalogue.json``."""

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_system.environments.bm25 import KeywordIndex
from verl.utils.seeds import derive_seed

TABLES_FILE = Path(__file__).with_name("catalogue.json")
ATTRIBUTES_PER_PRODUCT = 4  # two of them are in the title, all are on the page "features"
VALUES_PER_OPTION = 3  # maximum number of available values of an option, such as three sizes
ATTRIBUTES_PER_GOAL = 2  # number of attributes that a goal requires


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
def make_catalogue(product_count: int) -> dict[str, Product]:
    """Return a dict of ``product_count`` products by id. The kinds of products alternate."""
    tables = json.loads(TABLES_FILE.read_text(encoding="utf-8"))
    products = [_generate_product(tables, product_index) for product_index in range(product_count)]
    return {product.item_id: product for product in products}


@lru_cache(maxsize=4)
def _build_index(product_count: int) -> tuple[list[Product], KeywordIndex]:
    products = list(make_catalogue(product_count).values())
    product_texts = [
        " ".join([product.title, *product.attributes, *product.options["color"]])
        for product in products
    ]
    return products, KeywordIndex(product_texts)


def find_products(product_count: int, query: str, max_results: int) -> list[Product]:
    """Return at most ``max_results`` products, best matches for ``query`` first."""
    products, index = _build_index(product_count)
    return [products[position] for position in index.find_best_texts(query, max_results)]


def _generate_product(tables: dict[str, Any], product_index: int) -> Product:
    # Each product has its own seed, so a larger catalogue begins with the same products.
    rng = random.Random(derive_seed("shop", "product", product_index))
    kind = list(tables["kinds"])[product_index % len(tables["kinds"])]
    kind_table = tables["kinds"][kind]
    attributes = tuple(rng.sample(kind_table["attributes"], ATTRIBUTES_PER_PRODUCT))
    options: dict[str, tuple[str, ...]] = {}
    for option, values in (("color", tables["colors"]), ("size", kind_table["sizes"])):
        offered_values = rng.sample(values, min(VALUES_PER_OPTION, len(values)))
        # Sort the drawn values as in the table: small, medium, large.
        options[option] = tuple(sorted(offered_values, key=values.index))
    title = f"{rng.choice(tables['brands'])} {kind}, {attributes[0]}, {attributes[1]}"
    price = rng.randint(*kind_table["price"]) + rng.choice((0.0, 0.49, 0.95))
    item_id = f"b{derive_seed('shop', 'id', product_index) % 16**8:08x}"
    return Product(item_id, title, kind, kind_table["department"], attributes, options, price)


def make_goal(product: Product, goal_index: int) -> dict[str, Any]:
    """Draw a purchase goal that ``product`` fulfils. ``goal_index`` determines the random choices.

    ``instruction`` is the text for the policy.
    """
    rng = random.Random(derive_seed("shop", "goal", product.item_id, goal_index))
    attributes = rng.sample(product.attributes, ATTRIBUTES_PER_GOAL)
    options = {option: rng.choice(values) for option, values in product.options.items()}
    # Round up to a multiple of 10, at most 30 dollars above the price.
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


def score_purchase(product: Product, chosen_options: dict[str, str], goal: dict[str, Any]) -> float:
    """Return the reward for buying ``product``, from 0 to 1, similar to WebShop.

    It is the share of fulfilled requirements, times a factor for the kind. The requirements are the
    attributes, the options and the maximum price of ``goal``. The factor is 1.0 for the right kind
    of product, 0.5 for another kind of the same department, else 0.1. WebShop compares titles and
    categories instead of kinds.

    Example: 4 of 5 requirements with another kind of the department give 0.5 * 4 / 5 = 0.4.
    """
    fulfilled_count = len(set(goal["attributes"]) & set(product.attributes))
    fulfilled_count += sum(
        chosen_options.get(option) == value for option, value in goal["options"].items()
    )
    fulfilled_count += product.price < goal["max_price"]
    fulfilled_share = fulfilled_count / (len(goal["attributes"]) + len(goal["options"]) + 1)
    if product.kind == goal["kind"]:
        return fulfilled_share
    return (0.5 if product.department == goal["department"] else 0.1) * fulfilled_share
