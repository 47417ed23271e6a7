"""The table of guarantees and their tests: ``python -m pgref.conformance.table > docs/reference/guarantees.md``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping

from pgref.conformance.effects import EffectStoreConformance
from pgref.conformance.sinks import FencedSinkConformance

__all__ = ["GUARANTEES", "SUITES", "by_guarantee", "claims", "render"]

SUITES: Mapping[str, type] = {"effects": EffectStoreConformance, "sinks": FencedSinkConformance}

GUARANTEES: Mapping[str, str] = {
    "G1": "A done key returns its first result, without a lease.",
    "G2": "Uncertain is told before contended.",
    "G3": "An intent that expires unruled becomes uncertain and is never granted again.",
    "G4": "A key in flight is refused to all but its own holder, who gets the same grant again.",
    "G5": "While another key holds the resource, nothing is written.",
    "G6": "A grant takes the next fence of its resource and writes resource and intent together.",
    "G7": "Of any number of concurrent acquires one is granted, and none fails.",
    "G8": "The fences of a resource only rise.",
    "G9": "A key is refused to another input, in every state, without showing its result.",
    "G10": "A refused call changes nothing.",
    "G11": "A lease must fit by resource, newest fence and holder, checked in this order, and be this key's own.",
    "G12": "The first completion wins; later ones return its result.",
    "G13": "Renewing extends intent and resource from now, and only a live lease.",
    "G14": "A mark turns the key uncertain and keeps the resource.",
    "G15": "Release frees the resource and keeps the intent; abandon withdraws the intent.",
    "G16": "An expired attempt may still complete until it is superseded or ruled on.",
    "G17": "A completion that came too late is kept as evidence.",
    "G18": "An uncertain key has at most one reconciler at a time.",
    "G19": "The first ruling wins; a live intent is not ruled on.",
    "G20": "Applied ends in done, not applied in free; an UNSAFE key is freed by force only.",
    "G21": "Marks, expiries, rulings and force are in the history.",
    "G22": "The attempt number counts the grants of a key over its life.",
    "G23": "Only the store's clock judges expiry; a lease is live while now is before its expiry.",
    "G24": "Arguments outside the limits are refused before anything is sent.",
    "G25": "Retention removes old done keys only, in bounded batches.",
    "G26": "Every call can be repeated after a lost answer.",
    "G27": "A reconciler gets a fence to seal the sink with, so that what it then sees is final.",
    "G28": "After a failover all fences can be raised, which turns live intents uncertain.",
    "G30": "Comparing the fence and writing are one operation; a lower fence is refused.",
    "G31": "An equal fence passes, a higher one raises what was seen.",
    "G32": "An exception in a write undoes data and fence together.",
    "G33": "Under any interleaving the data belongs to the highest committed fence.",
    "G34": "A fence below 1 is refused; of an unknown resource none was seen.",
    "G40": "A task is claimed by one agent, judged in a fixed order.",
    "G41": "Claim tokens are never reused, and takeovers are counted.",
    "G42": "Only the token releases, completes or renews a claim.",
    "G43": "Renewing keeps token and generation.",
    "G44": "A dependency is satisfied when its task is done; an unknown one blocks.",
    "G45": "Seeding replaces content, all or nothing, and refuses cycles.",
    "G46": "Claiming the next task hands no task out twice and waits for no lock.",
    "G50": "A snapshot is saved only over a lower sequence.",
    "G51": "A missing snapshot is an error, and a payload returns byte-exact.",
    "G60": "An append over several streams is one transaction against expected versions.",
    "G61": "Concurrent appends end in one winner and clean conflicts.",
    "G62": "Unique keys hold across streams and are replaced as a set.",
    "G63": "Tenants never block each other.",
    "G64": "A repeated business key returns the original outcome.",
    "G65": "A reader by position sees every committed event exactly once.",
    "G66": "A repository re-runs the whole command on a conflict.",
    "G67": "Conflicts and violations are counted.",
    "G70": "Schemas are made once, by whoever comes first, and nothing outside them is touched.",
    "G71": "Migrations only add; the last release works on the new schema.",
}

_CLAIM = re.compile(r"(G\d+(?:, G\d+)*): ")


def claims(docstring: str | None) -> list[str]:
    """Return the guarantees that a test's docstring begins with."""
    match = _CLAIM.match(docstring or "")
    return match[1].split(", ") if match else []


def _tests() -> Iterator[tuple[str, list[str]]]:
    for noun, suite in SUITES.items():
        for name, function in inspect.getmembers(suite, inspect.isfunction):
            if name.startswith("test_"):
                yield f"{noun}: {name.removeprefix('test_').replace('_', ' ')}", claims(function.__doc__)


def by_guarantee() -> dict[str, list[str]]:
    """Return the tests of each guarantee, and under "" those that name none."""
    found: dict[str, list[str]] = {}
    for test, guarantees in _tests():
        for guarantee in guarantees or [""]:
            found.setdefault(guarantee, []).append(test)
    return found


def render() -> str:
    """Return docs/reference/guarantees.md."""
    tests = by_guarantee()
    rows = [f"| {name} | {claim} | {'<br>'.join(tests.get(name, ['not yet']))} |" for name, claim in GUARANTEES.items()]
    return "\n".join([_HEAD, *rows, ""])


_HEAD = """\
# Guarantees and their tests

Made by `python -m pgref.conformance.table` from the docstrings of the suite in `pgref.conformance`; do not edit.

| | Guarantee | Tests |
|---|---|---|"""


if __name__ == "__main__":
    sys.stdout.write(render())
