"""Cross-field checks by what they are about; ``verl.config.validate`` runs all of them."""
