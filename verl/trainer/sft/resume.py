"""Checkpoint from which a supervised run continues, and digests of its rows and batches.

``state.json`` of a checkpoint has the digest of all training rows, and that of the batches of the
steps before it. With other rows the run would continue another training.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl.config.problems import build_conflict
from verl.config.schema import SFTConfig
from verl.config.settings import ConfigError
from verl.trainer.sft.rows import SFTRow
from verl.utils.checkpoint import CheckpointManager, choose_checkpoint, convert_state_errors
from verl.utils.saved_state import is_count, read_state_value
from verl.workers.engine_state import check_engine_records

logger = logging.getLogger(__name__)
STEP_KEY, ROWS_KEY, BATCHES_KEY = "global_step", "rows_sha256", "batches_sha256"


def compute_rows_digest(rows: Sequence[SFTRow]) -> str:
    """Return the SHA-256 of token ids and loss weights of ``rows``, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(np.array(row.input_ids, dtype="<i8").tobytes())
        digest.update(np.array(row.loss_weights, dtype="<f8").tobytes())
    return digest.hexdigest()


def compute_batches_digest(batches: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of the row indices of ``batches``."""
    return hashlib.sha256(json.dumps(batches).encode()).hexdigest()


def choose_sft_checkpoint(
    cfg: SFTConfig, directory: Path, rows: Sequence[SFTRow], batches: Sequence[Sequence[int]]
) -> Path | None:
    """Return the checkpoint from which a run on ``rows`` continues; None for a new run.

    Log a warning if the steps before it had other batches: the run then repeats some rows and omits
    others. Raises ``ConfigError`` if the checkpoint is damaged or was trained on other rows.
    """
    checkpoint_manager = CheckpointManager(directory)
    resume_mode, resume_path = cfg.trainer.resume_mode, cfg.trainer.resume_from_path
    checkpoint = choose_checkpoint(checkpoint_manager, resume_mode, resume_path)
    if checkpoint is None:
        return None
    with convert_state_errors(checkpoint):
        state = checkpoint_manager.load_state(checkpoint)
        step = read_state_value(state, STEP_KEY, is_count, "an integer of at least 0")
    check_engine_records(checkpoint)
    # Older checkpoints have no digests.
    if ROWS_KEY in state and state[ROWS_KEY] != compute_rows_digest(rows):
        key = "data.train_files" if cfg.data.train_files else "data.episodes"
        why = f"the run would continue from {checkpoint}, which was trained on other rows"
        allowed = "data that give the rows (token ids, loss weights) with which the run started"
        fix = "trainer.experiment_name=ANOTHER for a new run, or trainer.resume_mode=disable"
        raise ConfigError(build_conflict(cfg, key, why, allowed, fix))
    if step >= len(batches):
        logger.warning(
            "step %d of checkpoint %s is not before the last of %d optimizer steps: nothing is "
            "left to train; fix: increase trainer.total_epochs or trainer.total_training_steps, or "
            "set trainer.experiment_name=ANOTHER for a new run",
            step,
            checkpoint,
            len(batches),
        )
    elif BATCHES_KEY in state and state[BATCHES_KEY] != compute_batches_digest(batches[:step]):
        logger.warning(
            "the first %d batches differ from those of checkpoint %s (data.tokens_per_batch, "
            "data.shuffle or trainer.seed has changed): some rows are repeated and others omitted",
            step,
            checkpoint,
        )
    return checkpoint
