"""Worker configs of tiny policies and random rows, for tests of the engine and its workers."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from verl.config.schema.critic import CriticConfig
from verl.models.prefix_tree import pack_rows
from verl.models.token_scores import Targets
from verl.protocol import DataProto, object_array
from verl.records import BranchRequest, ScoreResult, SpanRequest, WrittenFiles
from verl.workers.actor import ActorWorker
from verl.workers.rows import Rows
from verl.workers.training_worker import TrainingWorker

PROMPT, RESPONSE = 12, 24  # widths of the padded rows
VOCAB = 300  # ids are drawn below it; every tiny policy has more


def policy_config(path: str | Path, **actor: Any) -> ActorRolloutRefConfig:
    """Return a float32 ``actor_rollout_ref`` section with one mini-batch and the ``actor``
    values.
    """
    config = ActorRolloutRefConfig()
    config.model.path = str(path)
    config.model.lora_alpha, config.model.target_modules = 16.0, "all-linear"
    config.actor.dtype = "float32"
    config.rollout.dtype = "float32"
    config.actor.ppo_mini_batches = 1
    config.actor.optim.lr = 1e-2
    config.actor.optim.weight_decay = 0.1
    for key, value in actor.items():
        setattr(config.actor, key, value)
    for section in (config.rollout, config.ref):  # set as the configuration does
        section.log_prob_use_dynamic_bsz = config.actor.use_dynamic_bsz
        section.log_prob_micro_batch_size_per_gpu = config.actor.ppo_micro_batch_size_per_gpu
        section.log_prob_max_token_len_per_gpu = config.actor.ppo_max_token_len_per_gpu
    config.ref.dtype = config.actor.dtype
    return config


def actor_of(path: str | Path, **actor: Any) -> ActorWorker:
    """Return the only rank of an actor group with its model; ``actor`` as in ``policy_config``."""
    worker = ActorWorker(policy_config(path, **actor), device="cpu")
    worker.init_model()
    return worker


def critic_config(path: str | Path, **values: Any) -> CriticConfig:
    """Return a float32 ``critic`` section with the values that it shares with the actor."""
    config = CriticConfig(
        dtype="float32", ppo_mini_batches=1, ppo_micro_batch_size_per_gpu=3, ppo_epochs=1
    )
    config.forward_micro_batch_size_per_gpu = 3
    config.use_dynamic_bsz = False
    config.model.path = str(path)
    config.optim.lr = 1e-2
    for key, value in values.items():
        setattr(config, key, value)
    return config


def random_rows(rows: int = 8, seed: int = 0, group: int = 4) -> DataProto:
    """Return rows of random tokens with all columns of an update.

    Prompts and responses differ in length. The columns include advantages, old log-probs, weights
    and positions of a choice. Two rows form a trajectory, and ``group`` rows a group. In each row
    some response positions are not sampled.
    """
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, PROMPT + RESPONSE), generator=g)
    attention = torch.zeros(rows, PROMPT + RESPONSE, dtype=torch.long)
    sampled = torch.zeros(rows, RESPONSE, dtype=torch.long)
    for row in range(rows):
        prompt = int(torch.randint(2, PROMPT + 1, (1,), generator=g))
        response = int(torch.randint(4, RESPONSE + 1, (1,), generator=g))
        attention[row, PROMPT - prompt : PROMPT + response] = 1
        sampled[row, :response] = (torch.rand(response, generator=g) < 0.7).long()
        sampled[row, 0] = 1
    shape = (rows, RESPONSE)
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:],
        "response_mask": sampled,
        "advantages": torch.randn(shape, generator=g) * sampled,
        "old_log_probs": (-5.7 + 0.3 * torch.randn(shape, generator=g)) * sampled,
        "ref_log_prob": (-5.7 + 0.3 * torch.randn(shape, generator=g)) * sampled,
        "row_shares": torch.rand(rows, generator=g) + 0.5,
        "choice_mask": sampled * (torch.rand(shape, generator=g) < 0.3),
        "values": torch.randn(shape, generator=g) * sampled,
        "returns": torch.randn(shape, generator=g) * sampled,
    }
    names = {
        "uid": [f"group {row // group}" for row in range(rows)],
        "traj_uid": [f"trajectory {row // 2}" for row in range(rows)],
    }
    return DataProto.from_dict(tensors, names, {"temperature": 1.0, "global_step": 1})


def share_prefixes(data: DataProto) -> DataProto:
    """Return the rows with equal tokens at the start of all rows of a group.

    They share the prompt of the first row and two to three of its response tokens.
    """
    ids, attention = data.batch["input_ids"].clone(), data.batch["attention_mask"].clone()
    groups = data.non_tensor_batch["uid"].tolist()
    for row, group in enumerate(groups):
        first, end = groups.index(group), PROMPT + 2 + row % 2
        ids[row, :end] = ids[first, :end]
        attention[row, :PROMPT] = attention[first, :PROMPT]
    columns = dict(data.batch.items()) | {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:],
    }
    return DataProto.from_dict(columns, dict(data.non_tensor_batch), data.meta_info)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the unsharded gradients of a module, by parameter."""
    gradients_by_name: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        gradients_by_name[name] = parameter.grad.full_tensor().clone()
    return gradients_by_name


