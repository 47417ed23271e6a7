"""`make bench-celery`."""

from bench.celery_report import main

if __name__ == "__main__":
    main()
