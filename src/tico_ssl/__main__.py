"""`python -m tico_ssl`, which is what torchrun starts."""

from tico_ssl.cli import main

if __name__ == "__main__":
    main()
