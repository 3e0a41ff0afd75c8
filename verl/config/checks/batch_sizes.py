"""Checks of lengths, batch sizes and sampling."""

from verl.config.checks.no_effect import names_data
from verl.config.derive import plays_files, trajectories_per_iteration
from verl.config.problems import Context, Problems, problem
from verl.config.schema import PPOConfig
from verl.config.settings import lookup


def check_lengths(cfg: PPOConfig, _ctx: Context) -> Problems:
    """Rows fit into the engine's context and into micro-batches."""
    data = cfg.data
    rollout = cfg.actor_rollout_ref.rollout
    actor = cfg.actor_rollout_ref.actor
    row = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len < row:
        lengths = f"data.max_prompt_length + data.max_response_length = {row} tokens"
        why = f"the engine must hold a whole row, {lengths}"
        fix = "raise it or set it to null, or lower the two lengths"
        yield problem(
            cfg, "actor_rollout_ref.rollout.max_model_len", why, f"{row} or more, or null", fix
        )
    # A null is filled in from data.max_response_length: right for windows, where a response is one
    # turn, too much for append.
    if cfg.env.max_turn_tokens > data.max_response_length:
        why = "a turn must fit into the response"
        allowed = f"data.max_response_length ({data.max_response_length}) or less"
        yield problem(
            cfg, "env.max_turn_tokens", why, allowed, "lower it, or raise data.max_response_length"
        )
    elif (
        cfg.env.history == "append"
        and cfg.env.max_steps > 1
        and cfg.env.max_turn_tokens == data.max_response_length
    ):
        why = (
            "with env.history=append the response holds the whole play, and one turn could fill it"
        )
        allowed = f"less than {data.max_response_length}"
        fix = "set it to the longest turn, in tokens"
        yield problem(cfg, "env.max_turn_tokens", why, allowed, fix)
    if (
        not rollout.enable_chunked_prefill
        and rollout.max_num_batched_tokens < rollout.max_model_len
    ):
        key, fix = (
            "actor_rollout_ref.rollout.max_num_batched_tokens",
            "raise it, or enable_chunked_prefill=true",
        )
        yield problem(
            cfg, key, "a whole prompt must fit into a step", f"{rollout.max_model_len} or more", fix
        )
    prefix = "actor_rollout_ref.actor"
    # A row is never split over micro-batches: the longest one must fit alone.
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < row:
        why = (
            f"the longest row has {row} tokens (data.max_prompt_length + data.max_response_length)"
        )
        fix = f"{prefix}.ppo_max_token_len_per_gpu={row}, or shorter rows"
        yield problem(cfg, f"{prefix}.ppo_max_token_len_per_gpu", why, f"{row} or more", fix)
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        fix = f"give it a number, or {prefix}.use_dynamic_bsz=true"
        yield problem(
            cfg,
            f"{prefix}.ppo_micro_batch_size_per_gpu",
            "micro-batches have no size",
            "1 or more",
            fix,
        )


def check_batches(cfg: PPOConfig, _ctx: Context) -> Problems:
    """Mini-batches divide the batch and give every rank something to do."""
    actor = cfg.actor_rollout_ref.actor
    tasks = cfg.data.train_batch_size
    played, ranks = (
        trajectories_per_iteration(cfg),
        cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes,
    )
    prefix = "actor_rollout_ref.actor"
    # Whether the number follows from the size: the message has to name the key that was set.
    by_size = actor.ppo_mini_batches == max(1, tasks // actor.ppo_mini_batch_size)
    if by_size and tasks > actor.ppo_mini_batch_size and tasks % actor.ppo_mini_batch_size:
        allowed = f"a divisor of data.train_batch_size ({tasks}), or anything above it"
        fix = "choose a divisor, or give the number of optimizer steps in ppo_mini_batches"
        yield problem(
            cfg, f"{prefix}.ppo_mini_batch_size", "does not divide the batch", allowed, fix
        )
    elif played % actor.ppo_mini_batches:
        why = f"does not divide the {played} trajectories of an iteration"
        allowed = f"a divisor of data.train_batch_size * env.rollout.n ({played})"
        yield problem(cfg, f"{prefix}.ppo_mini_batches", why, allowed, "choose a divisor")
    # A rank without a trajectory would only wait in the collective calls of the others.
    elif played // actor.ppo_mini_batches < ranks:
        why = f"a mini-batch has {played // actor.ppo_mini_batches} trajectories for {ranks} ranks"
        fix = "fewer mini-batches or ranks, or a larger data.train_batch_size"
        yield problem(
            cfg, f"{prefix}.ppo_mini_batches", why, f"{max(1, played // ranks)} or fewer", fix
        )


def check_sampling(cfg: PPOConfig, _ctx: Context) -> Problems:
    """There is such an engine, and plays of one task can differ."""
    rollout = cfg.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout"
    if (rollout.temperature == 0 or not rollout.do_sample) and not cfg.trainer.val_only:
        key = f"{prefix}.temperature" if rollout.temperature == 0 else f"{prefix}.do_sample"
        fix = f"{prefix}.temperature=1.0 {prefix}.do_sample=true (val_kwargs govern validation)"
        yield problem(
            cfg, key, "greedy plays of a task are all the same", "sampling in training", fix
        )
    for where in (prefix, f"{prefix}.val_kwargs"):
        trained = where == prefix and not cfg.trainer.val_only
        yield from _truncation_problems(cfg, where, trained)
    if rollout.name == "hf" and rollout.engine_kwargs:
        yield problem(
            cfg, f"{prefix}.engine_kwargs", "the engine hf takes none", "{}", f"{prefix}.name=vllm"
        )
    yield from _group_size_problems(cfg)


def _group_size_problems(cfg: PPOConfig) -> Problems:
    """The engine's ``n`` is not passed over: groups would have another size than the script says.

    Of rows of files it is the group size.
    """
    key = "actor_rollout_ref.rollout.n"
    n = cfg.actor_rollout_ref.rollout.n
    group = cfg.env.rollout.n
    if n == 1 or (plays_files(cfg) and n == group):
        return
    if plays_files(cfg):
        why = f"env.rollout.n={group} says another group size"
        yield problem(cfg, key, why, "one group size", "leave env.rollout.n out")
    # Of files that are refused, no fix must make a job about an environment.
    elif not names_data(cfg):
        fix = f"env.rollout.n={n} {key}=1"
        yield problem(cfg, key, "an environment's group size is env.rollout.n", "1", fix)


def _truncation_problems(cfg: PPOConfig, where: str, trained: bool) -> Problems:
    """``top_p`` and ``top_k`` leave a token, and where is ``trained`` on what they leave, all."""
    whole = {"top_p": 1.0, "top_k": -1}
    for name, all_tokens in whole.items():
        key = f"{where}.{name}"
        value = lookup(cfg, key)
        if value == all_tokens:
            continue
        fix = f"{key}={all_tokens}"
        # Off by as much as ln(1/top_p) nats a token, and nothing of the update would correct it.
        if trained:
            why = "tokens drawn from a part of the distribution would be scored in the whole of it"
            fix += f" (val_kwargs.{name} truncates in validation)"
            yield problem(cfg, key, why, f"{all_tokens} (all tokens)", fix)
        elif value == 0:
            allowed = "more than 0, at most 1" if name == "top_p" else "-1 (all) or 1 and more"
            yield problem(cfg, key, "leaves no token", allowed, fix)
