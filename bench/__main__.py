"""`make bench`. The client processes import what they run, so it does not stand here."""

from bench.report import main

if __name__ == "__main__":
    main()
