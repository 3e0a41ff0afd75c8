"""Run directory of a training run of a given length, with invented numbers in real formats."""

import math
import random
from pathlib import Path

from verl.record.run_dir import RunDirectory
from verl.utils import jsonl

CONFIG = {
    "actor_rollout_ref": {
        "model": {"path": "data/quickstart/policy"},
        "actor": {
            "optim": {"lr": 4e-4},
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "ppo_mini_batches": 4,
        },
        "rollout": {"name": "vllm", "temperature": 1.0},
    },
    "algorithm": {
        "adv_estimator": "rlvcr",
        "rlvcr": {"score": "logprob", "combine": "gated", "step_advantage_w": 0.3},
    },
    "data": {"train_batch_size": 16},
    "env": {"env_name": "alfworld", "max_steps": 15, "rollout": {"n": 8}, "val_tasks": 128},
    "trainer": {
        "project_name": "rlvcr",
        "experiment_name": "quickstart",
        "total_training_steps": 30,
        "seed": 0,
    },
}
THOUGHTS = {
    1: "",
    2: "the mug may be in a cabinet",
    3: "i looked on countertop 1 and found no mug there",
    4: "first find a mug in the cabinets then carry it to desk 1 and put it down",
}
PROMPT = "Interact with a household to solve a task.\nYour task is to: put a mug in desk."
PLACES = ("countertop 1", "cabinet 2", "shelf 1", "drawer 3", "desk 1")


def metrics_at(step: int, total: int, draw: random.Random) -> dict:
    """Return invented metrics of one training step of a run that learns."""
    progress = 1 / (1 + math.exp(-8 * (step / total - 0.45)))
    shares = [
        0.25 + 0.30 * progress,
        0.25 + 0.1 * progress,
        0.25 - 0.15 * progress,
        0.25 - 0.25 * progress * 0.8,
    ]
    shares = [share + draw.uniform(-0.02, 0.02) for share in shares]
    shares = [share / sum(shares) for share in shares]
    gen, score, update = draw.uniform(5.2, 6.4), draw.uniform(0.8, 1.1), draw.uniform(2.5, 3.1)
    return {
        "training/global_step": step,
        "episode/success_rate": 0.38 + 0.3 * progress + draw.gauss(0, 0.035),
        "episode/reward": 0.38 + 0.3 * progress,
        "episode/length": 11.5 - 3 * progress + draw.gauss(0, 0.2),
        "rollout/tokens_per_episode": 330 - 120 * progress + draw.gauss(0, 6),
        "rollout/aborted": 0,
        "response_length/mean": 900 - 250 * progress,
        **{f"rlvcr/level_share_{k}": share for k, share in enumerate(shares, start=1)},
        **{
            f"rlvcr/level_success_{k}": 0.38 + 0.3 * progress + 0.02 * k + draw.gauss(0, 0.03)
            for k in (1, 2, 3, 4)
        },
        "rlvcr/thought_tokens_mean": 9.2 - 4.5 * progress,
        "rlvcr/score_logprob": -0.9 + 0.4 * progress + draw.gauss(0, 0.02),
        "rlvcr/score_entropy": 0.8 - 0.35 * progress + draw.gauss(0, 0.02),
        "rlvcr/advantage_abs_mean": 0.2 - 0.1 * progress,
        "rlvcr/parse_fail_no_action": max(0.0, 0.03 - 0.02 * progress),
        "actor/pg_loss": draw.gauss(-0.01, 0.008),
        "actor/entropy": 0.62 - 0.25 * progress + draw.gauss(0, 0.01),
        "actor/grad_norm": 0.6 + abs(draw.gauss(0, 0.12)),
        "actor/ppo_kl": abs(draw.gauss(0.004, 0.002)),
        "actor/pg_clipfrac": abs(draw.gauss(0.02, 0.006)),
        "actor/lr": 4e-4 * min(1.0, step / 3),
        "training/rollout_probs_diff_mean": 2e-7 * math.exp(draw.gauss(0, 0.3)),
        "training/rollout_probs_diff_max": 4e-6 * math.exp(draw.gauss(0, 0.6)),
        "timing_s/gen": gen,
        "timing_s/gen_engine": 0.5 * gen,
        "timing_s/gen_env": 0.2 * gen,
        "timing_s/alternatives": 0.3 * gen,
        "timing_s/old_log_prob": score,
        "timing_s/adv": 0.05,
        "timing_s/update_actor": update,
        "timing_s/update_weights": 0.12,
        "timing_s/step": gen + score + update + 0.3,
        "perf/throughput": 5200 + draw.gauss(0, 100),
        "perf/max_memory_allocated_gb": 3.1,
    }


