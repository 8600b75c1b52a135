"""What runs inside a training process.

Standard library only (torch and transformers are used when the process itself has imported them), Python 3.10
and later, and only relative imports: the folder works alone, under another package name, in an interpreter
that has no tunewatch installed. Nothing here raises into, blocks or slows the training.
"""
