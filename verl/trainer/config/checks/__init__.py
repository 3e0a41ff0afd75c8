"""Cross-field checks by what they are about; ``verl.trainer.config.validate`` runs all of them."""
