"""Tests of the benchmarks: token counts by hand, equal results of both methods, a readable
table.
"""

import argparse
import asyncio
from dataclasses import replace

import pytest
import torch

from agent_system.multi_turn_rollout.packing import collate_rows
from scripts.dev.bench import collector, exactness, overlap, rlvcr_step, scoring
from scripts.dev.bench.workload import Workload
from tests.helpers.number_line_world import walking_policy
from tests.helpers.refusals import mentions
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.utils import jsonl


@pytest.fixture(scope="module")
def args():
    options = {
        "rows": 2,
        "thought": 6,
        "action": 3,
        "observation": 8,
        "max_tokens": 400,
        "repeats": 1,
    }
    return argparse.Namespace(**options, model=None, contexts=[150], device="cpu", dtype="float32")


def test_scoring_counts_tokens_and_compares_equal_numbers(args):
    engine = scoring.make_engine(args)
    data, costs, difference = scoring.measure_passes(engine, 150, args)
    assert 0 < difference < 1e-5
    rows = data.batch["attention_mask"].sum(-1).tolist()
    branches, spans = (data.non_tensor_batch[key] for key in ("branches", "spans"))
    assert all(length >= 150 for length in rows) and all(
        len(b) == 3 * len(s) for b, s in zip(branches, spans, strict=True)
    )
    all_branches = [branch for row in branches for branch in row]
    assert costs["old"].tokens == sum(rows)
    assert costs["shared"].tokens == sum(rows) + sum(len(b.token_ids) for b in all_branches)
    contexts = sum(b.start + len(b.token_ids) for b in all_branches) + sum(
        s.end for row in spans for s in row
    )
    assert costs["naive"].tokens == sum(rows) + contexts
    assert all(0 < cost.wall_s < float("inf") for cost in costs.values())
    for row, (row_spans, row_branches) in enumerate(zip(spans, branches, strict=True)):
        tokens = data.batch["input_ids"][row].tolist()
        actions = {span.step: tokens[span.start : span.end] for span in row_spans}
        assert all(b.token_ids[b.target_start :] == actions[b.step] for b in row_branches)


def test_scoring_prints_a_table(capsys):
    threads = torch.get_num_threads()
    scoring.main(
        [
            "--contexts",
            "100",
            "140",
            "--rows",
            "1",
            "--repeats",
            "1",
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
    )
    torch.set_num_threads(threads)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| 100 |") and lines[3].startswith("| 140 |")


def make_metrics(step, gen, score, update, old=0.0):
    timing = {
        "step": gen + score + update + old + 1,
        "gen": gen + score,
        "gen_engine": gen,
        "update_actor": update,
    }
    timing |= {"scoring": score} if score else {"old_log_prob": old}
    return {"step": step, **{f"timing_s/{name}": value for name, value in timing.items()}}


def test_step_table_compares_parts_and_the_whole():
    measured = {
        "rlvcr": [
            make_metrics(2, 6.0, 2.0, 3.0),
            make_metrics(3, 8.0, 2.0, 3.0),
            make_metrics(4, 7.0, 2.0, 3.0),
        ],
        "grpo": [make_metrics(2, 5.0, 0.0, 3.0, old=1.0)] * 3,
    }
    lines = rlvcr_step.format_table(measured).splitlines()
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:5]]
        for cells in (line.split("|") for line in lines)
    }
    assert rows["generation"] == ["7.00", "5.00", "1.40"]
    assert rows["scoring and old log-probs"] == ["2.00", "1.00", "2.00"]
    assert rows["environments"] == ["0.00", "0.00", ""]
    assert rows["the rest"] == ["1.00", "1.00", "1.00"]
    assert rows["**whole step**"] == ["13.00", "10.00", "1.30"]


