"""One process per run that starts or adopts the training, watches it, judges its end and serves its metrics."""
