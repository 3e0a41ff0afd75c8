"""Runs a ``GRPOEnvTrainer`` with colocated vLLM as a command, because vLLM changes its process.

Prints one JSON object: the largest difference between sampling log-probs and a forward pass of the
trainer on the same tokens. It is measured before training (``start``), with changed weights before
a sync (``stale``) and after it (``synced``).
"""

import json
import sys
from pathlib import Path

import torch

from tests.helpers.trl_trainer import GROUP, WORDS

ROWS = [{"solution": word} for word in WORDS[:2] for _ in range(GROUP)]


def difference(trainer) -> float:
    """Return the largest log-prob difference over the tokens of new trials."""
    output = trainer._generate_and_score_completions(ROWS)
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    with torch.no_grad():
        scored, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, output["completion_ids"].shape[1]
        )
    sampled = (output["completion_mask"] * output["tool_mask"]).bool()
    return (output["old_per_token_logps"] - scored)[sampled].abs().max().item()


def main(directory: Path) -> None:
    """Start, generate, change the weights, generate, sync, generate, and train a step."""
    from tests.helpers.trl_trainer import make_trainer

    trainer = make_trainer(
        directory,
        with_vllm=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=512,
        max_steps=1,
    )
    report = {"start": difference(trainer)}
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    report["stale"] = difference(trainer)
    trainer.vllm_generation.sync_weights()
    report["synced"] = difference(trainer)
    trainer.train()
    report["steps"] = trainer.state.global_step
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