def test_step_benchmark_runs_both_estimators_with_equal_overrides(monkeypatch, tmp_path, capsys):
    commands = []

    class FinishedRun:
        returncode = 0

    def run(command, **_options):
        commands.append(command)
        (directory,) = [
            word.partition("=")[2]
            for word in command
            if word.startswith("trainer.default_local_dir=")
        ]
        directory = type(tmp_path)(directory)
        (directory / "rollouts").mkdir()
        jsonl.write(
            directory / "metrics.jsonl", [make_metrics(step, 5.0, 1.0, 2.0) for step in (1, 2)]
        )
        for step in (1, 2):
            turns = [
                {"step": 0, "response": "left"},
                {"step": 1, "response": f"{step + len(commands) % 2}"},
            ]
            jsonl.write(
                directory / "rollouts" / f"{step}.jsonl", [{"traj_uid": "t", "steps": turns}]
            )
        return FinishedRun()

    monkeypatch.setattr(rlvcr_step.subprocess, "run", run)
    keep = ["--keep", str(tmp_path / "runs"), "--steps", "2", "--rounds", "2"]
    rlvcr_step.main([*keep, "--config-name", "smoke", "algorithm.rlvcr.score=prob"])
    estimators = [
        word.partition("=")[2]
        for command in commands
        for word in command
        if "adv_estimator" in word
    ]
    assert estimators == ["rlvcr", "grpo", "grpo", "rlvcr"]
    ignored = ("algorithm.adv_estimator=", "trainer.default_local_dir=")
    assert (
        len(
            {
                tuple(word for word in command if not word.startswith(ignored))
                for command in commands
            }
        )
        == 1
    )
    assert (
        "actor_rollout_ref.actor.optim.lr=0" in commands[0]
        and commands[0][-1] == "algorithm.rlvcr.score=prob"
    )
    out = capsys.readouterr().out
    assert "2 of 4 " in out and "**whole step**" in out


def test_step_benchmark_overrides_are_a_valid_config(tmp_path):
    from verl.config.load import load_config
    from verl.config.validate import find_problems

    args = argparse.Namespace(config_name="quickstart", steps=4, overrides=["env.rollout.n=4"])
    for estimator in rlvcr_step.ESTIMATORS:
        name, *overrides = rlvcr_step.build_arguments(estimator, tmp_path / estimator, args)[1:]
        cfg = load_config(name, overrides)
        assert find_problems(cfg, check_files=False) == []
        assert (
            cfg.actor_rollout_ref.actor.optim.lr == 0 and cfg.algorithm.adv_estimator == estimator
        )
        assert cfg.env.levels and cfg.env.rollout.n == 4


def test_step_benchmark_shows_why_a_run_failed(monkeypatch, tmp_path):
    class Failed:
        returncode = 2

    def run(_command, stdout, **_options):
        stdout.write(b"no such policy")
        return Failed()

    monkeypatch.setattr(rlvcr_step.subprocess, "run", run)
    with pytest.raises(SystemExit, check=mentions("rlvcr", 2, "no such policy")):
        rlvcr_step.main(["--keep", str(tmp_path), "--steps", "2"])
    with pytest.raises(SystemExit):
        rlvcr_step.main(["--steps", "1"])


def make_workload(tmp_path, *overrides):
    """Return a workload with a tiny random policy on the number line, without vLLM."""
    path = make_tiny_policy(tmp_path / "policy", std=0.2)
    sizes = [
        "data.max_prompt_length=512",
        "data.max_response_length=256",
        "env.max_steps=4",
        "env.max_turn_tokens=12",
    ]
    return Workload(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={path}",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.dtype=float32",
            "env.env_name=number_line",
            "env.rollout.n=2",
            *sizes,
            *overrides,
        ],
        tasks=3,
    )


def test_exactness_finds_every_change_of_correct_rows(tmp_path):
    workload = make_workload(tmp_path, "env.history=append", "env.max_turn_tokens=40")
    workload.settings = replace(
        workload.settings, stop=tuple("aeiou")
    )  # a random policy samples one of these after a few tokens
    rows, witness = asyncio.run(exactness.collect_rows(workload))
    data = collate_rows(rows, workload.tokenizer.pad_token_id)
    counts = exactness.check_tokens(rows, data, witness, workload)
    faults = ("other tokens", "other log-probs", "loss elsewhere", "separators lost")
    assert counts["turns"] > len(rows) and counts["gaps"] == counts["turns"] - len(rows)
    assert [counts[name] for name in faults] == [0, 0, 0, 0]
    assert counts["tokens"] == data.batch["response_mask"].sum()
    assert exactness.check_logprobs(data, str(workload.path), "float32")[1] < 1e-3
    b = next(b for b, row in enumerate(rows) if len(row.turns) > 1)
    position = (
        data.batch["attention_mask"][b].argmax() + rows[b].turns[0].end
    )  # the token after the first turn
    column = position - data.batch["prompts"].shape[1]
    data.batch["response_mask"][b, column] = 1
    data.batch["input_ids"][b, position] += 1
    data.batch["rollout_log_probs"][b, column - 1] -= 1
    counts = exactness.check_tokens(rows, data, witness, workload)
    assert [counts[name] for name in faults] == [len(rows[b].turns) - 1, 1, 1, 1]


