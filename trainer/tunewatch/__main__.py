"""`python -m tunewatch`."""

from tunewatch.cli import main

main()
