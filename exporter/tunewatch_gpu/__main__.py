"""`python -m tunewatch_gpu`."""

from tunewatch_gpu.cli import main

main()
