"""Cross-field checks, all of them, in one place. A message says what, where, what is allowed and
how to mend it.

Each check yields messages; ``validate`` runs all of them and raises one ConfigError that lists
everything found.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from verl.names import GROUP_ESTIMATORS
from verl.trainer.config.cold_start import cold_start_config
from verl.trainer.config.derive import declared_tasks, known_tasks, trajectories_per_iteration
from verl.trainer.config.load import guess_device
from verl.trainer.config.loss_checks import check_gdpo, check_losses, check_rollout_correction
from verl.trainer.config.plugged import EXTENSIONS
from verl.trainer.config.problems import Context, Names, Problems, problem, unknown_name
from verl.trainer.config.registered_names import check_columns, check_names
from verl.trainer.config.schema import PPOConfig, SFTConfig
from verl.utils.settings import ConfigError, MissingKey, lookup


def _is_local(path: str) -> bool:
    """Whether ``path`` can only be a directory: a hub name is ``name`` or ``owner/name``."""
    return not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or path.startswith((".", "/"))


def check_model(cfg: PPOConfig, ctx: Context) -> Problems:
    """There is a policy, or a way to make one."""
    key = "actor_rollout_ref.model.path"
    path = cfg.actor_rollout_ref.model.path
    fix = (
        "name an existing directory in Hugging Face format, "
        "or make one first with cold_start.enable=true"
    )
    if path is None:
        yield problem(cfg, key, "no policy is named", "a directory or a hub name", fix)
    elif (
        ctx.check_files
        and _is_local(path)
        and not Path(path).is_dir()
        and not cfg.cold_start.enable
    ):
        yield problem(cfg, key, "no such directory", "an existing directory or a hub name", fix)
    # Composed here already: its mistakes would otherwise show only after the tasks were made.
    if cfg.cold_start.enable and path is not None:
        yield from _cold_start_problems(cfg, ctx)
    if cfg.reward_model.enable:
        yield problem(
            cfg,
            "reward_model.enable",
            "no reward model can be run",
            "false",
            "give rewards by custom_reward_function",
        )


def _cold_start_problems(cfg: PPOConfig, ctx: Context) -> Problems:
    try:
        sft = cold_start_config(cfg)
    except ConfigError as error:
        yield from (f"cold start: {found}" for found in error.problems)
    else:
        yield from (f"cold start: {found}" for found in check_sft(sft, ctx))


def group_estimators() -> tuple[str, ...]:
    """Estimators that compare the plays of one task, those that are plugged in included."""
    plugged = [name for extension in EXTENSIONS.values() for name in extension.group_estimators]
    return (*GROUP_ESTIMATORS, *plugged)


def check_estimator(cfg: PPOConfig, _ctx: Context) -> Problems:
    """The estimator has the group and the critic it needs."""
    name = cfg.algorithm.adv_estimator
    n = cfg.env.rollout.n
    if name == "gae" and not cfg.critic.enable:
        yield problem(
            cfg, "critic.enable", "gae needs values", "true or null", "leave critic.enable unset"
        )
    # A group of one is its own mean: every advantage would be 0, and training would go on.
    if name in group_estimators() and n < 2:
        fix = "env.rollout.n=8, or an estimator without groups: gae, reinforce_plus_plus"
        yield problem(
            cfg, "env.rollout.n", f"{name} compares the plays of one task", "2 or more", fix
        )
    # One play does not differ from itself: every group would be dropped.
    if cfg.algorithm.filter_groups.enable and n < 2:
        why = "filter_groups.enable keeps groups whose returns differ"
        yield problem(cfg, "env.rollout.n", why, "2 or more", "env.rollout.n=8")
    if cfg.trainer.critic_warmup > 0 and not cfg.critic.enable:
        why = f"{name} trains no critic, so nothing would be updated"
        yield problem(cfg, "trainer.critic_warmup", why, "0", "trainer.critic_warmup=0")


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
    # It would be ignored, and groups would silently have another size than the script says.
    if rollout.n > 1:
        fix = f"env.rollout.n={rollout.n} {prefix}.n=1"
        yield problem(cfg, f"{prefix}.n", "an environment's group size is env.rollout.n", "1", fix)


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


def check_devices(cfg: PPOConfig, ctx: Context) -> Problems:
    """Ranks and engines fit the devices."""
    trainer = cfg.trainer
    rollout = cfg.actor_rollout_ref.rollout
    ranks = trainer.n_gpus_per_node * trainer.nnodes
    if ctx.device == "cuda" and rollout.num_workers * rollout.tensor_model_parallel_size > ranks:
        size = rollout.tensor_model_parallel_size
        why = f"{rollout.num_workers} engines of {size} devices on {ranks} devices"
        fix = "fewer engines, smaller engines, or more devices"
        yield problem(
            cfg, "actor_rollout_ref.rollout.num_workers", why, "what fits the devices", fix
        )
    for where in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model"):
        key = f"{where}.fsdp_config.fsdp_size"
        size = lookup(cfg, key)
        # Every fsdp_size ranks share one copy of the parameters: a remainder would have none.
        if size != -1 and (size < 1 or ranks % size):
            yield problem(
                cfg,
                key,
                f"does not divide the {ranks} ranks",
                "-1 or a divisor of the ranks",
                f"{key}=-1",
            )


def check_ray(cfg: PPOConfig, _ctx: Context) -> Problems:
    """What only a Ray that is started here can be told."""
    if cfg.ray_init.address is None:
        return
    for name in ("num_cpus", "num_gpus", "object_store_gb"):
        if getattr(cfg.ray_init, name) is not None:
            why = f"the cluster at ray_init.address={cfg.ray_init.address} has its own"
            yield problem(
                cfg,
                f"ray_init.{name}",
                why,
                "null",
                f"give it to `ray start`, or ray_init.{name}=null",
            )


def check_run(cfg: PPOConfig | SFTConfig, ctx: Context) -> Problems:
    """Where the run starts from and what it loads."""
    trainer = cfg.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        why = "resume_mode=resume_path continues from it"
        fix = "name a checkpoint, or trainer.resume_mode=auto"
        yield problem(cfg, "trainer.resume_from_path", why, "a checkpoint directory", fix)
    elif (
        trainer.resume_from_path and ctx.check_files and not Path(trainer.resume_from_path).is_dir()
    ):
        why = "no such directory"
        fix = "name an existing checkpoint"
        yield problem(cfg, "trainer.resume_from_path", why, "a checkpoint directory", fix)
    paths = (
        ["custom_reward_function.path", "data.custom_cls.path"]
        if isinstance(cfg, PPOConfig)
        else []
    )
    for key in paths:
        path = lookup(cfg, key)
        if path is not None and ctx.check_files and not Path(path).is_file():
            yield problem(
                cfg, key, "no such file", "a Python file", "mend the path, or set it to null"
            )
    if isinstance(cfg, PPOConfig) and (cfg.data.custom_cls.path is None) != (
        cfg.data.custom_cls.name is None
    ):
        yield (
            "data.custom_cls: only one of path and name is set; "
            "allowed: both or neither; fix: set the other"
        )


def check_env(cfg: PPOConfig | SFTConfig, ctx: Context) -> Problems:
    """The environment exists and has enough tasks for a batch and for the panel."""
    env = cfg.env
    known = ctx.names.environments
    if known is not None and env.name not in known and ":" not in env.env_name:
        yield unknown_name(cfg, "env.env_name", env.env_name, known)
    for key in ("env.reset_timeout_s", "env.step_timeout_s"):
        if lookup(cfg, key) <= 0:
            yield problem(cfg, key, "every call would be late", "more than 0", f"{key}=30")
    held_out = declared_tasks(env, "val")
    if held_out is not None and env.val_tasks > held_out:
        why = f"only {held_out} tasks are held out"
        fix = f"a smaller panel, or more tasks (env.{env.name})"
        yield problem(cfg, "env.val_tasks", why, f"at most {held_out}", fix)
    tasks = known_tasks(env)
    if isinstance(cfg, PPOConfig) and tasks is not None and cfg.data.train_batch_size > tasks:
        why = f"there are {tasks} training tasks, and a batch holds a task once"
        fix = f"a smaller batch, or more tasks (env.train_tasks, env.{env.name})"
        allowed = "at most the number of training tasks"
        yield problem(cfg, "data.train_batch_size", why, allowed, fix)


def check_sft(cfg: SFTConfig, ctx: Context) -> Problems:
    """The policy can be built and its episodes fit."""
    model = cfg.model
    data = cfg.data
    new = cfg.model.new
    if ctx.check_files and model.path and _is_local(model.path) and not Path(model.path).is_dir():
        yield problem(
            cfg,
            "model.path",
            "no such directory",
            "a directory, a hub name or null",
            "mend the path",
        )
    if model.path is None and new.head_dim is None and new.hidden_size % new.num_attention_heads:
        why = "hidden_size is not a multiple of it"
        yield problem(
            cfg,
            "model.new.num_attention_heads",
            why,
            "a divisor of model.new.hidden_size",
            "choose one",
        )
    # Grouped-query attention: every key/value head serves equally many query heads.
    if model.path is None and new.num_attention_heads % new.num_key_value_heads:
        why, allowed = (
            "num_attention_heads is not a multiple of it",
            "a divisor of model.new.num_attention_heads",
        )
        yield problem(cfg, "model.new.num_key_value_heads", why, allowed, "choose one")
    if model.path is None and data.max_length > new.max_position_embeddings:
        allowed = f"model.new.max_position_embeddings ({new.max_position_embeddings}) or less"
        yield problem(
            cfg, "data.max_length", "rows must fit the policy's context", allowed, "lower it"
        )
    if cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes > 1:
        fix = "trainer.n_gpus_per_node=1 trainer.nnodes=1"
        yield problem(cfg, "trainer.n_gpus_per_node", "supervised runs use one device", "1", fix)
    if data.max_token_len_per_gpu < data.max_length:
        allowed = f"data.max_length ({data.max_length}) or more"
        yield problem(
            cfg, "data.max_token_len_per_gpu", "the longest row must fit", allowed, "raise it"
        )
    for key in ("data.train_files", "data.val_files"):
        missing = [
            name for name in lookup(cfg, key) if ctx.check_files and not Path(name).is_file()
        ]
        if missing:
            yield problem(
                cfg, key, f"no such file: {', '.join(missing)}", "existing files", "mend the paths"
            )


PPO_CHECKS = (
    check_model,
    check_names,
    check_estimator,
    check_columns,
    check_lengths,
    check_batches,
    check_losses,
    check_rollout_correction,
    check_gdpo,
    check_sampling,
    check_devices,
    check_env,
    check_ray,
    check_run,
)
SFT_CHECKS = (check_sft, check_env, check_run)


def find_problems(
    cfg: PPOConfig | SFTConfig,
    names: Names | None = None,
    check_files: bool = True,
    partial: bool = False,
) -> list[str]:
    """Messages of all checks on ``cfg``, a derived ``PPOConfig`` or ``SFTConfig``.

    ``names`` are the registered ones (None: those that ship are known, environments are not
    checked); ``check_files`` asks that files and directories which the config names exist on this
    machine. A ``partial`` config lacks the keys that were refused: a check that needs one of them
    ends there.
    """
    ctx = Context(names or Names(), check_files, guess_device(_device(cfg)))
    found: list[str] = []
    for problems in _checks(cfg, ctx):
        try:
            # One by one: what a check said before it met a missing key is kept.
            for message in problems:
                found.append(message)
        except MissingKey:
            if not partial:
                raise
    return found


def _checks(cfg: PPOConfig | SFTConfig, ctx: Context) -> Iterator[Problems]:
    if isinstance(cfg, PPOConfig):
        yield from (check(cfg, ctx) for check in PPO_CHECKS)
    else:
        yield from (check(cfg, ctx) for check in SFT_CHECKS)
    yield from (extension.check(cfg, ctx) for extension in EXTENSIONS.values())


def _device(cfg: PPOConfig | SFTConfig) -> str:
    try:
        return cfg.trainer.device
    except MissingKey:
        # The device was refused: the checks of GPUs wait until it is mended.
        return "cpu"


def validate(
    cfg: PPOConfig | SFTConfig, names: Names | None = None, check_files: bool = True
) -> None:
    """Raise ConfigError with everything that ``find_problems`` finds; return None when that is
    nothing.
    """
    problems = find_problems(cfg, names, check_files)
    if problems:
        raise ConfigError(problems)