def step_record(step: int, draw: random.Random, last: bool, won: bool) -> dict:
    """Return one invented turn with its four thoughts."""
    level = draw.choice((1, 2, 3, 4))
    place = PLACES[step % len(PLACES)]
    action = "put mug 1 in/on desk 1" if last and won else f"go to {place}"
    thought = THOUGHTS[level]
    response = f"<level>{level}</level><think>{thought}</think><action>{action}</action>"
    contexts = []
    for k in (1, 2, 3, 4):
        logprob = -0.2 - 0.8 * draw.random()
        contexts.append(
            {
                "level": k,
                "thought": THOUGHTS[k],
                "tokens": len(THOUGHTS[k].split()),
                "cost": 0.3 * len(THOUGHTS[k].split()) / 20,
                "original": k == level,
                "score_logprob": logprob,
                "score_entropy": 0.3 + 0.5 * draw.random(),
                "score_mean_prob": math.exp(0.9 * logprob),
                "score_geometric_prob": math.exp(logprob),
            }
        )
    base, think = (0.9 if won else -0.7), draw.uniform(-0.5, 0.5)
    pieces = response.replace("<", "\x00<").replace(">", ">\x00").split("\x00")
    tokens = [word for piece in pieces for word in _words(piece)]
    split = next(i for i, word in enumerate(tokens) if word == "<action>")
    credit = [
        [word, round(base + (0.3 * think if i < split else 0.0), 5)]
        for i, word in enumerate(tokens)
    ]
    return {
        "step": step,
        "observation": f"You arrive at {place}. On the {place}, you see a keychain 2, and a pen 1."
        if step % 4
        else "Nothing happens.",
        "response": response,
        "action": action,
        "is_action_valid": step % 4 != 0,
        "reward": 1.0 if last and won else 0.0,
        "done": last,
        "num_tokens": len(tokens),
        "stop_reason": "stop",
        "level": level,
        "parse_failure": None,
        "thought_tokens": len(thought.split()),
        "contexts": contexts,
        "think_advantage": think,
        "think_cost": 0.0,
        "advantage": base,
        "token_credit": credit,
    }


def _words(piece: str) -> list[str]:
    if piece.startswith("<"):
        return [piece]
    return [(" " if i else "") + word for i, word in enumerate(piece.split(" ")) if word]


def trajectories(
    step: int, groups: int, members: int, rate: float, draw: random.Random, credit: bool = True
):
    """Return invented rollout lines of one training step."""
    for group in range(groups):
        for member in range(members):
            won = draw.random() < rate
            length = draw.randint(3, 9)
            steps = [step_record(k, draw, k == length - 1, won) for k in range(length)]
            if not credit:
                steps = [
                    {k: v for k, v in s.items() if k not in ("advantage", "token_credit")}
                    for s in steps
                ]
            yield {
                "uid": f"train-{step}-0-{group}",
                "traj_uid": f"train-{step}-0-{group}-{member}",
                "task_id": f"alfworld/pick_and_place_simple/{group:04d}",
                "data_source": "pick_and_place_simple",
                "won": won,
                "return": float(won),
                "length": length,
                "aborted": False,
                "prompt": PROMPT,
                "steps": steps,
            }


def token_numbers(row: dict, draw: random.Random) -> dict:
    """Return token numbers of an invented row; the first token of each turn was not sampled."""
    steps = []
    for step in row["steps"]:
        tokens = [text for text, _ in step["token_credit"]]
        steps.append(
            {
                "step": step["step"],
                "tokens": ["<|assistant|>", *tokens],
                "mask": [0] + [1] * len(tokens),
                "entropy": [0.0] + [round(draw.expovariate(2.0), 3) for _ in tokens],
                "gap": [None] + [float(f"{draw.gauss(0, 1e-6):.2g}") for _ in tokens],
                "state": f"at {PLACES[step['step'] % len(PLACES)]}",
            }
        )
    return {"traj_uid": row["traj_uid"], "steps": steps}


def fake_run(
    path: Path,
    steps: int = 30,
    validate_every: int = 5,
    rollouts: bool = True,
    seed: int = 0,
    estimator: str = "rlvcr",
) -> Path:
    """Write the run directory to ``path`` and return it."""
    draw = random.Random(seed)
    trainer = {**CONFIG["trainer"], "seed": seed, "experiment_name": path.name}
    config = CONFIG | {
        "algorithm": CONFIG["algorithm"] | {"adv_estimator": estimator},
        "trainer": trainer,
    }
    with RunDirectory(path).open(config, seeds={"trainer": seed, "env": 0}) as run:
        for step in range(steps + 1):
            record = {"step": step, "time": 1.7e9 + 12 * step}
            if step:
                record.update(metrics_at(step, steps, draw))
            if step % validate_every == 0:
                rate = 0.4 + 0.27 * step / steps + draw.gauss(0, 0.01)
                rows = list(trajectories(step, 128, 1, rate, draw, credit=False))
                run.write_rollouts(step, rows, validation=True)
                record["val/success_rate"] = sum(row["won"] for row in rows) / len(rows)
                record["val/tokens_per_episode"] = 340 - 130 * step / steps
            jsonl.append(run.metrics_path, record)
            if rollouts and step in (1, steps):
                rows = list(trajectories(step, 4, 8, 0.4 + 0.25 * step / steps, draw))
                run.write_tokens(step, [token_numbers(row, draw) for row in rows])
                run.write_rollouts(step, rows)
    return path
