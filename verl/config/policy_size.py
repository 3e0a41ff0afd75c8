"""The size of a policy: of one on disk from what its files say, of one to be made by arithmetic."""

import json
import math
from pathlib import Path

from verl.config.memory import PolicySize
from verl.config.schema.sft import NewPolicyConfig

# Of config.json, in the order of PolicySize.
WIDTHS = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def policy_size(path: Path) -> PolicySize:
    """Size of the policy in a directory, from its safetensors headers and its ``config.json``."""
    config = path / "config.json"
    if not config.is_file():
        return PolicySize()
    parameters = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            # safetensors: the header's length in 8 bytes, then the header as JSON; no weight is
            # read.
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        parameters += sum(
            math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        )
    said = json.loads(config.read_text())
    return PolicySize(parameters or None, *(said.get(key) for key in WIDTHS))


def new_policy_size(new: NewPolicyConfig, vocab: int) -> int:
    """Parameters of a policy that is still to be made, with ``vocab`` tokens."""
    head = new.head_dim or new.hidden_size // new.num_attention_heads
    # Query and output per attention head, key and value per key/value head.
    attention = new.hidden_size * head * 2 * (new.num_attention_heads + new.num_key_value_heads)
    # SwiGLU has three matrices; besides, two norms of the layer's width, and two of a head's (over
    # queries and keys).
    layer = attention + 3 * new.hidden_size * new.intermediate_size + 2 * new.hidden_size + 2 * head
    embeddings = vocab * new.hidden_size * (1 if new.tie_word_embeddings else 2)
    # The last term is the norm behind the last layer.
    return embeddings + new.num_hidden_layers * layer + new.hidden_size
