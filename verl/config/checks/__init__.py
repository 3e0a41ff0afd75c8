"""Cross-field checks, one module per subject; ``verl.config.validate`` runs all of them."""
