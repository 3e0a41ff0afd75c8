"""Names of verl that only user code imports; this repository itself does not use them.

User code means scripts and modules written for verl or verl-agent. Each name can be imported from
the same module as in the original project. It is loaded on first use (``verl.utils.lazy``).

| public name | defined in | needed by |
|---|---|---|
| `verl.utils.seqlen_balancing`: `rearrange_micro_batches`, `get_reverse_idx` | `micro_batches` | workers of verl jobs that cut their own micro-batches |
| `verl.utils.torch_functional.pad_sequence_to_length` | `micro_batches` | collate functions and rollouts of verl jobs |
| `DataProto`: `make_iterator`, `save_to_disk`, `load_from_disk` | `data_proto` | workers and debugging scripts of verl jobs |
| `verl.single_controller.base.decorator`: `Execute`, `Dispatch.ALL_TO_ALL`, `DP_COMPUTE`, `RANK_ZERO` | `decorator`, members of an enum | worker classes of verl jobs |
| `verl.utils.tracking.Tracking` | `verl.record.tracking` | loggers of verl job scripts |
| `python -m verl.utils.report` | `verl.record.report` | scripts that write reports |

Two more names are kept for user code and are also used in this repository. Evaluation scripts
written for verl-agent need ``reset``, ``step`` and ``success_evaluator`` of
``EnvironmentManagerBase`` (``agent_system.environments.manager``). Job scripts written for it need
``agent_system.reward_manager.EpisodeRewardManager``.
"""  # noqa: E501