def wait_for_files(worker: TrainingWorker) -> WrittenFiles:
    """Return the files that this rank wrote of the checkpoint that the worker saves."""
    deadline = time.monotonic() + 60
    while (written := worker.written_files()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return written


def add_branches(data: DataProto, seed: int = 0) -> DataProto:
    """Add ragged branches and spans to the rows.

    Three branches share a start, others have other starts, and the last row has none.
    """
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    branches, spans = [], []
    for row, length in enumerate(data.batch["attention_mask"].sum(-1).tolist()):
        starts = [] if row == len(data) - 1 else [number(1, length)] * 3 + [length, 1]
        row_branches: list[BranchRequest] = []
        for label, start in enumerate(starts):
            size = number(1, 9)
            ids = torch.randint(3, VOCAB, (size,), generator=g).tolist()
            first = number(0, size)
            row_branches.append(
                BranchRequest(start, ids, target_start=first, step=row, label=label)
            )
        branches.append(row_branches)
        spans.append([SpanRequest(length - 3, length, step=row, label=9)])
    columns = {
        **data.non_tensor_batch,
        "branches": object_array(branches),
        "spans": object_array(spans),
    }
    return DataProto.from_dict(dict(data.batch.items()), columns, data.meta_info)


def naive_sequences(rows, branches):
    """Return each row's branches as full sequences ``row[:start] + token_ids``."""
    return [
        [torch.cat([tokens[: b.start], torch.as_tensor(b.token_ids)]) for b in row_branches]
        for tokens, row_branches in zip(rows, branches, strict=True)
    ]


@torch.no_grad()
def score_branches_naively(engine, data):
    """Score each branch by a separate forward of ``row[:start] + token_ids``."""
    rows = Rows(data, engine.device)
    branches = data.non_tensor_batch["branches"]
    scores = object_array([[] for _ in range(len(rows))])
    with engine.model_on_device():
        for row, sequences in enumerate(naive_sequences(rows.tokens, branches)):
            for sequence, branch in zip(sequences, branches[row], strict=True):
                packed = pack_rows([sequence])
                first = branch.start + branch.target_start
                targets = Targets(torch.arange(first - 1, len(sequence) - 1), sequence[first:])
                inputs = (packed.input_ids, packed.position_ids, packed.layout)
                token_scores = engine.module(*inputs, [targets])[0]
                scores[row].append(_average_token_scores(branch, token_scores))
    return scores


def _average_token_scores(branch, token_scores):
    num_tokens = branch.num_targets
    log_prob, entropy, prob = (
        values.double().sum().item() / max(1, num_tokens)
        for values in (token_scores.log_probs, token_scores.entropy, token_scores.log_probs.exp())
    )
    geometric_prob = math.exp(log_prob)
    return ScoreResult(
        branch.step, branch.label, log_prob, entropy, prob, geometric_prob, num_tokens
    )


def padded_scores(path, data, temperature=1.0):
    """Return log-probs and entropies [B, R] from a plain padded forward of transformers' own
    attention.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = data.batch
    with torch.no_grad():
        out = model(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        )
    log_probs = (out.logits[:, PROMPT - 1 : -1] / temperature).log_softmax(-1)
    mask = batch["response_mask"]
    chosen = log_probs.gather(-1, batch["responses"][..., None])[..., 0]
    return chosen * mask, -(log_probs.exp() * log_probs).sum(-1) * mask
