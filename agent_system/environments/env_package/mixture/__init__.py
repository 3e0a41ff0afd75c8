"""Several environments in one run, each as often as its weight says."""