def test_lock_step_is_equal_and_submits_all_turns_at_once(tmp_path):
    overrides = ["env.num_workers=1", "env.envs_per_worker=4"]
    workload = make_workload(tmp_path, *overrides)
    comparison = asyncio.run(collector.measure_collectors(workload, slots=4, rounds=1))
    assert comparison["same"] == len(comparison["trajectories"]) == 6
    assert all(len(seconds) == 1 for seconds in comparison["seconds"].values())

    workload, tokenizer = make_workload(tmp_path, *overrides), make_tiny_tokenizer()
    engine = ScriptedEngine(tokenizer, walking_policy(levels=True))
    lock_step = collector.LockStepCollector(workload.cfg.env, tokenizer, [engine], slots=4)
    settings = replace(
        workload.settings, max_turn_tokens=64, max_response_length=1024, max_prompt_length=1024
    )

    async def collect_trajectories():
        collected = await lock_step.collect(workload.rollout_specs, settings)
        await lock_step.close()
        return collected.trajectories

    lengths = [len(trajectory.turns) for trajectory in asyncio.run(collect_trajectories())]
    rounds = [
        [sum(n > turn for n in batch) for turn in range(max(batch))]
        for batch in (lengths[:4], lengths[4:])
    ]
    assert engine.submits == rounds[0] + rounds[1], (
        "each request holds the turns of all running trajectories"
    )


def test_overlap_table_compares_the_waiting_times():
    def step(gen: float, wait: float, whole: float, stale: float) -> dict:
        times = {"gen": gen, "wait_for_plays": wait, "update_actor": 2.0, "step": whole}
        timing = {f"timing_s/{name}": value for name, value in times.items()}
        return timing | {"training/staleness": stale}

    measured = {"off": [step(4.0, 0.0, 6.5, 0.0)] * 3, "one_step": [step(0.5, 1.5, 5.0, 1.0)] * 3}
    rows = [
        [cell.strip() for cell in line.split("|")[1:5]]
        for line in overlap.format_table(measured).splitlines()
    ]
    assert ["waiting for the rollout", "4.00", "2.00", "2.00"] in rows
    assert ["update", "2.00", "2.00", "1.00"] in rows
    assert ["**whole step**", "6.50", "5.00", "1.30"] in rows
    assert ["updates since the rollout", "0.00", "1.00", ""] in rows


def test_overlap_benchmark_runs_both_modes_without_warm_up_steps(monkeypatch, capsys):
    argument_lists: list[list[str]] = []

    def run(name: str, directory: object, arguments: list[str]) -> list[dict]:
        assert f"trainer.default_local_dir={directory}" in arguments
        argument_lists.append(arguments)
        times = [9.0, 9.0, 2.0 if name == "off" else 1.0]
        return [{"timing_s/step": seconds, "training/staleness": 0.0} for seconds in times]

    monkeypatch.setattr(rlvcr_step, "run_main_ppo", run)
    overlap.main(["--steps", "3", "env.rollout.carry_over=2"])
    modes = [
        [word for word in arguments if word.startswith("trainer.rollout_overlap")]
        for arguments in argument_lists
    ]
    assert modes == [["trainer.rollout_overlap=off"], ["trainer.rollout_overlap=one_step"]]
    assert ["env.rollout.carry_over=2" in arguments for arguments in argument_lists] == [
        False,
        True,
    ]
    assert "| **whole step** | 2.00 | 1.00 | 2.00 |" in capsys.readouterr().out
    from verl.config.load import load_config

    for mode in overlap.MODES:
        name, *words = argument_lists[overlap.MODES.index(mode)][1:]
        assert load_config(name, words).trainer.rollout_overlap == mode
    with pytest.raises(SystemExit):
        overlap.main(["--steps", "2"])
