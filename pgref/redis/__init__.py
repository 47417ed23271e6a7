"""Fenced sinks on Redis and Valkey. Needs redis-py, which ``celery[redis]`` brings along."""

from pgref.redis.sinks import Recorder, RedisSink

__all__ = ["Recorder", "RedisSink"]
