"""Training part of a supervised run, on one or several devices of one machine.

    run_sft ──SFTJob──▶ rank 0 ┐  all ranks have all rows and the same batches;
                 └────▶ rank 1 ┴▶ the rows of a batch are assigned to ranks ──▶ HF

The gradient of a step is that of the whole batch, independent of the number of ranks.
"""

import logging
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import AutoTokenizer, PreTrainedModel

from verl.config.schema import SFTConfig
from verl.config.schema.sft import SFTModelConfig
from verl.models.export import convert_to_hf_weights, save_adapters, save_hf, tied_names
from verl.models.loader import load_causal_lm
from verl.models.lora import lora_scales
from verl.models.policy import LM_PREFIX, PolicyModel
from verl.record.tracking import Tracking
from verl.trainer.sft.rows import SFTRow
from verl.trainer.sft.trainer import OptimizerStepResult, SFTTrainer
from verl.utils.checkpoint import CheckpointManager
from verl.utils.files import publish_directory
from verl.utils.logging import setup_logging
from verl.utils.processes import available_cpus, die_with_parent
from verl.utils.progress import Progress, enable_heartbeat_file, record_heartbeat
from verl.utils.seeds import seed_everything
from verl.utils.stacks import install_stack_dump_handler
from verl.workers.collectives import TIMEOUT, get_backend, get_rank, resolve_device
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import gather_full_weights

logger = logging.getLogger(__name__)
SFT_COMMAND = "main_sft"  # name of this command in the file list of its output
ADAPTER_FOLDER = "lora_adapter"  # in model.save_path, with LoRA
MAX_METRIC_LINES = 400  # about how many lines metrics.jsonl has, not counting held-out losses


@dataclass(frozen=True)
class SFTJob:
    """Input of every rank: paths of the run, the initial policy and the token rows.

    ``batches`` has the row indices of every optimizer step. ``resumed_checkpoint`` is the valid
    checkpoint from which the run continues, or None.
    """

    cfg: SFTConfig
    run_dir: Path
    checkpoints: Path
    log_file: Path
    initial_policy_directory: Path
    tokenizer: str
    rows: list[SFTRow]
    batches: list[list[int]]
    val_rows: list[SFTRow]
    resumed_checkpoint: Path | None


def count_local_ranks(cfg: SFTConfig) -> int:
    """Return ``trainer.n_gpus_per_node``; on GPUs at most the number of available GPUs."""
    configured_ranks = cfg.trainer.n_gpus_per_node
    if resolve_device(cfg.trainer.device) != "cuda":
        return configured_ranks
    return min(configured_ranks, torch.cuda.device_count())


def train_on_ranks(job: SFTJob, num_ranks: int) -> None:
    """Train on ``num_ranks`` devices of this machine.

    A single rank runs in this process. Several ranks run in one subprocess each.
    """
    if num_ranks == 1:
        train_and_save(job)
        return
    with tempfile.TemporaryDirectory(prefix="ranks-") as rendezvous_directory:
        # Find other ranks by a file, because another process could take a port.
        rank_arguments = (job, num_ranks, f"file://{rendezvous_directory}/rendezvous")
        ranks: Any = spawn(_run_rank, rank_arguments, nprocs=num_ranks, join=False, daemon=True)
        try:
            while not ranks.join():
                pass
        finally:
            # After an interruption the ranks would write until this process ends. A stopped rank
            # (SIGSTOP) would keep this process from ending.
            for process in ranks.processes:
                process.kill()


