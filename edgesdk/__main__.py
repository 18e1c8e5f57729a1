"""`python -m edgesdk` is `edgesdk`."""

from edgesdk.cli import main

if __name__ == "__main__":
    main()
