"""The built-in fine-tuning job: a YAML file in, an adapter with its provenance out.

`config.load_config` reads the file (in the parent); `python -m tunewatch.finetune FILE` runs it (the child).
Nothing heavy is imported here, so that a parent without torch can say what is missing.
"""
