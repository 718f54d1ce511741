"""`python -m fledge` is `fledge`."""

from fledge.cli.main import run

if __name__ == "__main__":
    run()
