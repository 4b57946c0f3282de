"""`python -m aah_hf` is `aah`."""

from .cli import main

main()
