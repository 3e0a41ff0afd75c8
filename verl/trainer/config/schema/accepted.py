"""Keys that job scripts of this family of frameworks set and that change nothing here: all of them.

Of kernels, loaders and how work is split, a script that sets one runs, with one warning that names
what was set and why it has no effect. A key that names data, a model or a reward is refused: its
mark says what to set ``instead``. Each mark says whose scripts carry the key. The sections inherit
from these classes, so that their own modules hold only what counts; when a key comes to mean
something, it moves there.
"""

from typing import Annotated, Any, Literal

from verl.names import Strategy
from verl.utils.settings import NonNegative, PositiveInt, Section, Unused

VERL = "verl's examples"
VERL_AGENT = "verl-agent's examples"
WHOLE_PANEL = Unused("the whole panel plays at once; its size is env.val_tasks", VERL)
TEXT_ONLY = Unused(
    "prompts of files are text; images come from environments",
    VERL,
    instead="leave it out",
)
PACKED = Unused("rows are always packed", VERL)
NOT_SPLIT = Unused("rows are not split over devices", VERL)
NO_REWARD_MODEL = Unused(
    "no reward model is run; environments and custom_reward_function give the reward", VERL
)
REWARD_NETWORK = Unused(
    "no reward model is run, and rewards would be the environment's",
    VERL,
    instead="custom_reward_function.path=FILE, a function that gives the reward",
)
IN_A_POOL = Unused("environments run in processes of a pool (env.num_workers)", VERL_AGENT)


class AcceptedData(Section):
    """Below ``data``: how rows are read and kept."""

    val_batch_size: Annotated[
        PositiveInt | None, Unused("the whole panel plays at once; its size is env.val_tasks", VERL)
    ] = None
    """tasks validated at once; null: the whole panel"""
    return_raw_chat: Annotated[bool, Unused("messages are always kept", VERL_AGENT)] = False
    """keep the message list beside the tokens"""
    image_key: Annotated[str, TEXT_ONLY] = "images"
    """column of the files that holds images"""


class AcceptedModel(Section):
    """Below ``actor_rollout_ref.model``: kernels."""

    use_remove_padding: Annotated[bool, PACKED] = False
    """compute on real tokens only"""
    use_liger: Annotated[bool, Unused("no Liger kernels are used", VERL)] = False
    """Liger kernels"""


class AcceptedActor(Section):
    """Below ``actor_rollout_ref.actor``: how the work is split and compiled."""

    ulysses_sequence_parallel_size: Annotated[int, NOT_SPLIT] = 1
    """sequence parallelism"""
    use_torch_compile: Annotated[bool, Unused("the model runs eagerly", VERL)] = False
    """compile the model"""


class AcceptedRollout(Section):
    """Below ``actor_rollout_ref.rollout``."""

    mode: Annotated[Literal["async", "sync"], Unused("engines are always asynchronous", VERL)] = (
        "async"
    )
    """how the engine is called"""


class AcceptedCriticModel(Section):
    """Below ``critic.model``."""

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
    """compute on real tokens only"""


class AcceptedCritic(Section):
    """Below ``critic``."""

    ulysses_sequence_parallel_size: Annotated[int, NOT_SPLIT] = 1
    """sequence parallelism"""


class AcceptedRewardModel(Section):
    """Below ``reward_model``: how a network that gives rewards would run."""

    strategy: Annotated[Strategy, NO_REWARD_MODEL] = "fsdp2"
    """how the model is sharded"""
    micro_batch_size_per_gpu: Annotated[PositiveInt | None, NO_REWARD_MODEL] = None
    """rows per forward"""
    use_dynamic_bsz: Annotated[bool | None, NO_REWARD_MODEL] = None
    """micro-batches by tokens"""
    forward_max_token_len_per_gpu: Annotated[int | None, NO_REWARD_MODEL] = None
    """tokens per forward"""
    max_length: Annotated[int | None, NO_REWARD_MODEL] = None
    """longest input"""
    launch_reward_fn_async: Annotated[bool, Unused("rewards are immediate", VERL)] = False
    """score while other work goes on"""
    model: Annotated[dict[str, Any], REWARD_NETWORK] = {}
    """the network of the reward model: path, input_tokenizer, ..."""


class AcceptedTrainer(Section):
    """Below ``trainer``."""

    max_critic_ckpt_to_keep: Annotated[
        PositiveInt | None,
        Unused("actor and critic share a checkpoint: max_actor_ckpt_to_keep", VERL),
    ] = None
    """newest critic checkpoints kept; null: all"""


class EnvResources(Section):
    """``env.resources_per_worker``: Ray resources per environment worker."""

    num_cpus: Annotated[NonNegative, IN_A_POOL] = 0.1
    """CPUs per environment worker"""
    num_gpus: Annotated[NonNegative, IN_A_POOL] = 0.0
    """GPUs per environment worker"""


class AcceptedEnv(Section):
    """Below ``env``."""

    resources_per_worker: EnvResources = EnvResources()
    """Ray resources per environment worker"""
