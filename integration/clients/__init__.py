"""Clients that people use, against a running server, in an environment of their own.

`make clients-test` runs these files in `.venv-clients`, in which JuICE is not installed. The server
is a process of `.venv`.
"""
