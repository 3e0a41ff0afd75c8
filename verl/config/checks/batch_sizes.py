"""Checks of lengths, batch sizes and sampling."""

from verl.config import derive
from verl.config.plan_notes import RANDOM_SAMPLING_FIX, VAL_SAMPLING_KEY
from verl.config.problems import CheckContext, Problems, build_conflict, build_problem
from verl.config.schema import PPOConfig
from verl.config.schema.actor_rollout_ref import ActorConfig
from verl.config.schema.critic import CriticConfig
from verl.config.settings import Section, value_at_path

MIN_TEMPERATURE = 0.01  # lowest temperature above 0 at which vLLM samples


def check_row_lengths(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Check that a row (prompt and response) fits into the engine's context and a micro-batch.

    Also check that a turn and a summary fit into the response.
    """
    data = cfg.data
    rollout = cfg.actor_rollout_ref.rollout
    actor = cfg.actor_rollout_ref.actor
    row_length = data.max_row_tokens
    if rollout.max_model_len < row_length:
        key = "actor_rollout_ref.rollout.max_model_len"
        row_length_text = f"data.max_prompt_length + data.max_response_length = {row_length} tokens"
        why = f"the engine must hold a whole row, {row_length_text}"
        fix = "raise it or set it to null, or lower the two lengths"
        yield build_problem(cfg, key, why, f"{row_length} or more, or null", fix, "does_not_fit")
    # The default of env.max_turn_tokens (data.max_response_length) is right for env.history=window,
    # where a response is one turn, and too large for append, where it is the whole trajectory.
    turn_tokens = cfg.env.max_turn_tokens
    response_tokens = data.max_response_length
    has_turns_in_one_response = cfg.env.history == "append" and cfg.env.max_steps > 1
    if turn_tokens > response_tokens:
        why = "a turn must fit into the response"
        allowed = f"data.max_response_length ({response_tokens}) or less"
        fix = "lower it, or raise data.max_response_length"
        yield build_problem(cfg, "env.max_turn_tokens", why, allowed, fix, "does_not_fit")
    elif turn_tokens == response_tokens and has_turns_in_one_response:
        why = (
            "with env.history=append the response holds all turns of the trajectory, and one turn "
            "could fill it"
        )
        allowed = f"less than {response_tokens}"
        fix = "set it to the longest turn, in tokens"
        yield build_problem(cfg, "env.max_turn_tokens", why, allowed, fix, "does_not_fit")
    yield from _check_compaction(cfg)
    needs_whole_prompt = not rollout.enable_chunked_prefill
    if needs_whole_prompt and rollout.max_num_batched_tokens < rollout.max_model_len:
        key = "actor_rollout_ref.rollout.max_num_batched_tokens"
        fix = "raise it, or enable_chunked_prefill=true"
        why = "a whole prompt must fit into an engine step"
        yield build_problem(cfg, key, why, f"{rollout.max_model_len} or more", fix, "does_not_fit")
    prefix = "actor_rollout_ref.actor"
    # A row is never split over micro-batches, so the longest row must fit into one.
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < row_length:
        key = f"{prefix}.ppo_max_token_len_per_gpu"
        row_length_text = "(data.max_prompt_length + data.max_response_length)"
        why = f"the longest row has {row_length} tokens {row_length_text}"
        fix = f"{key}={row_length}, or shorter rows"
        yield build_problem(cfg, key, why, f"{row_length} or more", fix, "does_not_fit")
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        fix = f"set a number, or {prefix}.use_dynamic_bsz=true"
        key = f"{prefix}.ppo_micro_batch_size_per_gpu"
        yield build_problem(cfg, key, "micro-batches have no size", "1 or more", fix, "missing_key")


def _check_compaction(cfg: PPOConfig) -> Problems:
    compaction = cfg.env.compact
    if not compaction.enable:
        return
    if cfg.env.history == "window":
        why = "with env.history=window a prompt shows env.history_length turns, so no row gets full"
        fix = "env.history=append or chat, or env.compact.enable=false"
        yield build_conflict(cfg, "env.compact.enable", why, "false", fix)
    free_tokens = cfg.data.max_response_length - cfg.env.max_turn_tokens
    if compaction.max_summary_tokens >= free_tokens:
        why = "a turn, the instruction and the summary must fit into data.max_response_length"
        key = "env.compact.max_summary_tokens"
        allowed = f"less than data.max_response_length - env.max_turn_tokens ({free_tokens})"
        fix = "lower it or env.max_turn_tokens, or raise data.max_response_length"
        yield build_problem(cfg, key, why, allowed, fix, "does_not_fit")


def check_batches(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Check that mini-batches divide the batch evenly and give every rank a trajectory."""
    actor, critic = cfg.actor_rollout_ref.actor, cfg.critic
    yield from _check_mini_batches(cfg, "actor_rollout_ref.actor", actor)
    sizes = [(section.ppo_mini_batches, section.ppo_mini_batch_size) for section in (actor, critic)]
    if critic.enable and sizes[0] != sizes[1]:
        yield from _check_mini_batches(cfg, "critic", critic)


def _check_mini_batches(
    cfg: PPOConfig, prefix: str, section: ActorConfig | CriticConfig
) -> Problems:
    num_tasks = cfg.data.train_batch_size
    num_trajectories = derive.count_trajectories_per_step(cfg)
    num_ranks = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    # If the number of mini-batches was derived from ppo_mini_batch_size, report that key.
    size = section.ppo_mini_batch_size
    is_number_derived = section.ppo_mini_batches == derive.count_mini_batches(cfg, size)
    if is_number_derived and num_tasks > size and num_tasks % size:
        allowed = f"a divisor of data.train_batch_size ({num_tasks}), or any larger number"
        fix = "choose a divisor, or set the number of optimizer steps with ppo_mini_batches"
        key = f"{prefix}.ppo_mini_batch_size"
        yield build_conflict(cfg, key, "does not divide the batch", allowed, fix)
    elif num_trajectories % section.ppo_mini_batches:
        why = f"does not divide the {num_trajectories} trajectories of a training step"
        allowed = f"a divisor of data.train_batch_size * env.rollout.n ({num_trajectories})"
        yield build_conflict(cfg, f"{prefix}.ppo_mini_batches", why, allowed, "choose a divisor")
    # A rank without a trajectory would have no work and wait for the others.
    elif num_trajectories // section.ppo_mini_batches < num_ranks:
        mini_batch_size = num_trajectories // section.ppo_mini_batches
        why = f"a mini-batch has {mini_batch_size} trajectories for {num_ranks} ranks"
        fix = "fewer mini-batches or ranks, or a larger data.train_batch_size"
        allowed = f"{max(1, num_trajectories // num_ranks)} or fewer"
        yield build_problem(cfg, f"{prefix}.ppo_mini_batches", why, allowed, fix, "does_not_fit")


def check_sampling(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Check the group size, and that training samples at random, from all tokens."""
    rollout = cfg.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout"
    if (rollout.temperature == 0 or not rollout.do_sample) and not cfg.trainer.val_only:
        key = f"{prefix}.temperature" if rollout.temperature == 0 else f"{prefix}.do_sample"
        fix = f"{prefix}.temperature=1.0 {prefix}.do_sample=true (val_kwargs apply to validation)"
        why = "greedy trajectories of a task are all equal"
        yield build_conflict(cfg, key, why, "sampling in training", fix)
    for section_path in (prefix, f"{prefix}.val_kwargs"):
        is_trained_on = section_path == prefix and not cfg.trainer.val_only
        yield from check_temperature(cfg, section_path)
        yield from check_sampling_truncation(cfg, section_path, is_trained_on)
    if rollout.name == "hf" and rollout.engine_kwargs:
        why = "the engine hf accepts no arguments"
        yield build_conflict(cfg, f"{prefix}.engine_kwargs", why, "{}", f"{prefix}.name=vllm")
    yield from _check_group_size(cfg)


def _check_group_size(cfg: PPOConfig) -> Problems:
    key = "actor_rollout_ref.rollout.n"
    n = cfg.actor_rollout_ref.rollout.n
    group_size = cfg.env.rollout.n
    if n == 1 or (derive.uses_file_tasks(cfg) and n == group_size):
        return
    if derive.uses_file_tasks(cfg):
        why = f"env.rollout.n={group_size} is another group size"
        yield build_conflict(cfg, key, why, "one group size", "do not set env.rollout.n")
    # Report nothing if a job with an environment names data files: _check_unused_data_files reports
    # the files, with a fix that would contradict this one.
    elif not derive.trains_on_files(cfg):
        fix = f"env.rollout.n={n} {key}=1"
        why = "an environment's group size is env.rollout.n"
        yield build_problem(cfg, key, why, "1", fix, "no_effect")


def check_temperature(cfg: Section, section_path: str) -> Problems:
    """Refuse temperatures that vLLM raises to 0.01: log-probs of the trainer would differ."""
    key = f"{section_path}.temperature"
    if 0 < value_at_path(cfg, key) < MIN_TEMPERATURE:
        why = "engines do not sample at this temperature"
        allowed = f"0 (greedy) or at least {MIN_TEMPERATURE}"
        yield build_problem(cfg, key, why, allowed, f"{key}={MIN_TEMPERATURE}", "out_of_range")


def check_sampling_truncation(cfg: Section, section_path: str, is_trained_on: bool) -> Problems:
    """Check that ``top_p`` and ``top_k`` of the section ``section_path`` allow some token.

    With ``is_trained_on``, the policy trains on the sampled tokens. Then they must allow all tokens
    of the vocabulary.
    """
    untruncated_values = {"top_p": 1.0, "top_k": -1}
    for name, untruncated_value in untruncated_values.items():
        key = f"{section_path}.{name}"
        value = value_at_path(cfg, key)
        if value == untruncated_value:
            continue
        fix = f"{key}={untruncated_value}"
        # The engine would sample from the truncated distribution, and the trainer would score with
        # the full one. Log-probs would differ by up to ln(1/top_p) nats per token.
        if is_trained_on:
            why = "tokens sampled from a truncated distribution would be scored with the full one"
            fix += f" (val_kwargs.{name} truncates in validation)"
            yield build_conflict(cfg, key, why, f"{untruncated_value} (all tokens)", fix)
        elif value == 0:
            allowed = "more than 0, at most 1" if name == "top_p" else "-1 (all) or 1 and more"
            yield build_problem(cfg, key, "excludes every token", allowed, fix, "out_of_range")


def check_greedy_validation_samples(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Refuse several greedy trajectories per validation task: pass@k would be equal for all k."""
    sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    if sampling.n > 1 and (key := derive.find_greedy_override(sampling)):
        why = f"validation is greedy ({key}), so all trajectories of a task are equal"
        allowed = "1 in greedy validation"
        yield build_conflict(cfg, f"{VAL_SAMPLING_KEY}.n", why, allowed, RANDOM_SAMPLING_FIX)
