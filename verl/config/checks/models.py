"""Checks of models (by their files), supervised training, reward model and estimator."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from verl.config import adapter_files
from verl.config.adapter_files import ADAPTERS_KEY, SYNC_KEY
from verl.config.checkpoint_paths import suggest_export
from verl.config.cold_start import build_cold_start_config
from verl.config.compose import POLICIES_DIR
from verl.config.derive import find_key_replacing_turn_rewards, find_post_rollout_reward_key
from verl.config.memory import has_reference
from verl.config.problems import CheckContext, Problems, build_conflict, build_problem
from verl.config.registered_names import (
    estimator_uses_greedy_baseline,
    estimator_uses_turn_rewards,
)
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, Problem, value_at_path
from verl.config.settings.hints import nearest_name
from verl.names import BASE_MODEL, ESTIMATORS, POLICY_MODEL, AdvantageEstimator

POLICY_PATH_KEY = "actor_rollout_ref.model.path"
COLD_START_FIX = "train one there with a cold start: cold_start.enable=true"
ALLOWED_MODELS = "a directory in Hugging Face format, or a hub name"
CHECKSUMS_FILE = "SHA256SUMS"  # file of a policy shipped with the package, for `sha256sum --check`


def is_local(path: str) -> bool:
    """Return True if ``path`` can only be local: it is no hub name (owner/name@revision)."""
    return not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", path) or path.startswith((".", "/"))


def check_directory(
    cfg: PPOConfig | SFTConfig, key: str, ctx: CheckContext, is_created_by_cold_start: bool = False
) -> Problems:
    """Check that ``key`` names a valid model directory or a possible hub name.

    With ``is_created_by_cold_start`` the directory may be missing: a supervised run creates it.
    """
    path = value_at_path(cfg, key)
    if path is None or not ctx.check_files:
        return
    directory = Path(path)
    try:
        altered_file = _find_checksum_mismatch(directory)
    except OSError as error:  # for example a name that is too long
        fix = "correct the path"
        yield build_problem(cfg, key, str(error.strerror), ALLOWED_MODELS, fix, "invalid_syntax")
        return
    if altered_file:
        why = (
            f"{altered_file} is missing or altered: its SHA-256 is not the one in {CHECKSUMS_FILE}"
        )
        fix = "restore the file: install the package again, or `git checkout` it"
        if key == POLICY_PATH_KEY:
            fix += f"; or train a new policy: {key}=data/models/NEW cold_start.enable=true"
        allowed = f"the files that {CHECKSUMS_FILE} names"
        yield build_problem(cfg, key, why, allowed, fix, "altered_file")
    elif directory.is_dir():
        fix = "name the directory that holds the model"
        if key == POLICY_PATH_KEY and (directory / adapter_files.CONFIG_FILE).is_file():
            fix = f"{key}=BASE_MODEL {adapter_files.START_KEY}={directory}"
        fix = suggest_export(directory, key, fix)
        if is_created_by_cold_start:
            fix = "remove it, so that the cold start trains a policy there"
        for why in _find_missing_model_file(directory):
            yield build_problem(cfg, key, why, ALLOWED_MODELS, fix, "no_model")
    elif is_created_by_cold_start and not is_local(path):
        # Later jobs in this working directory would load it instead of the model on the hub.
        why = "a cold start would write a small policy under the name of a hub model"
        allowed = "a directory that starts with . or /"
        fix = f"cold_start.enable=false to train the hub's model, or {key}=./{path}"
        yield build_conflict(cfg, key, why, allowed, fix)
    elif is_local(path) and not is_created_by_cold_start:
        fix = suggest_fix_for_missing_model(cfg, key)
        yield build_problem(cfg, key, "no such directory", ALLOWED_MODELS, fix, "missing_file")


def suggest_fix_for_missing_model(cfg: PPOConfig | SFTConfig, key: str) -> str:
    """Return the fix for a model that is neither on this machine nor provided by the hub."""
    path = str(value_at_path(cfg, key))
    if is_local(path):
        fixes = [_suggest_similar_directory(Path(path)) or "correct the path"]
        # Suggest a cold start only if the config names one.
        if key == POLICY_PATH_KEY and isinstance(cfg, PPOConfig) and cfg.cold_start.config_name:
            fixes.append(COLD_START_FIX)
        return "; or ".join(fixes)
    # Imported here, because the import is slow and a valid config does not need it.
    from huggingface_hub.constants import is_offline_mode

    directory_hint = f"for a directory, write ./{path}"
    if is_offline_mode():
        name, _, revision = path.partition("@")
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        fix = f"HF_HUB_OFFLINE=0, or `{command}` on a machine with access to the hub"
        return f"{fix}; {directory_hint}"
    return f"correct the name, or set HF_TOKEN of an account with access; {directory_hint}"


def _find_missing_model_file(directory: Path) -> Iterator[str]:
    if not any(directory.iterdir()):
        yield "the directory is empty"
    elif not (directory / "config.json").is_file():
        yield "there is no config.json in it, so it is not a model"
    elif not any(any(directory.glob(name)) for name in ("*.safetensors", "pytorch_model*.bin")):
        yield "there are no weights in it (*.safetensors)"


def _find_checksum_mismatch(directory: Path) -> str:
    """Return the first file that differs from the checksums stored in ``directory``, or "".

    A missing file counts as different. Only policies shipped with the package must have checksums.
    """
    checksums_file = directory / CHECKSUMS_FILE
    if not checksums_file.is_file():
        return CHECKSUMS_FILE if directory.parent == POLICIES_DIR else ""
    for line in checksums_file.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not (directory / name).is_file():
            return name
        with (directory / name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                return name
    return ""


def _suggest_similar_directory(directory: Path) -> str:
    if not directory.parent.is_dir():
        return ""
    sibling_names = [entry.name for entry in directory.parent.iterdir() if entry.is_dir()]
    similar_name = nearest_name(directory.name, sibling_names)
    return f"did you mean {str(directory.parent / similar_name)!r}?" if similar_name else ""


def check_model(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check that the policy exists, or that a cold start will create it."""
    key = "actor_rollout_ref.model.path"
    path = cfg.actor_rollout_ref.model.path
    if path is None:
        fix = f"{key}=DIR, or {key}=OWNER/NAME of the hub"
        allowed = "a directory or a hub name"
        yield build_problem(cfg, key, "no policy is named", allowed, fix, "missing_key")
    yield from check_directory(cfg, key, ctx, cfg.cold_start.enable)
    if cfg.critic.enable and cfg.critic.model.path != path:
        yield from check_directory(cfg, "critic.model.path", ctx)
    # Otherwise mistakes would be reported only after the environment has created the tasks.
    if cfg.cold_start.enable and path is not None:
        yield from _check_cold_start(cfg, ctx)


