"""Base class of actor and critic workers: one rank with a training engine and its checkpoints."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from verl.config.schema.actor_rollout_ref import ActorConfig
from verl.config.schema.critic import CriticConfig
from verl.config.schema.model import CheckpointConfig, TrainedModelConfig
from verl.models.forward_kind import ForwardSettings
from verl.models.hub import model_directory
from verl.models.loader import load_causal_lm
from verl.models.weights import WeightPurpose
from verl.protocol import DataProto
from verl.records import PROFILE, ProfileRequest, WrittenFiles
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker_group import Worker
from verl.utils.checkpoint import CheckpointError
from verl.utils.seeds import seed_everything
from verl.workers.collectives import TIMEOUT, get_backend, get_rank, resolve_device
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import EngineSave, load_engine, save_engine
from verl.workers.rows import Rows, drop_padding_rows
from verl.workers.update import StepOutcome, compute_update_metrics, plan_mini_batches

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


class TrainingWorker(Worker):
    """One rank that trains a model, or holds a frozen one.

    Args:
        seed: seed of all random generators of this worker; equal on all ranks.
        num_threads: CPU threads of this rank; None keeps the default of PyTorch.
        device: ``auto``, ``cpu`` or ``cuda``.
        checkpoint: the ``checkpoint`` section, which lists what a checkpoint contains.
    """

    def __init__(
        self, seed: int, num_threads: int | None, device: str, checkpoint: CheckpointConfig
    ) -> None:
        self.seed = seed
        self.device_name = resolve_device(device)
        self.num_updates = 0
        self._checkpoint_config = checkpoint
        self._engine: TrainEngine | None = None
        self._engine_save: EngineSave | None = None
        self._exported_files: list[Path] = []
        if num_threads:
            torch.set_num_threads(num_threads)

    @property
    def train_engine(self) -> TrainEngine:
        """The ``TrainEngine`` of this rank. Raises ``RuntimeError`` before ``init_model``."""
        if self._engine is None:
            raise RuntimeError(f"{type(self).__name__}: init_model() must be called first")
        return self._engine

    def _join_process_group(self) -> None:
        # All ranks have the same seed, so the initial state does not depend on the number of ranks.
        seed_everything(self.seed)
        self.init_process_group(get_backend(self.device_name), TIMEOUT.total_seconds())

    def _load_model(
        self,
        model: TrainedModelConfig,
        purpose: WeightPurpose = "policy",
        is_trained: bool = True,
        lora_adapter_path: str | None = None,
    ) -> "PreTrainedModel":
        assert model.path is not None  # derived for the critic, checked for the policy
        self.source = model_directory(model.path)
        return load_causal_lm(
            self.source,
            purpose=purpose,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
            external_lib=model.external_lib,
            gradient_checkpointing=is_trained and model.enable_gradient_checkpointing,
            lora_rank=model.lora_rank if is_trained else 0,
            lora_alpha=model.lora_alpha,
            target_modules=model.target_modules,
            lora_adapter_path=lora_adapter_path,
            attention=model.attn_implementation,
            without_weights=get_rank() > 0,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_forward_settings(self) -> ForwardSettings:
        """Return the settings with which the trainer counts the tokens to compute for rows."""
        return self.train_engine.forward_settings

    def _make_rows(self, data: DataProto) -> Rows:
        return Rows(data, self.device_name, self.train_engine.prefix_tree)

    def _run_update(
        self,
        role: str,
        section: ActorConfig | CriticConfig,
        data: DataProto,
        take_step: Callable[[Rows, DataProto, list[int]], StepOutcome],
    ) -> dict[str, float]:
        """Call ``take_step`` with the rows of each mini-batch, and return the metrics."""
        start_time = time.perf_counter()
        # Make ``rows`` before padding rows are dropped: a rank with only padding rows still passes
        # one of them through the model. Padding rows are last, so other row indices stay valid.
        rows = self._make_rows(data)
        data = drop_padding_rows(data)
        call_name = f"update_{role}"
        step = int(data.meta_info.get("global_step", self.num_updates))
        trace_context = _trace_call(data.meta_info.get(PROFILE), call_name)
        with self.train_engine.model_on_device(training=True), trace_context:
            outcomes = [
                take_step(rows, data, row_indices)
                for row_indices in plan_mini_batches(data, section, call_name, self.seed, step)
            ]
            self.train_engine.check_finite_weights()
        self.num_updates += 1
        seconds = time.perf_counter() - start_time
        return compute_update_metrics(role, self.train_engine, outcomes, rows.packed_size, seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: str) -> None:
        """Copy the state listed in ``checkpoint.contents`` and begin to write it to ``directory``.

        ``written_files`` returns the files when writing has ended. The caller must make sure that
        an incomplete checkpoint is never loaded.
        """
        contents = self._checkpoint_config.contents
        self._exported_files = (
            self._export_hf_files(Path(directory)) if "hf_model" in contents else []
        )
        self._engine_save = save_engine(
            self.train_engine,
            directory,
            saves_optimizer="optimizer" in contents,
            saves_random_states="extra" in contents,
        )

    def _export_hf_files(self, _directory: Path) -> list[Path]:
        """Write the model in Hugging Face format if the subclass can; return this rank's files."""
        return []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def written_files(self) -> WrittenFiles | None:
        """Return the files that this rank wrote since ``save_checkpoint``, or None while it writes.

        Raises ``CheckpointError`` if writing failed.
        """
        if self._engine_save is None or not self._engine_save.is_done():
            return None
        source = f"{type(self).__name__} rank {get_rank()} on {socket.gethostname()}"
        try:
            paths = [*self._engine_save.wait_for_files(), *self._exported_files]
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from error
        return WrittenFiles(source, {str(path): path.stat().st_size for path in paths})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str) -> None:
        """Load the state that ``save_checkpoint`` wrote with any number of ranks."""
        load_engine(self.train_engine, directory)


@contextlib.contextmanager
def _trace_call(profile_request: ProfileRequest | None, call: str) -> Iterator[None]:
    """Trace the ``with`` block by the PyTorch profiler if ``profile_request`` lists this rank.

    The file is ``<directory>/step<n>-<call>-rank<r>.json.gz``, for ui.perfetto.dev or
    chrome://tracing.
    """
    if profile_request is None or get_rank() not in profile_request.ranks:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as trace:
        yield
    directory = Path(profile_request.directory)
    directory.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(
        str(directory / f"step{profile_request.step}-{call}-rank{get_rank()}.json.gz")
    )
