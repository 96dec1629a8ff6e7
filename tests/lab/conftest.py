"""Fixtures of the tests that need simulated Sparks."""

from __future__ import annotations

from lab.fixtures import borrowed, lab_session, pytest_runtest_makereport, spark, sparks

__all__ = ["borrowed", "lab_session", "pytest_runtest_makereport", "spark", "sparks"]
