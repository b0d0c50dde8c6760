"""Private, renamed or warning interfaces of torch, each wrapped once.

The rest of dure calls torch's public, stable names directly and this package for everything else. A new torch version
then means one folder to read and its tests to run (`tests/torchcompat`, on 2.11, 2.13 and 2.14).
"""
