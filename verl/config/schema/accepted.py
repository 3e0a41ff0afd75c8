"""Keys that job scripts of verl and verl-agent set and that have no effect in this framework.

Keys for kernels, data loaders and sharding are accepted. One warning names the keys that were set
and the reasons. Keys that name data, a model or a reward are refused. The ``Unused`` annotation of
a key gives the reason and the project whose scripts set it. For a refused key it also names the key
to set ``instead``. The sections inherit from these classes, so that the other modules declare only
keys with effect.
"""

from typing import Annotated, Literal

from verl.config.settings import NonNegative, PositiveInt, Section, Unused
from verl.names import Strategy

VERL = "verl's examples"
VERL_AGENT = "verl-agent's examples"
TEXT_ONLY = Unused(
    "prompts of files are text; images come from environments",
    VERL,
    instead="leave it out",
)
PACKED = Unused("rows are always packed", VERL)
WHOLE_ON_EACH = Unused("every rank holds the whole reward model", VERL)
SCORED_BY_ROWS = Unused(
    "it scores reward_model.micro_batch_size_per_gpu conversations at once", VERL
)
REWARD_MODEL_TEMPLATE = Unused(
    "conversations come as messages, which the reward model's own tokenizer renders", VERL
)
ENVS_IN_POOL = Unused("environments run in a pool of processes (env.num_workers)", VERL_AGENT)


class AcceptedData(Section):
    """Keys of ``data`` without effect: validation batches, messages and images."""

    val_batch_size: Annotated[
        PositiveInt | None,
        Unused("the whole validation set is one batch; its size is env.val_tasks", VERL),
    ] = None
    """tasks validated at once; null: the whole validation set"""
    return_raw_chat: Annotated[bool, Unused("messages are always kept", VERL_AGENT)] = False
    """keep the message list in addition to the tokens"""
    image_key: Annotated[str, TEXT_ONLY] = "images"
    """column of the files that holds images"""


class AcceptedModel(Section):
    """Keys of ``actor_rollout_ref.model`` without effect: kernels."""

    use_remove_padding: Annotated[bool, PACKED] = False
    """compute without padding tokens"""
    use_liger: Annotated[bool, Unused("no Liger kernels are used", VERL)] = False
    """Liger kernels"""


class AcceptedRollout(Section):
    """Keys of ``actor_rollout_ref.rollout`` without effect: engine mode."""

    mode: Annotated[Literal["async", "sync"], Unused("engines are always asynchronous", VERL)] = (
        "async"
    )
    """calls of the engine: asynchronous or synchronous"""


class AcceptedCriticModel(Section):
    """Keys of ``critic.model`` without effect: tokenizer and kernels."""

    tokenizer_path: Annotated[
        str | None,
        Unused(
            "the critic reads the policy's tokens",
            VERL,
            instead="leave it out; critic.model.path names the critic",
        ),
    ] = None
    """tokenizer of the value model"""
    use_remove_padding: Annotated[bool, PACKED] = False
    """compute without padding tokens"""


class AcceptedRewardModel(Section):
    """Keys of ``reward_model`` without effect: sharding, micro-batches and asynchronous calls."""

    strategy: Annotated[Strategy, WHOLE_ON_EACH] = "fsdp2"
    """sharding of the model"""
    use_dynamic_bsz: Annotated[bool | None, SCORED_BY_ROWS] = None
    """form micro-batches by tokens"""
    forward_max_token_len_per_gpu: Annotated[int | None, SCORED_BY_ROWS] = None
    """tokens per forward pass"""
    launch_reward_fn_async: Annotated[bool, Unused("rewards are immediate", VERL)] = False
    """score trajectories concurrently with other work"""


class RewardShards(Section):
    """Keys of ``reward_model.model.fsdp_config``, all without effect."""

    param_offload: Annotated[bool, WHOLE_ON_EACH] = False
    """keep parameters in host memory between passes"""
    reshard_after_forward: Annotated[bool, WHOLE_ON_EACH] = True
    """free gathered parameters between passes"""
    fsdp_size: Annotated[int, WHOLE_ON_EACH] = -1
    """ranks that share one copy of the parameters"""


class AcceptedRewardNetwork(Section):
    """Keys of ``reward_model.model`` without effect: tokenizer, kernels and sharding."""

    input_tokenizer: Annotated[str | None, REWARD_MODEL_TEMPLATE] = None
    """the policy's tokenizer"""
    use_remove_padding: Annotated[bool, Unused("rows are padded on the right", VERL)] = False
    """compute without padding tokens"""
    fsdp_config: RewardShards = RewardShards()
    """sharding of the model"""


class AcceptedTrainer(Section):
    """Keys of ``trainer`` without effect: checkpoints of the critic."""

    max_critic_ckpt_to_keep: Annotated[
        PositiveInt | None,
        Unused("actor and critic share a checkpoint: max_actor_ckpt_to_keep", VERL),
    ] = None
    """number of newest critic checkpoints that are kept; null: all"""


class EnvResources(Section):
    """``env.resources_per_worker``: Ray resources per environment worker."""

    num_cpus: Annotated[NonNegative, ENVS_IN_POOL] = 0.1
    """CPUs per environment worker"""
    num_gpus: Annotated[NonNegative, ENVS_IN_POOL] = 0.0
    """GPUs per environment worker"""


class AcceptedEnv(Section):
    """Keys of ``env`` without effect: Ray resources of environment workers."""

    resources_per_worker: EnvResources = EnvResources()
    """Ray resources per environment worker"""
