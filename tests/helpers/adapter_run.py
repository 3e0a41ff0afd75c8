"""Actor with LoRA, an engine and the weight sync between them, in one process and without Ray."""

import asyncio
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.helpers.engine_cases import ask, load, reference_logprobs, rollout_section, run_requests
from tests.helpers.policy_rows import policy_config, random_rows
from tests.helpers.trainer_fakes import LocalActorGroup, LocalHandle
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import has_updated_weights
from verl.workers import weight_transfer
from verl.workers.actor import ActorWorker
from verl.workers.rollout import RolloutWorker, create_engine


class AdapterRun:
    """Actor and engine ``name`` on the policy in ``directory``; ``adapters`` are not trained."""

    def __init__(
        self, name: str, directory: Path, adapters: Mapping[str, Path] | None = None, **model: Any
    ) -> None:
        paths = {key: str(path) for key, path in (adapters or {}).items()}
        config = policy_config(directory)
        for key, value in ({"lora_rank": 4, "adapters": paths} | model).items():
            setattr(config.model, key, value)
        config.rollout = rollout_section(name=name, lora_sync="adapter")
        self.config = config
        self.engine: Any = create_engine(
            name, config.rollout, str(directory), seed=3, num_threads=1, lora=config.model
        )
        self.actor = ActorWorker(config, device="cpu")
        self.actor.init_model()
        self.loop = asyncio.new_event_loop()
        self.rollout_worker = RolloutWorker(config, "", engine=self.engine)
        self.workers = resources.TrainingWorkers(
            LocalActorGroup(self.actor),
            [LocalHandle(self.rollout_worker)],
            sends_adapter=True,
            actor_computes_reference=True,
        )

    def gather(self, refs: list[Any], *_: object) -> list[Any]:
        """Replace ``gather_results``: a reference is a call (worker, method, arguments)."""
        return [self._answer(ref) for ref in refs]

    def _answer(self, ref: Any) -> Any:
        if not isinstance(ref, tuple):
            return ref
        worker, method, args = ref
        result = getattr(worker, method)(*map(self._answer, args))
        return self.loop.run_until_complete(result) if inspect.iscoroutine(result) else result

    def gather_locally(self) -> None:
        """Let the weight sync of this process use ``gather``."""
        for module in (resources, weight_transfer):
            vars(module)["gather_results"] = self.gather

    def update(self, seed: int = 0) -> bool:
        """Update the policy once; return True if it changed."""
        metrics = self.actor.update_actor(random_rows(rows=4, seed=seed)).meta_info["metrics"]
        return has_updated_weights(metrics)

    def sync(self, version: int, is_updated: bool = False) -> dict[str, float]:
        """Sync the weights; return the metrics."""
        return self.workers.sync_weights(version, is_updated)

    def measure_gaps(self, models: Mapping[str, Any]) -> dict[str, float]:
        """Return the largest |log-prob of the engine - log-prob of ``models[name]``| by name.

        The requests of all models run in one batch.
        """
        requests = []
        for name in models:
            for request in ask(3, max_tokens=12):
                request.request_id += f"-{name}"
                request.model = name
                requests.append(request)
        results = run_requests(self.engine, requests)
        gaps = dict.fromkeys(models, 0.0)
        for request in requests:
            result = results[request.request_id]
            expected = reference_logprobs(models[request.model], request, result.token_ids)
            gap = (torch.tensor(result.logprobs) - expected).abs().max().item()
            gaps[request.model] = max(gaps[request.model], gap)
        return gaps

    def export_policy(self, directory: Path) -> Any:
        """Return the trained policy with merged adapters as a transformers model."""
        self.actor.export_hf(str(directory))
        return load(directory)

    def close(self) -> None:
        """Close the engine."""
        self.loop.run_until_complete(self.rollout_worker.close())
        self.loop.close()


def save_random_adapter(
    policy: Path, directory: Path, rank: int = 8, targets: tuple[str, ...] = ("q_proj", "up_proj")
) -> Any:
    """Save a random adapter of ``policy`` with peft; return the policy with it merged."""
    torch.manual_seed(rank)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets))
    adapted = get_peft_model(load(policy), config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".lora_B." in name:
                weight.copy_(0.3 * torch.randn(weight.shape))
    adapted.save_pretrained(str(directory))
    return adapted.merge_and_unload().eval()
