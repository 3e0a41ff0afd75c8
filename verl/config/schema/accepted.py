"""Keys that job scripts of this family of frameworks set and that change nothing here: all of them.

Of kernels, loaders and how work is split, a script that sets one runs, with one warning that names
what was set and why it has no effect. A key that names data, a model or a reward is refused: its
mark says what to set ``instead``. Each mark says whose scripts carry the key. The sections inherit
from these classes, so that their own modules hold only what counts; when a key comes to mean
something, it moves there.
"""

from typing import Annotated, Literal

from verl.config.settings import NonNegative, PositiveInt, Section, Unused
from verl.names import Strategy

VERL = "verl's examples"
VERL_AGENT = "verl-agent's examples"
WHOLE_PANEL = Unused("the whole panel plays at once; its size is env.val_tasks", VERL)
TEXT_ONLY = Unused(
    "prompts of files are text; images come from environments",
    VERL,
    instead="leave it out",
)
PACKED = Unused("rows are always packed", VERL)
WHOLE_ON_EACH = Unused("every rank holds the whole reward model", VERL)
BY_ROWS = Unused("it scores reward_model.micro_batch_size_per_gpu conversations at once", VERL)
OWN_TEMPLATE = Unused(
    "conversations come as messages, which the reward model's own tokenizer renders", VERL
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


class AcceptedRewardModel(Section):
    """Below ``reward_model``: how its work is split."""

    strategy: Annotated[Strategy, WHOLE_ON_EACH] = "fsdp2"
    """how the model is sharded"""
    use_dynamic_bsz: Annotated[bool | None, BY_ROWS] = None
    """micro-batches by tokens"""
    forward_max_token_len_per_gpu: Annotated[int | None, BY_ROWS] = None
    """tokens per forward"""
    launch_reward_fn_async: Annotated[bool, Unused("rewards are immediate", VERL)] = False
    """score while other work goes on"""


class RewardShards(Section):
    """``reward_model.model.fsdp_config``."""

    param_offload: Annotated[bool, WHOLE_ON_EACH] = False
    """keep parameters in host memory between passes"""
    reshard_after_forward: Annotated[bool, WHOLE_ON_EACH] = True
    """free gathered parameters between passes"""
    fsdp_size: Annotated[int, WHOLE_ON_EACH] = -1
    """ranks that share one copy of the parameters"""


class AcceptedRewardNetwork(Section):
    """Below ``reward_model.model``."""

    input_tokenizer: Annotated[str | None, OWN_TEMPLATE] = None
    """the policy's tokenizer"""
    use_remove_padding: Annotated[bool, Unused("rows are padded on the right", VERL)] = False
    """compute on real tokens only"""
    fsdp_config: RewardShards = RewardShards()
    """how the model is sharded"""


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
