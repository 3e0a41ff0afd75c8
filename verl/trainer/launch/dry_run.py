"""Dry run of ``--check``: reward, estimator and policy loss are called once on two dummy rows.

two trajectories of one turn ──▶ reward ──▶ estimator ──▶ policy loss
"""

from collections.abc import Iterator

import torch

from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.reward_manager import load_reward_manager
from verl.algos import find_missing_inputs, get_adv_estimator_fn
from verl.config.derive import uses_file_tasks
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import Problem
from verl.config.settings.errors import names_fix
from verl.models.token_scores import TargetLogProbs
from verl.protocol import DataProto, object_array
from verl.records import REWARD_PARTS, StepRecord
from verl.trainer.cli import PreflightResult
from verl.trainer.launch.preflight_model import find_tokenizer_directory
from verl.trainer.launch.preflight_prompts import TaskCounts, observe_first_tasks
from verl.trainer.launch.preflight_weights import summarize_error
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.limits import USER_CODE_ERRORS, describe_user_line
from verl.workers.policy_loss import PolicyLoss, compute_denominators
from verl.workers.rows import Rows

# Size of the dummy batch; lengths are in tokens.
NUM_ROWS = 2
PROMPT_LENGTH = 2
RESPONSE_LENGTH = 4
ESTIMATOR_KEY = "algorithm.adv_estimator"
LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
REWARD_FUNCTION_KEY = "custom_reward_function.path"


def perform_dry_run(cfg: PPOConfig) -> PreflightResult:
    """Return problems of reward, estimator and loss on dummy rows.

    If the policy has no tokenizer yet, also open the environment and return its numbers of tasks
    for the printed plan. Otherwise an earlier check has already opened it.
    """
    task_counts: TaskCounts = {}
    problems: list[Problem] = []
    # If there is a tokenizer, run_preflight_checks has already opened the environment.
    if find_tokenizer_directory(cfg) is None:
        problems += observe_first_tasks(cfg, task_counts)[1]
    data = make_dummy_rows()
    if uses_file_tasks(cfg) and not problems:
        problems += _find_grader_problems(cfg, data)
    problems += _find_reward_problems(cfg, data)
    if not cfg.trainer.val_only:
        problems += _find_estimator_and_loss_problems(cfg, data)
    return PreflightResult(problems, task_counts)


def make_dummy_rows() -> DataProto:
    """Return two trajectories of one task, with one turn and one row each. The first succeeds."""
    token_ids = torch.arange(NUM_ROWS * (PROMPT_LENGTH + RESPONSE_LENGTH)).view(NUM_ROWS, -1)
    response_mask = torch.ones(NUM_ROWS, RESPONSE_LENGTH, dtype=torch.long)
    attention_mask = torch.ones_like(token_ids)
    zeros = torch.zeros(NUM_ROWS, RESPONSE_LENGTH)
    success_flags = [True, False]
    tensors = {
        "input_ids": token_ids,
        "prompts": token_ids[:, :PROMPT_LENGTH],
        "responses": token_ids[:, PROMPT_LENGTH:],
        "attention_mask": attention_mask,
        "position_ids": attention_mask.cumsum(-1) - 1,
        "response_mask": response_mask,
        "step_ids": torch.zeros_like(response_mask),
        "choice_mask": torch.zeros_like(response_mask),
        **{name: zeros.clone() for name in ("rollout_log_probs", "old_log_probs", "entropys")},
        **{name: zeros.clone() for name in ("ref_log_prob", "values")},
        "reward_baselines": torch.zeros(NUM_ROWS),
    }
    columns = {
        "uid": ["task"] * NUM_ROWS,
        "traj_uid": ["first trajectory", "second trajectory"],
        "data_source": ["made_up"] * NUM_ROWS,
        "task_id": ["made-up-0"] * NUM_ROWS,
        "anchor_obs": object_array([["a state"]] * NUM_ROWS),
        "is_action_valid": object_array([[True]] * NUM_ROWS),
        "step_rewards": object_array([[float(flag)] for flag in success_flags]),
        "step_index": object_array([[0]] * NUM_ROWS),
        "episode_rewards": [float(flag) for flag in success_flags],
        "episode_lengths": [1] * NUM_ROWS,
        "won": success_flags,
        "aborted": [False] * NUM_ROWS,
        "truncated": [False] * NUM_ROWS,
        "steps": object_array([[_make_dummy_turn(flag)] for flag in success_flags]),
        # User-provided reward functions add their named reward parts to these dictionaries.
        REWARD_PARTS: object_array([{} for _ in success_flags]),
    }
    return DataProto.from_dict(tensors, columns, {"temperature": 1.0, "global_step": 1})


def _make_dummy_turn(is_success: bool) -> StepRecord:
    return StepRecord(
        step=0,
        observation="a made-up observation",
        response="<think>made up</think><action>look</action>",
        action="look",
        is_action_valid=True,
        reward=float(is_success),
        done=True,
        num_tokens=RESPONSE_LENGTH,
        stop_reason="stop",
        span=(PROMPT_LENGTH, PROMPT_LENGTH + RESPONSE_LENGTH),
    )