def check_lora(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Check LoRA keys without the model: adapter names, weight sync, dtype of the reference."""
    policy_config = cfg.actor_rollout_ref
    adapters, lora_sync = policy_config.model.adapters, policy_config.rollout.lora_sync
    if not policy_config.model.lora_rank and (adapters or lora_sync == "adapter"):
        why, fix = "without LoRA all weights are trained", "actor_rollout_ref.model.lora_rank=16"
        key, allowed = (ADAPTERS_KEY, "{}") if adapters else (SYNC_KEY, "auto")
        yield build_conflict(cfg, key, why, allowed, fix)
    for name in adapters:
        if not re.fullmatch(r"[\w-]+", name) or name in (POLICY_MODEL, BASE_MODEL):
            allowed = f"letters, digits, _ and -, but not {POLICY_MODEL} and {BASE_MODEL}"
            why = f"{name!r} cannot name an adapter"
            yield build_problem(cfg, ADAPTERS_KEY, why, allowed, "rename it", "invalid_syntax")
    if adapters and lora_sync == "merged":
        why = "an engine with merged weights has no base weights, which other adapters need"
        yield build_conflict(cfg, SYNC_KEY, why, "auto or adapter", f"{SYNC_KEY}=auto")
    actor_computes_reference = policy_config.model.lora_rank and has_reference(cfg)
    if actor_computes_reference and policy_config.ref.dtype != policy_config.actor.dtype:
        key = "actor_rollout_ref.ref.dtype"
        why = "with LoRA the actor computes the reference, without its adapter"
        yield build_conflict(cfg, key, why, policy_config.actor.dtype, "do not set it")


def check_reward_model(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check the keys of the reward model.

    If it is enabled, it needs a path, and the estimator must read its scores. If it is disabled,
    its keys must not be set.
    """
    section = cfg.reward_model
    key = "reward_model.model.path"
    if not section.enable:
        for name, value in (("model.path", None), ("weight", 1.0), ("rule_weight", 1.0)):
            if value_at_path(section, name) != value:
                why = "no reward model is enabled"
                fix = f"reward_model.enable=true, or do not set reward_model.{name}"
                yield build_problem(cfg, f"reward_model.{name}", why, f"{value}", fix, "no_effect")
        return
    if section.model.path is None:
        why = "no reward model is named"
        yield build_problem(cfg, key, why, "a directory or a hub name", f"{key}=DIR", "missing_key")
    yield from check_directory(cfg, key, ctx)
    key, fix = "algorithm.adv_estimator", "algorithm.adv_estimator=rloo"
    if estimator_uses_greedy_baseline(cfg, ctx):
        why = "the reward model does not score greedy trajectories, which are the baseline"
        yield build_conflict(cfg, key, why, "another estimator", fix)
    if cfg.algorithm.adv_estimator == "gdpo":
        why = "gdpo reads only the rewards of gdpo_reward_keys, not the reward model's"
        fix = f"{fix}, or reward_model.enable=false"
        allowed = "another estimator with a reward model"
        yield build_conflict(cfg, key, why, allowed, fix)


def _check_cold_start(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    try:
        sft_config = build_cold_start_config(cfg)
    except ConfigError as error:
        yield from map(_prefix_with_cold_start, error.problems)
    else:
        yield from map(_prefix_with_cold_start, check_sft(sft_config, ctx))


def _prefix_with_cold_start(problem: Problem) -> Problem:
    return Problem(f"cold start: {problem}", problem.code)


def check_estimator(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Check that the estimator has the group size and the critic that it needs."""
    name = cfg.algorithm.adv_estimator
    n = cfg.env.rollout.n
    if name == "gae" and not cfg.critic.enable:
        key, fix = "critic.enable", "do not set critic.enable"
        yield build_conflict(cfg, key, "gae needs values", "true or null", fix)
    # In a group of one trajectory every advantage would be 0, without an error.
    if ESTIMATORS.get(name) and n < 2:
        fix = "env.rollout.n=8, or an estimator without groups: gae, reinforce_plus_plus"
        if name not in {*AdvantageEstimator}:
            fix = "env.rollout.n=8, or register_adv_est(..., compares_group=False)"
        why = f"{name} compares the trajectories of one task"
        yield build_conflict(cfg, "env.rollout.n", why, "2 or more", fix)
    reward_key = find_post_rollout_reward_key(cfg)
    if cfg.algorithm.filter_groups.enable and reward_key:
        why = f"groups are filtered by rewards of environments, before {reward_key} scores them"
        filter_key = "algorithm.filter_groups.enable"
        yield build_conflict(cfg, filter_key, why, "false", f"{filter_key}=false")
    # The returns in a group of one trajectory cannot differ, so every group would be dropped.
    if cfg.algorithm.filter_groups.enable and n < 2:
        why = "filter_groups.enable keeps groups whose returns differ"
        yield build_conflict(cfg, "env.rollout.n", why, "2 or more", "env.rollout.n=8")
    if cfg.trainer.critic_warmup > 0 and not cfg.critic.enable:
        why = f"{name} trains no critic, so no model would be updated"
        yield build_conflict(cfg, "trainer.critic_warmup", why, "0", "trainer.critic_warmup=0")


def check_turn_rewards(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Refuse an estimator that compares turns if the run does not train on the turns' rewards.

    Some keys replace these rewards by one score per trajectory. Turns would then be compared by
    the environment's rewards and trajectories by other scores, so their advantages could disagree.
    """
    replacing_key = find_key_replacing_turn_rewards(cfg)
    if replacing_key is None or not estimator_uses_turn_rewards(cfg, ctx):
        return
    value = value_at_path(cfg, replacing_key)
    why = (
        "it compares turns by results of the environment, but with "
        f"{replacing_key}={value!r} other scores are trained on"
    )
    is_rule_weight = replacing_key == "reward_model.rule_weight"
    alternative_fix = f"{replacing_key}=1" if is_rule_weight else f"do not set {replacing_key}"
    fix = f"algorithm.adv_estimator=grpo, or {alternative_fix}"
    allowed = "an estimator that compares only trajectories"
    yield build_conflict(cfg, "algorithm.adv_estimator", why, allowed, fix)


def check_sft(cfg: SFTConfig, ctx: CheckContext) -> Problems:
    """Check the keys of a supervised run: model, row lengths, devices and files."""
    data = cfg.data
    yield from check_directory(cfg, "model.path", ctx)
    if cfg.model.path is None:
        yield from _check_new_policy(cfg)
    if data.max_token_len_per_gpu < data.max_length:
        allowed = f"data.max_length ({data.max_length}) or more"
        key = "data.max_token_len_per_gpu"
        why = "the longest row must fit"
        yield build_problem(cfg, key, why, allowed, "raise it", "does_not_fit")
    if data.history == "chat" and data.env_loss_weight:
        key = "data.env_loss_weight"
        why = "with data.history=chat only the assistant's replies are trained on"
        yield build_conflict(cfg, key, why, "0", f"{key}=0, or data.history=append")
    if cfg.env.compact.enable:
        why = "a supervised run makes no summaries, and rows longer than data.max_length are cut"
        fix = "do not set it; rows of data.train_files may contain summaries"
        yield build_problem(cfg, "env.compact.enable", why, "false", fix, "no_effect")
    for key in ("data.train_files", "data.val_files") if ctx.check_files else ():
        missing_files = [name for name in value_at_path(cfg, key) if not Path(name).is_file()]
        if missing_files:
            why = f"no such file: {', '.join(missing_files)}"
            fix = "correct the paths"
            yield build_problem(cfg, key, why, "existing files", fix, "missing_file")


def _check_new_policy(cfg: SFTConfig) -> Problems:
    new_policy = cfg.model.new
    if cfg.model.lora_rank:
        why = "a new policy has random weights, which an adapter would not change"
        fix = "model.path=DIR, or model.lora_rank=0"
        yield build_conflict(cfg, "model.lora_rank", why, "0 without model.path", fix)
    if new_policy.head_dim is None and new_policy.hidden_size % new_policy.num_attention_heads:
        key, why = "model.new.num_attention_heads", "hidden_size is not a multiple of it"
        yield build_conflict(cfg, key, why, "a divisor of model.new.hidden_size", "choose one")
    # Grouped-query attention: every key/value head has the same number of query heads.
    if new_policy.num_attention_heads % new_policy.num_key_value_heads:
        key, why = "model.new.num_key_value_heads", "num_attention_heads is not a multiple of it"
        allowed = "a divisor of model.new.num_attention_heads"
        yield build_conflict(cfg, key, why, allowed, "choose one")
    if cfg.data.max_length > new_policy.max_position_embeddings:
        why = "rows must fit the policy's context"
        context_length = new_policy.max_position_embeddings
        allowed = f"model.new.max_position_embeddings ({context_length}) or less"
        yield build_problem(cfg, "data.max_length", why, allowed, "lower it", "does_not_fit")
