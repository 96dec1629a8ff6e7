"""The lab: simulated DGX Sparks on one Linux machine, for people and tests without the hardware.

Run from the repository root as root: ``python3 -m lab up 2 --name demo``. See lab/README.md for what it is and what it
cannot show. An operator with real Sparks never needs it.
"""
