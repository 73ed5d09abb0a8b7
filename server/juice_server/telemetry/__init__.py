"""Telemetry for operators: metrics, traces and logs."""