def _run_rank(rank_number: int, job: SFTJob, num_ranks: int, init_method: str) -> None:
    die_with_parent()
    install_stack_dump_handler(f"rank {rank_number}")
    trainer = job.cfg.trainer
    if rank_number == 0:
        enable_heartbeat_file()
        setup_logging(job.log_file)
    torch.set_num_threads(trainer.num_threads or max(1, available_cpus() // num_ranks))
    seed_everything(trainer.seed)
    device = resolve_device(trainer.device)
    if device == "cuda":
        torch.cuda.set_device(rank_number)
    # All ranks are on this machine, so their sockets need only the loopback interface.
    loopback_names = (name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next(loopback_names, "lo"))
    dist.init_process_group(
        get_backend(device),
        init_method=init_method,
        rank=rank_number,
        world_size=num_ranks,
        timeout=TIMEOUT,
    )
    try:
        train_and_save(job)
    finally:
        dist.destroy_process_group()


def train_and_save(job: SFTJob) -> None:
    """Run this rank's part of the training. Rank 0 writes the directory ``model.save_path``."""
    cfg, trainer = job.cfg, job.cfg.trainer
    row_lengths = [len(row) for row in job.rows]
    language_model = _load_start_policy(cfg.model, job.initial_policy_directory)
    schedule_steps = max(0, cfg.optim.total_training_steps) or len(job.batches)
    # Determine tied weights before the engine shards the parameters, which hides them.
    tied_parameters = tied_names(language_model)
    engine = TrainEngine(
        PolicyModel(language_model),
        device=trainer.device,
        dtype=cfg.model.dtype,
        fsdp=cfg.model.fsdp_config,
        optim=cfg.optim.model_copy(update={"total_training_steps": schedule_steps}),
        grad_clip=trainer.grad_clip,
    )
    # One checkpoint suffices for resuming. The policy is saved to model.save_path.
    checkpoints = CheckpointManager(job.checkpoints, max_to_keep=1)
    sft_trainer = SFTTrainer(
        engine,
        job.rows,
        job.batches,
        job.val_rows,
        max_tokens=cfg.data.max_token_len_per_gpu,
        test_freq=trainer.test_freq,
        save_freq=trainer.save_freq,
        checkpoints=checkpoints,
    )
    sft_trainer.resume(job.resumed_checkpoint)
    num_parameters = sum(p.numel() for p in engine.module.parameters())
    num_steps = len(job.batches)
    size_text = (
        f"{len(row_lengths):,} rows, {sum(row_lengths):,} tokens, {num_steps:,} optimizer steps"
    )
    logger.info("%s, %.1f million parameters", size_text, num_parameters / 1e6)
    _fit_and_show_progress(job, sft_trainer, checkpoints)
    full_weights = gather_full_weights(engine)
    adapter_scales = lora_scales(language_model)
    hf_weights = convert_to_hf_weights(
        language_model, full_weights, LM_PREFIX, adapter_scales, tied_parameters
    )
    if get_rank() > 0:
        return
    tokenizer = AutoTokenizer.from_pretrained(
        job.tokenizer, trust_remote_code=cfg.model.trust_remote_code
    )
    with publish_directory(
        Path(cfg.model.save_path), cfg.model.overwrite, SFT_COMMAND
    ) as directory:
        save_hf(language_model, hf_weights, directory, source=None)
        tokenizer.save_pretrained(directory)
        if adapter_scales:
            adapter_directory = directory / ADAPTER_FOLDER
            save_adapters(
                language_model,
                full_weights,
                LM_PREFIX,
                adapter_directory,
                source=job.initial_policy_directory,
            )


def _load_start_policy(model: SFTModelConfig, policy_directory: Path) -> PreTrainedModel:
    return load_causal_lm(
        policy_directory,
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        lora_rank=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=model.target_modules,
        without_weights=get_rank() > 0,
    )


def _fit_and_show_progress(
    job: SFTJob, sft_trainer: SFTTrainer, checkpoints: CheckpointManager
) -> None:
    """Take all optimizer steps. Rank 0 also shows the steps and records their metrics."""
    if get_rank() > 0:
        sft_trainer.fit(lambda _step: None)
        return
    first_step = sft_trainer.step
    checkpoints.set_aside_later_checkpoints(first_step)
    with SFTProgress(job.cfg, job.run_dir, len(sft_trainer.batches), first_step) as progress:
        earlier_batches = sft_trainer.batches[:first_step]
        progress.tokens = float(sum(len(job.rows[i]) for batch in earlier_batches for i in batch))
        sft_trainer.fit(progress.on_step)


class SFTProgress:
    """Progress bar and metrics log of ``SFTTrainer.fit``. Use it as a context manager."""

    def __init__(
        self, cfg: SFTConfig, run_dir: Path, total_steps: int, first_step: int = 0
    ) -> None:
        trainer = cfg.trainer
        # The console output of ``Tracking`` is for rollouts. The progress bar below replaces it.
        tracker_names = [name for name in trainer.logger if name != "console"]
        run_name = (trainer.project_name, trainer.experiment_name)
        resume_step = first_step or None
        self.tracking = Tracking(*run_name, tracker_names, cfg, run_dir, resume_step=resume_step)
        self.total_steps = total_steps
        self.tokens = 0.0  # tokens of all steps, including those before a resumption
        self.metrics_interval = max(1, total_steps // MAX_METRIC_LINES)
        self.progress: Progress | None = None
        if "console" in trainer.logger:
            self.progress = Progress("imitating", total_steps, "steps", num_done_before=first_step)

    def on_step(self, record: OptimizerStepResult) -> None:
        """Show the step; write its metrics at about ``MAX_METRIC_LINES`` steps."""
        # The watchdog needs this heartbeat even if no progress bar is shown.
        record_heartbeat("imitating")
        metrics = record.metrics | {"training/global_step": float(record.step)}
        self.tokens += metrics.get("perf/tokens", 0.0)
        metrics["perf/total_num_tokens"] = self.tokens
        has_held_out_loss = "val/loss" in metrics
        if record.is_last or has_held_out_loss or record.step % self.metrics_interval == 0:
            self.tracking.log(metrics, record.step)
        if self.progress is not None and "train/loss" in metrics:
            self.progress.set_done(record.step, f"loss {metrics['train/loss']:.3f}")
        if has_held_out_loss:
            loss = metrics["val/loss"]
            agent_loss = metrics.get("val/agent_loss", float("nan"))
            log_format = "step %d of %d: held-out loss %.4f, agent tokens %.4f"
            logger.info(log_format, record.step, self.total_steps, loss, agent_loss)

    def __enter__(self) -> "SFTProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.progress is not None:
            self.progress.close()
        self.tracking.finish()
