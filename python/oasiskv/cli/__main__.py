"""`python -m oasiskv.cli`, the same as `oasiskv`."""

from oasiskv.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
