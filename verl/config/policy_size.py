"""Size of a policy on disk, from its files, and of a new policy, from its config."""

import json
import math
from pathlib import Path

from verl.config.memory import PolicySize
from verl.config.schema.sft import NewPolicyConfig

# Keys of config.json, in the order of PolicySize.
SIZE_KEYS = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def read_policy_size(path: Path) -> PolicySize:
    """Return the size of the policy in directory ``path``.

    Reads the headers of its safetensors files and ``config.json``, but no weights.
    """
    config = path / "config.json"
    if not config.is_file():
        return PolicySize()
    parameters = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            # A safetensors file starts with the header's length (8 bytes) and the header (JSON).
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        parameters += sum(
            math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        )
    values = json.loads(config.read_text())
    return PolicySize(parameters or None, *(values.get(key) for key in SIZE_KEYS))


def count_new_parameters(new: NewPolicyConfig, vocab: int) -> int:
    """Return the number of parameters of a new policy with ``vocab`` tokens."""
    head = new.head_dim or new.hidden_size // new.num_attention_heads
    # Query and output projections per attention head, key and value per key/value head.
    attention = new.hidden_size * head * 2 * (new.num_attention_heads + new.num_key_value_heads)
    # Three matrices of SwiGLU, two norms of width hidden_size, and the norms of queries and keys of
    # width head_dim.
    layer = attention + 3 * new.hidden_size * new.intermediate_size + 2 * new.hidden_size + 2 * head
    embeddings = vocab * new.hidden_size * (1 if new.tie_word_embeddings else 2)
    # The last term is the norm after the last layer.
    return embeddings + new.num_hidden_layers * layer + new.hidden_size
