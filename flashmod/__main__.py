"""``python -m flashmod``: versions, devices, tiles, and which backend a call would take."""

from .diagnosis import report

if __name__ == "__main__":
    print(report())
