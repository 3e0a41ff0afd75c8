"""The PPO framework: data protocol, worker groups, FSDP2 engines, rollout engines and trainers.

``verl.DataProto`` is imported on first use, so that the configuration packages do not import torch.
"""

from verl.utils.lazy import make_lazy_exports
from verl.utils.processes import limit_memory_arenas, make_openmp_threads_sleep

__version__ = "0.11.0"
__getattr__, __all__ = make_lazy_exports(__name__, {"DataProto": "protocol"})

# Every process of a run (driver, training rank, engine, collector) imports this package first, so
# that these settings take effect before torch is imported and threads are started.
make_openmp_threads_sleep()
limit_memory_arenas()
