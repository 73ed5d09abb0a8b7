"""The server on a Ray cluster: one ingress that passes requests on to replicas of models."""
