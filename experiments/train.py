"""Train a small transformer: ``flashmod-train --help``."""

from flashmod.experiments.cli import main

if __name__ == "__main__":
    main()