def _find_grader_problems(cfg: PPOConfig, data: DataProto) -> Iterator[Problem]:
    """Yield a problem if grading a made-up answer fails, else add its reward parts to ``data``."""
    env_settings = read_env_settings(cfg.env)
    package = get_package(cfg.env.env_name)
    first_task = package.tasks(env_settings, "val" if cfg.trainer.val_only else "train")[0]
    env = package.make(env_settings)
    env.reset(first_task, 0)
    try:
        _, _, _, info = env.step("a made-up answer")
        data.non_tensor_batch[REWARD_PARTS] = object_array([info.get(REWARD_PARTS, {})] * NUM_ROWS)
    except USER_CODE_ERRORS as error:  # may be user-provided code
        reward_function_path = cfg.custom_reward_function.path
        key = REWARD_FUNCTION_KEY if reward_function_path else f"env.{cfg.env.name}.train_files"
        why = f"a trial call on row {first_task['task_id']} failed: {_describe_call_error(error)}"
        allowed = "a finite number for every answer"
        yield build_problem(cfg, key, why, allowed, "correct the function", "failed_call")
    finally:
        env.close()


def _find_reward_problems(cfg: PPOConfig, data: DataProto) -> Iterator[Problem]:
    """Yield a problem if the reward function fails on ``data``, and add the rewards to ``data``."""
    scores = torch.zeros(NUM_ROWS, RESPONSE_LENGTH)
    try:
        scores = load_reward_manager(cfg)(data)
    except USER_CODE_ERRORS as error:  # user-provided code
        reward_function_path = cfg.custom_reward_function.path
        key = REWARD_FUNCTION_KEY if reward_function_path else "reward_model.reward_manager"
        why = f"a trial call on made-up rows failed: {_describe_call_error(error)}"
        allowed = "a finite number for every trajectory"
        yield build_problem(cfg, key, why, allowed, "correct the function", "failed_call")
    data.batch["token_level_scores"] = scores
    data.batch["token_level_rewards"] = scores


def _find_estimator_and_loss_problems(cfg: PPOConfig, data: DataProto) -> Iterator[Problem]:
    estimator = get_adv_estimator_fn(cfg.algorithm.adv_estimator)
    # The estimator may need columns that only a training method such as RLVCR adds. They have one
    # number per token, here 0.
    for column in find_missing_inputs(estimator, {*data.batch.keys(), *data.non_tensor_batch}):
        data.batch[column] = torch.zeros(NUM_ROWS, RESPONSE_LENGTH)
    try:
        advantages = compute_advantage(data, cfg).batch["advantages"]
    except USER_CODE_ERRORS as error:  # may be user-provided code
        yield _describe_failure(cfg, ESTIMATOR_KEY, error, "an estimator of [B, R] rewards")
        return
    if advantages.shape != (NUM_ROWS, RESPONSE_LENGTH) or not advantages.isfinite().all():
        why = f"on made-up rows its advantages are {advantages.tolist()}"
        fix = "correct the estimator"
        yield build_problem(cfg, ESTIMATOR_KEY, why, "finite numbers [B, R]", fix, "failed_call")
        return
    try:
        loss = _compute_loss(cfg, data)
    except USER_CODE_ERRORS as error:  # may be user-provided code
        yield _describe_failure(cfg, LOSS_KEY, error, "a loss that is a number")
        return
    if not loss.isfinite():
        why = f"on made-up rows it is {loss.item()}"
        fix = "correct the loss or its settings"
        yield build_problem(cfg, LOSS_KEY, why, "a finite number", fix, "failed_call")


def _compute_loss(cfg: PPOConfig, data: DataProto) -> torch.Tensor:
    """Return the policy loss of ``data`` if all log-probs of the updated policy are -0.1."""
    actor_config = cfg.actor_rollout_ref.actor
    row_indices = list(range(NUM_ROWS))
    denominators = compute_denominators(data, row_indices, actor_config.loss_agg_mode)
    log_probs = torch.full((NUM_ROWS * RESPONSE_LENGTH,), -0.1, requires_grad=True)
    target_log_probs = TargetLogProbs(log_probs, torch.zeros(NUM_ROWS * RESPONSE_LENGTH))
    loss, _ = PolicyLoss(actor_config)(
        target_log_probs, Rows(data), data, row_indices, denominators
    )
    loss.backward()
    return loss.detach()


def _describe_call_error(error: BaseException) -> str:
    text = summarize_error(error)
    return text if names_fix(text) else f"{text}{describe_user_line(error)}"


def _describe_failure(cfg: PPOConfig, key: str, error: BaseException, allowed: str) -> Problem:
    why = f"a trial call on made-up rows failed: {_describe_call_error(error)}"
    fix = "correct its code, or set another name"
    return build_problem(cfg, key, why, allowed, fix, "failed_call")
